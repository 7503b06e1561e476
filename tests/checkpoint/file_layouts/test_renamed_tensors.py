"""Names of layers and tensors in files, and names of targets in adapters."""

from __future__ import annotations

import numpy as np
import pytest

from paddlenlp_ext.checkpoint.file_layouts.renamed_tensors import RenamedTensors
from tests.common.golden import ArrayWeights

LAYER = "model.layers.*"
LAYOUT = RenamedTensors(
    {f"{LAYER}.moe.experts": f"{LAYER}.experts", f"{LAYER}.moe.gate": f"{LAYER}.router.proj"},
    in_adapters=True,
    tensors={
        f"{LAYER}.moe.experts.down_proj.weight": f"{LAYER}.experts.down_proj",
        f"{LAYER}.moe.scale": f"{LAYER}.router.scale",
    },
)
STORED = {
    "model.layers.3.moe.experts.down_proj.weight": "model.layers.3.experts.down_proj",
    "model.layers.3.moe.experts.down_proj.0.1.weight": "model.layers.3.experts.down_proj.0.1.weight",
    "model.layers.3.moe.gate.weight": "model.layers.3.router.proj.weight",
    "model.layers.3.moe.scale": "model.layers.3.router.scale",
    "model.layers.3.moe.scale_of_others": "model.layers.3.moe.scale_of_others",
    "model.norm.weight": "model.norm.weight",
}
"""Name in memory -> name in files."""


def test_renamed_tensors_rename_layers_with_their_parts_and_single_tensors_alone():
    assert list(LAYOUT.to_files(dict.fromkeys(STORED))) == list(STORED.values())
    assert [LAYOUT.name_in_memory(name) for name in STORED.values()] == list(STORED)


def test_renamed_tensors_leave_out_unused_tensors():
    layout = RenamedTensors({f"{LAYER}.moe.gate": f"{LAYER}.router.proj"}, unused=r"model\.layers\.3\.moe\.gate\..+")
    stored = [f"model.layers.{layer}.router.proj.weight" for layer in (2, 3, 33)]
    source = layout.open(ArrayWeights({name: np.zeros(1, np.float32) for name in stored}))
    assert source.names() == [f"model.layers.{layer}.moe.gate.weight" for layer in (2, 33)]


@pytest.mark.parametrize(
    ("target", "stored"),
    [("moe.experts.down_proj", "experts.down_proj"), ("moe.gate.weight", "router.proj.weight"), ("q_proj", "q_proj")],
)
def test_targets_of_adapters_may_have_the_names_of_files_or_of_memory(target, stored):
    assert LAYOUT.target_in_adapters(target) == stored
    assert LAYOUT.target_from_adapters(stored) == target
    assert LAYOUT.target_from_adapters(target) == target
