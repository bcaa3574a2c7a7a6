"""Every layout in which files hold experts is read, and written, to the bit; what does not fit is listed."""

from __future__ import annotations

import itertools

import pytest
import torch

from braid.errors import CheckpointError, ConfigError
from braid.interchange import adapter_for, convert, reader_of
from braid.interchange.hub import family_of
from braid.interchange.megatron import reader
from braid.interchange.moves import PerHead, Stacked, joined
from tests.interchange.layouts import EXPERTS, FFN, PLACES, WAYS, experts, megatron, mixture, same

BOTH = ("grouped", "indexed")
LAYER = "decoder.layers.1.mlp.experts"


def faults(shape, theirs) -> list[str]:
    """What is said of files that do not fit, without the remedy behind it."""
    with pytest.raises(CheckpointError) as caught:
        convert(theirs, reader(), shape, "to_ours")
    *told, remedy = str(caught.value).split("\n  ")[1:]
    assert remedy.startswith("set ")
    return told


# ------------------------------------------------------------------------------- whole, in every layout


@pytest.mark.parametrize(("activation", "bias"), [("swiglu", True), ("relu2", True), ("relu2", False)])
@pytest.mark.parametrize("way", WAYS)
def test_a_layout_is_written_as_by_hand_and_read_back(way: str, activation: str, bias: bool) -> None:
    shape, ours = mixture(activation=activation, bias=bias)
    written = convert(ours, adapter_for("megatron", "indexed", experts=way), shape, "to_theirs")
    same(written, megatron(shape, ours, [way] * 4))
    same(convert(written, reader(), shape, "to_ours"), ours)


@pytest.mark.parametrize("ways", list(itertools.product(BOTH, repeat=4)), ids="-".join)
@pytest.mark.parametrize("bias", [True, False])
def test_each_linear_and_each_leaf_has_a_layout_of_its_own(ways: tuple[str, ...], bias: bool) -> None:
    shape, ours = mixture(bias=bias)
    same(convert(megatron(shape, ours, ways), reader(), shape, "to_ours"), ours)


def test_each_layer_has_a_layout_of_its_own() -> None:
    shape, ours = mixture()
    one = megatron(shape, ours, ["packed", "indexed", "each", "sequential"])
    other = megatron(shape, ours, ["indexed", "stacked", "packed", "grouped"])
    mixed = {n: t for n, t in one.items() if not n.startswith("decoder.layers.0.")}
    mixed |= {n: t for n, t in other.items() if n.startswith("decoder.layers.0.")}
    same(convert(mixed, reader(), shape, "to_ours"), ours)


@pytest.mark.parametrize("interleave", [1, 2, FFN])
@pytest.mark.parametrize("way", [way for way in WAYS if way != "each"])
def test_gate_and_up_may_alternate_in_blocks(way: str, interleave: int) -> None:
    shape, ours = mixture()
    adapter = adapter_for("megatron", "indexed", experts=way, interleave=interleave)
    written = convert(ours, adapter, shape, "to_theirs")
    same(written, megatron(shape, ours, [way] * 4, interleave))
    same(convert(written, reader(interleave=interleave), shape, "to_ours"), ours)
    straight = convert(written, reader(), shape, "to_ours")["blocks.0.moe.experts.0.up.weight"]
    assert torch.equal(straight, ours["blocks.0.moe.experts.0.up.weight"]) == (interleave == FFN)


def test_blocks_of_two_rows_come_apart() -> None:
    rows = torch.tensor([1, 2, 5, 6, 3, 4, 7, 8])
    assert torch.cat(list(PerHead(2, (2, 2)).to_ours(rows))).tolist() == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize(
    ("way", "interleave", "reason"),
    [("stacked", 3, "do not fit"), ("stacked", -2, "is no number of rows"), ("each", 2, "another layout")],
)
def test_an_interleave_without_a_meaning_is_refused(way: str, interleave: int, reason: str) -> None:
    shape, ours = mixture()
    with pytest.raises(ConfigError, match=reason):
        convert(
            ours, adapter_for("megatron", "indexed", experts=way, interleave=interleave), shape, "to_theirs"
        )


@pytest.mark.parametrize("form", ["hybrid", "stacked"])
@pytest.mark.parametrize("way", WAYS)
def test_layers_may_be_told_in_other_ways_besides(form: str, way: str) -> None:
    shape, ours = mixture("[*E][*E]" if form == "stacked" else "M-[*E]/*E")
    written = convert(ours, adapter_for("megatron", form, experts=way), shape, "to_theirs")
    same(convert(written, reader(), shape, "to_ours"), ours)


@pytest.mark.parametrize("form", ["hub", "memory", "packed"])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_files_of_the_hub_may_have_any_form(family: str, form: str) -> None:
    shape, ours = mixture(bias=False, shared_ffn=0)
    written = dict(convert(ours, adapter_for(family, form), shape, "to_theirs"))
    if form == "packed":
        rows = [
            ours[f"blocks.0.moe.experts.{n}.{part}.weight"] for n in range(EXPERTS) for part in ("gate", "up")
        ]
        assert torch.equal(written["model.layers.0.mlp.experts.gate_up_proj"], torch.cat(rows))
    same(convert(written, reader_of(family_of(family)), shape, "to_ours"), ours)


# ------------------------------------------------------------------------------ what files may hold besides


@pytest.mark.parametrize("place", PLACES, ids="-".join)
class TestWhatFilesHold:
    """The table of what may be there of one linear: one parameter, some of one per expert, both, or neither."""

    def test_one_parameter_and_some_of_others(self, place: tuple[str, str]) -> None:
        shape, ours = mixture()
        theirs = megatron(shape, ours, ["grouped"] * 4)
        stray = f"{LAYER}.{place[0]}.{place[1]}1"
        assert faults(shape, theirs | {stray: torch.zeros(1)}) == [f"extra    {stray}"]

    def test_one_parameter_and_all_of_others(self, place: tuple[str, str]) -> None:
        shape, ours = mixture()
        theirs = megatron(shape, ours, ["grouped"] * 4) | experts(ours, 1, *place, "indexed")
        names = [f"{LAYER}.{place[0]}.{place[1]}{number}" for number in range(EXPERTS)]
        assert faults(shape, theirs) == [f"extra    {name}" for name in names]

    def test_some_of_many(self, place: tuple[str, str]) -> None:
        shape, ours = mixture()
        theirs = megatron(shape, ours, ["indexed"] * 4)
        name = f"{LAYER}.{place[0]}.{place[1]}1"
        del theirs[name]
        assert faults(shape, theirs) == [f"missing  {name}"]

    def test_some_of_many_and_one_parameter(self, place: tuple[str, str]) -> None:
        shape, ours = mixture()
        theirs = megatron(shape, ours, ["indexed"] * 4) | experts(ours, 1, *place, "grouped")
        names = [f"{LAYER}.{place[0]}.{place[1]}{number}" for number in range(EXPERTS)]
        del theirs[names[1]]
        assert faults(shape, theirs) == [f"extra    {name}" for name in (names[0], names[2])]

    def test_none(self, place: tuple[str, str]) -> None:
        shape, ours = mixture()
        theirs = megatron(shape, ours, ["indexed"] * 4)
        names = list(experts(ours, 1, *place, "indexed"))
        left = {name: tensor for name, tensor in theirs.items() if name not in names}
        assert faults(shape, left) == [f"missing  {name}" for name in names]

    def test_names_are_compared_whole(self, place: tuple[str, str]) -> None:
        shape, ours = mixture()
        theirs = megatron(shape, ours, ["indexed"] * 4)
        name = f"{LAYER}.{place[0]}.{place[1]}1"
        theirs |= {f"chunk_a.{name}": theirs[name], f"chunk_b.{name}": theirs.pop(name)}
        assert faults(shape, theirs) == [
            f"missing  {name}",
            f"extra    chunk_a.{name}",
            f"extra    chunk_b.{name}",
        ]


@pytest.mark.parametrize("way", BOTH)
def test_biases_of_a_model_without_any_are_left_over(way: str) -> None:
    shape, ours = mixture(bias=False)
    theirs = megatron(shape, ours, [way] * 4)
    end = "" if way == "grouped" else "0"
    stray = {f"{LAYER}.{linear}.bias{end}": torch.zeros(1) for linear in ("linear_fc1", "linear_fc2")}
    assert faults(shape, theirs | stray) == [f"extra    {name}" for name in stray]


# ----------------------------------------------------------------------------------------------- stacks


def test_a_stack_comes_apart_with_and_without_a_dim_for_experts() -> None:
    tensor = torch.arange(12)
    apart = Stacked((3,), joined(4)).to_ours(tensor.view(3, 4))
    assert [part.tolist() for part in apart] == tensor.view(3, 4).tolist()
    folded = Stacked((3,), joined(2), folded=True)
    assert [part.tolist() for part in folded.to_ours(tensor.view(6, 2))] == tensor.view(3, 2, 2).tolist()
    assert torch.equal(folded.to_theirs(folded.to_ours(tensor.view(6, 2))), tensor.view(6, 2))


@pytest.mark.parametrize(("folded", "shape"), [(False, (2, 4)), (False, ()), (True, (4, 2)), (True, ())])
def test_a_stack_of_another_number_is_refused_with_its_shape(folded: bool, shape: tuple[int, ...]) -> None:
    with pytest.raises(CheckpointError, match=rf"has the shape \[{', '.join(map(str, shape))}\]"):
        Stacked((3,), joined(4), folded=folded).to_ours(torch.zeros(shape))


def test_experts_of_one_row_are_no_riddle() -> None:
    """Where each expert has one row, a stack and a fold have as many rows; their dims tell them apart."""
    shape, ours = mixture(activation="relu2", ffn=1)
    for way in ("grouped", "packed"):
        same(convert(megatron(shape, ours, [way] * 4), reader(), shape, "to_ours"), ours)
