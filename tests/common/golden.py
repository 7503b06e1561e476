"""Weights of the golden models (tests/golden/cases/model_cases.py), by the names of their files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from paddlenlp_ext.checkpoint.dtypes import cast
from paddlenlp_ext.checkpoint.file_layouts.base import FileLayout, split_layer
from paddlenlp_ext.checkpoint.file_layouts.fused_projections import join_fused, split_fused
from paddlenlp_ext.checkpoint.file_layouts.interleaved_experts import InterleavedExperts
from paddlenlp_ext.checkpoint.file_layouts.renamed_experts import RenamedExperts
from paddlenlp_ext.checkpoint.file_layouts.renamed_tensors import RenamedTensors
from paddlenlp_ext.checkpoint.load_weights import load_parameters
from paddlenlp_ext.checkpoint.safetensors import as_lazy
from paddlenlp_ext.checkpoint.weight_source import WeightSource
from paddlenlp_ext.models.causal_lm import CausalLM
from paddlenlp_ext.sharding_spec import Shard
from tests.golden.cases.model_cases import make_weight


class ArrayWeights(WeightSource):
    """Weights in memory."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.path, self.arrays = Path("arrays"), arrays

    def names(self) -> list[str]:
        return list(self.arrays)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.arrays[name].shape

    def dtype(self, name: str) -> str:
        return self.arrays[name].dtype.name

    def read(self, name: str, dtype: str | None = None, shard: Shard | None = None) -> np.ndarray:
        values = self.arrays[name] if shard is None else self.arrays[name][shard.index]
        return cast(values.copy(), self.dtype(name), dtype or self.dtype(name))


_NAMES = {
    "granitemoehybrid": {
        "block_sparse_moe.input_linear.weight": "block_sparse_moe.experts.gate_up_proj",
        "block_sparse_moe.output_linear.weight": "block_sparse_moe.experts.down_proj",
        "block_sparse_moe.router.layer.weight": "block_sparse_moe.router.weight",
    },
    "afmoe": {"mlp.router.gate.e_score_correction_bias": "mlp.expert_bias"},
    "minimax_m2": {"mlp.gate.e_score_correction_bias": "mlp.e_score_correction_bias"},
    "lfm2_moe": {"feed_forward.gate.e_score_correction_bias": "feed_forward.expert_bias"},
}
"""Model type -> name of a parameter -> its name in transformers."""


def name_in_transformers(name: str, model_type: str) -> str:
    """Return the name in transformers of a parameter, where stacked weights of experts are not layers of their own."""
    prefix, local_name = split_layer(name)
    return prefix + re.sub(r"(\.experts\.\w+)\.weight$", r"\1", _NAMES.get(model_type, {}).get(local_name, local_name))


def layout_in_transformers(model: CausalLM) -> FileLayout | None:
    """Return the layout of files that transformers' parameters have too; None if they are named as in memory."""
    layout = model.config.file_layout
    if isinstance(layout, RenamedExperts):
        return layout.names
    return layout if isinstance(layout, InterleavedExperts | RenamedTensors) else None


def as_in_transformers(model: CausalLM, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return tensors of the parameters' names in the shapes of transformers' parameters, which stack experts too."""
    joined, layout = join_fused(tensors, model.config.fused_layers), layout_in_transformers(model)
    return joined if layout is None else layout.to_files(joined)


def set_golden_weights(model: CausalLM, case: str) -> None:
    """Set each parameter to `make_weight`; parts of a fused layer get their rows of its weight."""
    parameters, layout = dict(model.named_parameters()), layout_in_transformers(model)
    shapes = {name: as_lazy(tensor).shape for name, tensor in as_in_transformers(model, parameters).items()}
    kind = model.config.model_type
    arrays = {name: make_weight(case, name_in_transformers(name, kind), shape) for name, shape in shapes.items()}
    source = split_fused(ArrayWeights(arrays), model.config.fused_layers)
    load_parameters(parameters, source if layout is None else layout.open(source))
