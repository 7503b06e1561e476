"""Stacked experts in memory, one tensor per expert in files."""

from __future__ import annotations

import numpy as np
import pytest

from paddlenlp_ext.checkpoint.file_layouts.base import FileLayout
from paddlenlp_ext.checkpoint.file_layouts.stacked_experts import StackedExperts
from paddlenlp_ext.checkpoint.safetensors import LazyTensor, SafetensorsFile, write_safetensors
from paddlenlp_ext.sharding_spec import Shard
from tests.common.arrays import normal

LAYOUT = StackedExperts(
    {
        "mlp.experts.gate_up_proj.weight": ("moe.{}.w1.weight", "moe.{}.w3.weight"),
        "mlp.experts.down_proj.weight": ("moe.{}.w2.weight",),
    },
    {"mlp.gate.weight": "moe.gate.weight"},
    unused=r"model\.layers\.2\..*",
)
LAYER = "model.layers.0."
STORED = {
    **{
        f"{LAYER}moe.{e}.w{w}.weight": normal(10 * e + w, *((3, 5) if w == 2 else (4, 3)))
        for e in range(3)
        for w in (1, 2, 3)
    },
    f"{LAYER}moe.gate.weight": normal(7, 3, 3),
    "model.norm.weight": normal(8, 3),
    "model.layers.2.norm.weight": normal(9, 3),
}
GATE_UP = np.stack(
    [np.concatenate([STORED[f"{LAYER}moe.{e}.w1.weight"], STORED[f"{LAYER}moe.{e}.w3.weight"]]) for e in range(3)]
)


@pytest.fixture
def stored(tmp_path):
    write_safetensors(tmp_path / "model.safetensors", STORED)
    return SafetensorsFile(tmp_path / "model.safetensors")


def test_open_stacks_experts_and_renames_the_rest(stored):
    weights = LAYOUT.open(stored)
    assert set(weights.names()) == {
        *(f"{LAYER}mlp.{name}" for name in ("experts.gate_up_proj.weight", "experts.down_proj.weight", "gate.weight")),
        "model.norm.weight",
    }
    name = f"{LAYER}mlp.experts.gate_up_proj.weight"
    assert weights.shape(name) == (3, 8, 3) and weights.dtype(name) == "float32"
    np.testing.assert_array_equal(weights.read(name), GATE_UP)
    np.testing.assert_array_equal(weights.read(name, shard=Shard(0, 1, 3, 3)), GATE_UP[1:])
    np.testing.assert_array_equal(weights.read(f"{LAYER}mlp.gate.weight"), STORED[f"{LAYER}moe.gate.weight"])
    assert weights.read(name, "bfloat16").dtype == np.uint16


def test_to_files_is_the_inverse_and_reads_a_stack_once():
    reads = []
    stack = LazyTensor((3, 8, 3), "float32", lambda: reads.append(1) or GATE_UP)
    down = np.stack([STORED[f"{LAYER}moe.{e}.w2.weight"] for e in range(3)])
    written = LAYOUT.to_files(
        {
            f"{LAYER}mlp.experts.gate_up_proj.weight": stack,
            f"{LAYER}mlp.experts.down_proj.weight": down,
            f"{LAYER}mlp.gate.weight": STORED[f"{LAYER}moe.gate.weight"],
            "model.norm.weight": STORED["model.norm.weight"],
        }
    )
    assert set(written) == {name for name in STORED if "layers.2" not in name}
    for name, tensor in written.items():
        values = tensor.read() if isinstance(tensor, LazyTensor) else tensor
        np.testing.assert_array_equal(values, STORED[name], err_msg=name)
    assert reads == [1]


def test_open_without_a_part_of_an_expert_raises(tmp_path):
    write_safetensors(tmp_path / "x.safetensors", {name: v for name, v in STORED.items() if ".1.w3" not in name})
    with pytest.raises(
        ValueError, match=r"gate_up_proj.weight needs 3 x 2 stored tensors, but 1 are missing: expert 1, projection 1"
    ):
        LAYOUT.open(SafetensorsFile(tmp_path / "x.safetensors"))


@pytest.mark.parametrize("size", [5, 3])
def test_read_of_experts_of_different_sizes_raises(tmp_path, size):
    changed = {**STORED, f"{LAYER}moe.2.w1.weight": normal(1, size, 3)}
    write_safetensors(tmp_path / "x.safetensors", changed)
    with pytest.raises(ValueError, match=rf"moe.2.w1.weight has the shape \[{size}, 3\], but expert 0 has \[4, 3\]"):
        LAYOUT.open(SafetensorsFile(tmp_path / "x.safetensors")).read(f"{LAYER}mlp.experts.gate_up_proj.weight")


def test_plain_layout_changes_nothing(stored):
    assert FileLayout().open(stored) is stored and FileLayout().to_files({"a": 1}) == {"a": 1}
