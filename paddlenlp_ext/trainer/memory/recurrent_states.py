"""Sizes of the states of recurrent layers and convolutions, while decoding and in a training step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import paddle

from paddlenlp_ext.nn.recompute import RecomputePlan
from paddlenlp_ext.nn.recurrent_mixer import RecurrentMixer
from paddlenlp_ext.nn.token_mixer import TokenMixer


def decoding_state_bytes(model: Any, dtype: paddle.dtype) -> int:
    """Return the bytes of the state of one row in all layers: windows of convolutions, and float32 matrices.

    Args:
        model: a `CausalLM` or `PeftModel`; only shapes are read.
        dtype: dtype of the outputs of linear layers.
    """
    mixers = (layer for layer in model.sublayers() if isinstance(layer, TokenMixer))
    tensors = (tensor for mixer in mixers for tensor in mixer.state_shapes(dtype))
    return sum(math.prod(shape) * (4 if kind == paddle.float32 else 2) for shape, kind in tensors)


def training_state_bytes(model: Any, layers: Iterable[int], recompute: RecomputePlan | None) -> float:
    """Return the bytes of the matrices after one document that are saved for the backward pass.

    Args:
        model: a `CausalLM` or `PeftModel`, sharded for the process.
        layers: indices of the layers with saved activations; an index occurs once per micro-batch in flight.
        recompute: recomputation plan; None: no recomputation. Of the recomputed layers, only one holds its matrices.
    """
    mixers = [layer for layer in model.sublayers() if isinstance(layer, RecurrentMixer)]
    sizes = {mixer.layer_index: 4.0 * math.prod(mixer.matrix_shape) for mixer in mixers}
    if recompute is None or recompute.granularity == "core_attn":
        return sum(sizes.get(index, 0.0) for index in layers)
    saved = [index for index in layers if index in recompute.excluded_layers]
    return sum(sizes.get(index, 0.0) for index in saved) + max(sizes.values(), default=0.0)
