"""Trace a language model to a static graph: one program for both prefill and decoding.

    input_ids        int64 [B, S]                new tokens
    attention_mask   int64 [B, P + S]            1 for tokens; 0 for padding and for unused slots of the cache
    keys_0, ...      float [B, K, P, H]          cached keys of each layer; P = 0 for the prompt
    values_0, ...    float [B, K, P, E]          cached values
    states_0, ...    float [B, ...]              states of layers without attention; zeros for the prompt

    -> logits of the last position, float32 [B, V]; new keys and values [B, K, S, ...] of layer 0, layer 1, ...; new
       states

B, S and P are dynamic sizes. A single program needs only one copy of the weights in memory. The program does not return
the entire cache, because the cache would be copied in every step. The caller appends the new keys and values to the
cache, and replaces the states. A recurrence computes the new positions of a row as one chunk. A layer with latent
attention caches its latents and its rotated keys as one head each, and absorbs the key and value projections in both
prefill and decoding.

Tracing runs the layers of the model with the reference implementations of all ops (ops/dispatch.py), which consist of
Paddle operators.

Shapes: B batch, S new positions, P slots of the cache, C = P + S, K key-value heads, H and E channels of keys and
values, V vocabulary.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import paddle
from paddle import nn
from paddle.static import InputSpec

from paddlenlp_ext.nn.attention import AttentionLayer
from paddlenlp_ext.nn.shared_key_attention import SharedKeyAttention
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.ops.cpp.bf16 import activation_dtype
from paddlenlp_ext.static_graph.cache_and_mask import GraphCache

CacheShapes = tuple[tuple[int, int], ...]
"""(heads, channels) of each cached tensor: keys, then values, of each layer that stores them, in layer order."""
GraphStates = tuple[tuple[tuple[int, ...], str], ...]
"""Shape, for one row, and dtype of each tensor in the states of the layers, in layer order."""


class TracedModel(nn.Layer):
    """Layer to trace: a model with the inputs and outputs of the exported program."""

    def __init__(self, model: TrainableModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask, cached, states):
        """Return the logits of the last position, the new keys and values, and the new states of each layer."""
        return _run(self.model, input_ids, attention_mask, cached, states)


@paddle.jit.not_to_static  # trace plain Python, without Paddle's source transformation
def _run(
    model: Any,
    input_ids_BS: paddle.Tensor,
    mask_BC: paddle.Tensor,
    cached: Sequence[paddle.Tensor],
    states: Sequence[paddle.Tensor],
) -> list[paddle.Tensor]:
    cache = GraphCache(input_ids_BS, mask_BC, cached, states)
    hidden_BSD = model.hidden_states(input_ids_BS, cache=cache)
    return [model.logits(hidden_BSD[:, -1]).astype("float32"), *cache.new_tensors, *cache.new_states]


def cache_shapes(model: TrainableModel) -> CacheShapes:
    """Return (heads, channels) of each tensor in the key-value cache of a model."""
    shapes = []
    for attention in _mixers(model):
        if not isinstance(attention, AttentionLayer) or isinstance(attention, SharedKeyAttention):
            continue
        empty = paddle.zeros([1, *attention.prefix_shape])
        shapes += [(part_PKH.shape[1], part_PKH.shape[2]) for part_PKH in attention.split_prefix(empty)]
    return tuple(shapes)


def state_shapes(model: Any) -> GraphStates:
    """Return the shapes and dtypes of the states of a model."""
    dtype = activation_dtype(model.dtype_name)
    states = [part for mixer in _mixers(model) for part in mixer.state_shapes(dtype)]
    return tuple((tuple(shape), _name(dtype)) for shape, dtype in states)


def _mixers(model: Any) -> list[Any]:
    return [mixer for layer in model.model.layers for mixer in layer.mixers]


def cache_dtype(model: Any) -> str:
    """Return the dtype of the cached tensors, which is the dtype of the activations."""
    return _name(activation_dtype(model.dtype_name))


def _name(dtype: paddle.dtype) -> str:
    return str(dtype).removeprefix("paddle.")


def save_program(model: Any, folder: Path, prefix: str) -> None:
    """Trace a model; write the program to `PREFIX.json` and the weights to `PREFIX.pdiparams`."""
    dtype: Any = cache_dtype(model)
    names = ("keys", "values")
    tensors = [
        InputSpec([None, heads, None, size], dtype, f"{names[index % 2]}_{index // 2}")
        for index, (heads, size) in enumerate(cache_shapes(model))
    ]
    parts: Any = state_shapes(model)
    states = [InputSpec([None, *shape], dtype, f"states_{index}") for index, (shape, dtype) in enumerate(parts)]
    ids, mask = (InputSpec([None, None], "int64", name) for name in ("input_ids", "attention_mask"))
    spec = [ids, mask, tensors, states]
    traced = TracedModel(model)
    traced.eval()
    static = paddle.jit.to_static(traced, input_spec=spec, full_graph=True)
    with warnings.catch_warnings():
        # Paddle's functions access the `place` of symbolic tensors, and Paddle warns about this access.
        warnings.filterwarnings("ignore", "Tensor do not have '(place|contiguous)' interface")
        paddle.jit.save(static, str(folder / prefix))
