"""Ops: what a person writes and reads, and how both sides of a message agree on it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.schedule import (
    Act,
    Collective,
    Op,
    channel_of,
    interleaved,
    message_of,
    one_f_one_b,
    parse_op,
)
from tests.schedule.cases import parse_ops

NUMBERS = st.integers(0, 300)
NAMES = st.text(st.sampled_from("abcxyz_0123456789"), min_size=1, max_size=8)
COLLECTIVES = st.builds(
    Collective,
    communicator=NAMES,
    label=NAMES,
    members=st.sets(NUMBERS, min_size=1, max_size=4).map(lambda ranks: tuple(sorted(ranks))),
)


@settings(deadline=None)
@given(
    act=st.sampled_from(Act), numbers=st.tuples(NUMBERS, NUMBERS, NUMBERS), collectives=st.lists(COLLECTIVES)
)
def test_every_op_reads_back_as_it_is_written(act, numbers, collectives):
    micro_batch, segment, peer = numbers
    op = Op(
        act=act,
        micro_batch=micro_batch if act.direction or act.copies else None,
        segment=segment if act.direction or act.copies else None,
        slot=peer if act.copies else None,
        peer=peer if act.sends or act.receives else None,
        collectives=tuple(collectives),
    )
    assert parse_op(str(op)) == op


@settings(deadline=None)
@given(
    act=st.sampled_from([act for act in Act if act.sends or act.receives]),
    numbers=st.tuples(NUMBERS, NUMBERS),
    edge=st.none() | st.text(st.sampled_from("abcxyz_.0123456789"), min_size=1, max_size=8),
    peers=st.sets(NUMBERS, min_size=1, max_size=4).map(sorted),
)
def test_every_message_between_modules_reads_back_as_it_is_written(act, numbers, edge, peers):
    where = {"micro_batch": numbers[0], "segment": numbers[1], "edge": edge}
    op = Op(act=act, **where, peer=peers[0], further=tuple(peers[1:]))
    assert parse_op(str(op)) == op
    assert op.peers == tuple(peers)


def test_the_text_of_a_message_between_modules_names_its_edge_and_all_its_peers():
    send = Op(act=Act.SEND_F, micro_batch=3, segment=5, edge="vision", peer=0, further=(1,))
    receive = Op(act=Act.RECV_F, micro_batch=3, segment=0, edge="vision", peer=4)
    assert (str(send), str(receive)) == ("SEND_F3.5{vision}>0,1", "RECV_F3.0{vision}<4")
    assert message_of(send) == message_of(receive) == ("F", 3, "vision")


def test_the_text_of_a_message_points_to_its_peer():
    send = Op(act=Act.SEND_F, micro_batch=0, segment=2, peer=3)
    receive = Op(act=Act.RECV_F, micro_batch=0, segment=3, peer=2)
    assert (str(send), str(receive)) == ("SEND_F0.2>3", "RECV_F0.3<2")


def test_both_sides_of_a_message_name_the_same_message_on_the_same_channel():
    for sent, received in (("SEND_F5.2>3", "RECV_F5.3<2"), ("SEND_B5.3>2", "RECV_B5.2<3")):
        send, receive = parse_op(sent), parse_op(received)
        assert message_of(send) == message_of(receive)
        assert channel_of(receive.peer, send) == channel_of(send.peer, receive)


@pytest.mark.parametrize(
    "text", ["", "G0.1", "F0", "F.1", "SEND_F0.1<2", "RECV_F0.1>2", "F0.1[x]", "f0.1", "F0.01"]
)
def test_what_is_no_op_is_refused(text):
    with pytest.raises(ValueError, match=r"not an op|not a valid Act"):
        parse_op(text)


def test_a_schedule_shows_one_line_per_rank():
    schedule = one_f_one_b(2, 1)
    assert str(schedule) == "0: F0.0 SEND_F0.0>1 RECV_B0.0<1 B0.0\n1: RECV_F0.1<0 F0.1 B0.1 SEND_B0.1>0"
    assert parse_ops(str(schedule).splitlines()[0].removeprefix("0: ")) == schedule.ops[0]


def test_channels_are_those_of_neighbours_and_of_the_way_round():
    assert one_f_one_b(1, 3).channels() == ()
    assert one_f_one_b(3, 3).channels() == (("B", 1, 0), ("B", 2, 1), ("F", 0, 1), ("F", 1, 2))
    assert interleaved(2, 2, 2).channels() == (("B", 0, 1), ("B", 1, 0), ("F", 0, 1), ("F", 1, 0))
