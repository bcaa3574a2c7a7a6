"""Quantised checkpoints: fp8 in blocks and MXFP4 become the weights that they stand for."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from braid.errors import CheckpointError
from braid.interchange import adapter_for, convert, from_hf
from braid.interchange.convert import apart
from braid.interchange.files import FileTensor, SafetensorsFolder
from braid.interchange.moves import PerHead, Same, Stacked, Transposed
from braid.interchange.quantized import Dequantized, Fp8Blocks, Mxfp4
from braid.interchange.sliced import Index
from braid.interchange.tables import NameLink


def fp8(rows: int, columns: int, block: tuple[int, int], seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Quantised values, their scales, and the weight in float64, computed entry by entry."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-rows // block[0]), -(-columns // block[1]), generator=generator) + 0.1
    weight = torch.empty(rows, columns, dtype=torch.float64)
    for row in range(rows):
        for column in range(columns):
            weight[row, column] = (
                values[row, column].double() * scales[row // block[0], column // block[1]].double()
            )
    return values, scales, weight


@pytest.mark.parametrize(("rows", "columns"), [(4, 6), (5, 7), (1, 1), (3, 9)])
def test_a_block_has_one_scale_also_at_ragged_edges(rows: int, columns: int, tmp_path: Path) -> None:
    values, scales, weight = fp8(rows, columns, (2, 3))
    bias = torch.randn(rows)
    save_file({"a.weight": values, "a.weight_scale_inv": scales, "b": bias}, tmp_path / "model.safetensors")
    read = Dequantized(SafetensorsFolder(tmp_path), Fp8Blocks((2, 3)))
    assert set(read) == set(read.outlines()) == {"a.weight", "b"}
    assert read.outlines()["a.weight"].shape == weight.shape
    # Rounded twice, from the exact product to float32 and to bfloat16: both are the nearest here.
    assert torch.equal(read["a.weight"], weight.float().bfloat16())
    assert torch.equal(read["b"], bias)


def test_scales_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    values, scales, _ = fp8(4, 6, (2, 3))
    stored = {"a.weight": values, "a.weight_scale_inv": scales[:1].clone()}
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"a\.weight is \[4, 6\] with scales \[1, 2\]"):
        Dequantized(SafetensorsFolder(tmp_path), Fp8Blocks((2, 3)))


def test_mxfp4_has_the_low_half_of_a_byte_first(tmp_path: Path) -> None:
    codes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    codes += [-code for code in codes]
    blocks = torch.arange(256, dtype=torch.uint8).view(2, 4, 2, 16)
    scales = torch.tensor([[[127, 128], [120, 3], [7, 250], [100, 140]]] * 2, dtype=torch.uint8)
    save_file({"w_blocks": blocks, "w_scales": scales}, tmp_path / "model.safetensors")
    read = Dequantized(SafetensorsFolder(tmp_path), Mxfp4())
    assert list(read) == ["w"]
    assert read.outlines()["w"].shape == read["w"].shape == (2, 64, 4)
    expected = torch.empty(2, 4, 64, dtype=torch.float64)
    for place, byte in enumerate(range(256)):
        outer, group, within = place // 128, place // 16 % 2, place % 16
        row = place // 32 % 4
        scale = 2.0 ** (int(scales[outer, row, group]) - 127)
        start = group * 32 + within * 2
        expected[outer, row, start] = codes[byte & 15] * scale
        expected[outer, row, start + 1] = codes[byte >> 4] * scale
    assert torch.equal(read["w"].double(), expected.transpose(1, 2))


def test_gpt_oss_reads_alike_from_mxfp4_and_from_what_transformers_makes_of_it(tmp_path: Path) -> None:
    """Sizes are equal, as in the published models, so that no shape gives a transposed matrix away."""
    transformers = pytest.importorskip("transformers")
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    config = transformers.GptOssConfig(
        vocab_size=17,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_local_experts=3,
        num_experts_per_tok=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    model = transformers.GptOssForCausalLM(config).bfloat16()
    wanted, stored = dict(model.state_dict()), dict(model.state_dict())
    generator = torch.Generator().manual_seed(1)
    for name in [name for name in wanted if name.endswith("_proj") and "experts" in name]:
        outputs = 64 if "gate_up" in name else 32
        blocks = torch.randint(0, 256, (3, outputs, 1, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(120, 130, (3, outputs, 1), dtype=torch.uint8, generator=generator)
        wanted[name] = convert_moe_packed_tensors(blocks, scales)
        del stored[name]
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(stored, tmp_path / "model.safetensors")
    settings = {**config.to_dict(), "quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    shape, read = from_hf(tmp_path)
    expected = convert(wanted, adapter_for("gpt_oss", "memory"), shape, "to_ours")
    assert read.keys() == expected.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in expected.items())


def test_what_is_not_quantised_passes_through(tmp_path: Path) -> None:
    tensors = {"a.weight": torch.randn(3, 3), "a.bias": torch.randn(3)}
    save_file(tensors, tmp_path / "model.safetensors")
    read = Dequantized(SafetensorsFolder(tmp_path), Fp8Blocks((128, 128)))
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


class Counting(SafetensorsFolder):
    """A folder that counts the bytes that are read of each tensor."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.read: Counter[str] = Counter()
        self.largest = 0

    def count(self, name: str, tensor: Tensor) -> Tensor:
        self.read[name] += tensor.nbytes
        self.largest = max(self.largest, tensor.nbytes)
        return tensor

    def __getitem__(self, name: str) -> Tensor:
        return self.count(name, super().__getitem__(name))

    def opened(self, name: str) -> FileTensor:
        return CountingTensor(self._files[name], name, self)


@dataclass(frozen=True)
class CountingTensor(FileTensor):
    counts: Counting

    def __getitem__(self, index: Index) -> Tensor:
        return self.counts.count(self.name, super().__getitem__(index))


EXPERTS, OUTPUTS, GROUPS = 5, 8, 2


def test_an_expert_of_a_stack_is_read_and_widened_by_itself(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(2)
    blocks = torch.randint(0, 256, (EXPERTS, OUTPUTS, GROUPS, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(120, 130, (EXPERTS, OUTPUTS, GROUPS), dtype=torch.uint8, generator=generator)
    save_file({"w_blocks": blocks, "w_scales": scales}, tmp_path / "model.safetensors")
    whole = Dequantized(SafetensorsFolder(tmp_path), Mxfp4())["w"]
    files = Counting(tmp_path)
    move = Stacked((EXPERTS,), Transposed(PerHead(OUTPUTS // 2, (1, 1))))
    names = tuple(f"{expert}.{part}" for expert in range(EXPERTS) for part in ("gate", "up"))
    ours = apart(Dequantized(files, Mxfp4()), [NameLink(theirs="w", ours=names, move=move)])
    for name, expected in zip(names, move.to_ours(whole), strict=True):
        assert torch.equal(ours[name], expected)
    assert files.read == {"w_blocks": blocks.nbytes, "w_scales": scales.nbytes}
    assert files.largest == blocks[0].nbytes


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("dims", [(5,), (2, 5)])
def test_an_entry_of_a_plain_stack_is_read_by_itself(
    dims: tuple[int, ...], folded: bool, tmp_path: Path
) -> None:
    entries = torch.randn(*dims, 3, 7)
    stored = entries.flatten(-3, -2) if folded else entries
    save_file({"w": stored.contiguous()}, tmp_path / "model.safetensors")
    files, move = Counting(tmp_path), Stacked(dims, Same(), folded)
    names = tuple(map(str, range(prod(dims))))
    ours = apart(files, [NameLink(theirs="w", ours=names, move=move)])
    for name, expected in zip(names, entries.view(-1, 3, 7), strict=True):
        assert torch.equal(ours[name], expected)
    assert files.read == {"w": entries.nbytes}
    assert files.largest == entries.nbytes // len(names)


def test_rows_of_a_quantised_matrix_are_those_of_the_whole(tmp_path: Path) -> None:
    values, scales, weight = fp8(6, 7, (2, 3))
    save_file({"w": values, "w_scale_inv": scales}, tmp_path / "model.safetensors")
    read = Dequantized(SafetensorsFolder(tmp_path), Fp8Blocks((2, 3)))
    part = read.opened("w")[slice(1, 4), slice(2, 3)]
    assert torch.equal(part, weight[1:4, 2:3].float().bfloat16())
