"""Trace a language model to a static graph: one program for both prefill and decoding.

    input_ids        int64 [B, S]                new tokens
    attention_mask   int64 [B, P + S]            1 for tokens; 0 for padding and for unused slots of the cache
    keys_0, ...      float [B, K, P, H]          cached keys of each layer; P = 0 for the prompt
    values_0, ...    float [B, K, P, E]          cached values

    -> logits of the last position, float32 [B, V]; new keys and values [B, K, S, ...] of layer 0, layer 1, ...

B, S and P are dynamic sizes. A single program needs only one copy of the weights in memory. The program does not return
the entire cache, because the cache would be copied in every step. The caller appends the new keys and values to the
cache. A layer with latent attention caches its latents and its rotated keys as one head each, and absorbs the key and
value projections in both prefill and decoding.

Tracing runs the layers of the model with the reference implementations of all ops (ops/dispatch.py), which consist of
Paddle operators.

Shapes: B batch, S new positions, P slots of the cache, C = P + S, K key-value heads, H and E channels of keys and
values, V vocabulary.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.static import InputSpec

from paddlenlp_ext.nn.attention import AttentionLayer
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.ops.attention.decode_attention import CachedLayer
from paddlenlp_ext.ops.attention.key_value_cache import KeyValueCache
from paddlenlp_ext.ops.cpp.bf16 import activation_dtype

CacheShapes = tuple[tuple[int, int], ...]
"""(heads, channels) of each cached tensor: keys of layer 0, values of layer 0, keys of layer 1, ..."""


class GraphCache(KeyValueCache):
    """Key-value cache of a traced program.

    The position of a token is its index in the row, not counting padding and unused slots.

    Attributes:
        new_tensors: new keys and values of the layers that have been traced so far.
    """

    def __init__(self, input_ids_BS: paddle.Tensor, mask_BC: paddle.Tensor, cached: Sequence[paddle.Tensor]) -> None:
        self._mask_BC, self._cached, self.new_tensors = mask_BC, cached, list[paddle.Tensor]()
        num_slots, length = paddle.shape(mask_BC)[1], paddle.shape(input_ids_BS)[1]
        positions_BC = paddle.clip(paddle.cumsum(mask_BC, axis=1) - 1, min=0)
        self._position_ids_BS = positions_BC[:, num_slots - length :]
        self._distances_BSC = self._position_ids_BS.unsqueeze(2) - positions_BC.unsqueeze(1)
        slots_C = paddle.arange(num_slots)
        later_S1 = paddle.arange(num_slots - length, num_slots).unsqueeze(1)
        self._visible_BSC = paddle.logical_and(mask_BC.astype("bool").unsqueeze(1), slots_C <= later_S1)
        self._is_own_SC = slots_C == later_S1
        self._visible: dict[int | None, GraphSlots] = {}

    @property
    def key_starts(self) -> paddle.Tensor:
        """Index of the first token of each row, int64 [B]."""
        return paddle.argmax(self._mask_BC, axis=1)

    @property
    def length(self) -> Any:
        """Number of cached positions, including padding and unused slots."""
        return paddle.shape(self._cached[0])[2]

    def next_positions(self, count: int) -> paddle.Tensor:
        """Return the positions of the `count` new tokens, int64 [B, S]; padding gets position 0."""
        return self._position_ids_BS

    def begin_pass(self, num_new: int) -> None:
        """Do nothing: the program reads the number of new positions from the shape of its inputs."""

    def note_frequency_sets(self, frequency_sets: tuple[bool, ...]) -> None:
        """Do nothing: `StaticModel` checks the rotary frequencies when it runs the program."""

    def append(self, layer_index: int, k_BSKH: paddle.Tensor, v_BSKE: paddle.Tensor, window: int | None) -> CachedLayer:
        """Append new keys and values to the cache of a layer, and return the cached and new keys and values."""
        new = [new_BSKH.transpose([0, 2, 1, 3]) for new_BSKH in (k_BSKH, v_BSKE)]
        self.new_tensors += new
        cached = self._cached[2 * layer_index : 2 * layer_index + 2]
        keys_BKCH, values_BKCE = (paddle.concat(list(pair), axis=2) for pair in zip(cached, new, strict=True))
        return CachedLayer((keys_BKCH, values_BKCE), prefix=None, visible=self._visible_slots(window))

    def derived(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return the result of `make`, which depends only on weights; the inference engine computes it only once."""
        return make()

    def _visible_slots(self, window: int | None) -> GraphSlots:
        if window not in self._visible:
            visible_BSC = self._visible_BSC
            if window is not None:
                visible_BSC = paddle.logical_and(visible_BSC, self._distances_BSC < window)
            # Padding positions attend to themselves, so that their unused attention outputs are finite.
            visible_BSC = paddle.logical_or(visible_BSC, self._is_own_SC)
            self._visible[window] = GraphSlots(visible_BSC, self._distances_BSC)
        return self._visible[window]


class GraphSlots:
    """Cache slots visible to each new position of a traced program (`ops.attention.decode_attention.VisibleSlots`)."""

    def __init__(self, visible_BSC: paddle.Tensor, distances_BSC: paddle.Tensor) -> None:
        self._distances_BSC = distances_BSC
        self._bias_BSC = paddle.where(visible_BSC, paddle.zeros([]), paddle.full([], float("-inf")))

    def bias(self, num_slots: int) -> paddle.Tensor:
        """Return the attention bias, fp32 [B, S, C]: 0 for visible slots and -inf for hidden slots."""
        return self._bias_BSC

    def linear_bias(self, num_slots: int, slopes_N: np.ndarray) -> paddle.Tensor:
        """Return the ALiBi bias, fp32 [B, N, S, C]: the negative slope of each head times the distance to each slot."""
        slopes_1N11 = paddle.to_tensor(slopes_N.astype(np.float32)).reshape([1, -1, 1, 1])
        return -slopes_1N11 * self._distances_BSC.unsqueeze(1).astype("float32")


class TracedModel(nn.Layer):
    """Layer to trace: a model with the inputs and outputs of the exported program."""

    def __init__(self, model: TrainableModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask, cached):
        """Return the logits of the last position, and the new keys and values of each layer."""
        return _run(self.model, input_ids, attention_mask, cached)


@paddle.jit.not_to_static  # trace plain Python, without Paddle's source transformation
def _run(
    model: Any, input_ids_BS: paddle.Tensor, mask_BC: paddle.Tensor, cached: Sequence[paddle.Tensor]
) -> list[paddle.Tensor]:
    cache = GraphCache(input_ids_BS, mask_BC, cached)
    hidden_BSD = model.hidden_states(input_ids_BS, cache=cache)
    return [model.logits(hidden_BSD[:, -1]).astype("float32"), *cache.new_tensors]


def cache_shapes(model: TrainableModel) -> CacheShapes:
    """Return (heads, channels) of each tensor in the key-value cache of a model.

    Raises:
        ValueError: a layer has no attention.
    """
    shapes = []
    for index, layer in enumerate(model.model.layers):
        attention = layer.mixer
        if not isinstance(attention, AttentionLayer):
            raise ValueError(
                f"layer {index} has a {type(attention).__name__}: models with layers without attention cannot be "
                "exported as a static graph; export them as GGUF or serve the model folder"
            )
        empty = paddle.zeros([1, *attention.prefix_shape])
        shapes += [(part_PKH.shape[1], part_PKH.shape[2]) for part_PKH in attention.split_prefix(empty)]
    return tuple(shapes)


def cache_dtype(model: Any) -> str:
    """Return the dtype of the cached tensors, which is the dtype of the activations."""
    return str(activation_dtype(model.dtype_name)).removeprefix("paddle.")


def save_program(model: Any, folder: Path, prefix: str) -> None:
    """Trace a model; write the program to `PREFIX.json` and the weights to `PREFIX.pdiparams`."""
    dtype: Any = cache_dtype(model)
    kinds = ("keys", "values")
    tensors = [
        InputSpec([None, heads, None, size], dtype, f"{kinds[index % 2]}_{index // 2}")
        for index, (heads, size) in enumerate(cache_shapes(model))
    ]
    spec = [InputSpec([None, None], "int64", "input_ids"), InputSpec([None, None], "int64", "attention_mask"), tensors]
    traced = TracedModel(model)
    traced.eval()
    static = paddle.jit.to_static(traced, input_spec=spec, full_graph=True)
    with warnings.catch_warnings():
        # Paddle's functions access the `place` of symbolic tensors, and Paddle warns about this access.
        warnings.filterwarnings("ignore", "Tensor do not have '(place|contiguous)' interface")
        paddle.jit.save(static, str(folder / prefix))
