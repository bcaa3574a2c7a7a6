"""A plain executor of schedules to compare the checker with: mailboxes, values, and ranks in any order."""

from __future__ import annotations

import random
from collections import defaultdict, deque

from braid.schedule import Act, Schedule, channel_of


class Refused(Exception):
    """The lists cannot be run as they are."""


def run(schedule: Schedule, seed: int) -> None:
    """Run all lists, always choosing at random which rank goes next; raise `Refused` where it goes wrong.

    A forward's value is the tuple of segments that the micro-batch has passed, so a wrong input shows.
    """
    chance = random.Random(seed)
    mail: dict[object, deque[object]] = defaultdict(deque)
    memory: list[dict[tuple[str, int, int], object]] = [{} for _ in schedule.ops]
    place = [0] * schedule.pp
    done: set[tuple[Act, int, int]] = set()
    while unfinished := [rank for rank, ops in enumerate(schedule.ops) if place[rank] < len(ops)]:
        chance.shuffle(unfinished)
        if not any(_step(schedule, rank, place, mail, memory[rank], done) for rank in unfinished):
            raise Refused("deadlock")
    wanted = schedule.micro_batches * schedule.segments * (2 if schedule.backward else 1)
    if len(done) != wanted or any(mail.values()):
        raise Refused("something is left over")


def _step(schedule, rank, place, mail, memory, done) -> bool:
    """One op of one rank; False where it has to wait."""
    op = schedule.ops[rank][place[rank]]
    m, s = op.micro_batch, op.segment
    last = schedule.segments - 1
    if op.act in (Act.F, Act.B):
        if schedule.holder[s] != rank or (op.act, m, s) in done:
            raise Refused(f"{op} on rank {rank}")
        name = op.act.value
        begins = s == (0 if op.act is Act.F else last)
        path = tuple(range(s)) if op.act is Act.F else tuple(range(last, s, -1))
        given = () if begins else memory.pop((f"{name} in", m, s), None)
        if given != path or (op.act is Act.B and memory.pop(("kept", m, s), None) is None):
            raise Refused(f"{op} reads {given}")
        if op.act is Act.F:
            memory["kept", m, s] = True
        done.add((op.act, m, s))
        onward = s + (1 if op.act is Act.F else -1)
        if 0 <= onward <= last:
            local = schedule.holder[onward] == rank
            memory[(f"{name} in", m, onward) if local else (f"{name} out", m, s)] = (*path, s)
    elif op.act in (Act.SEND_F, Act.SEND_B):
        value = memory.pop((f"{op.act.direction} out", m, s), None)
        if value is None:
            raise Refused(f"{op} has nothing to send")
        mail[channel_of(rank, op)].append(((m, value[-1]), value))
    else:
        box = mail[channel_of(rank, op)]
        if not box:
            return False
        stamp, value = box.popleft()
        if stamp != (m, s - 1 if op.act is Act.RECV_F else s + 1):
            raise Refused(f"{op} gets {stamp}")
        memory[f"{op.act.direction} in", m, s] = value
    place[rank] += 1
    return True
