"""Decoding step through a whole model in one C++ call, from token ids to logits (csrc/decode_layers.cpp).

In each step, reading the weights evicts all other data from the CPU caches. The next call into Python or Paddle takes
20 to 100 times as long as with warm caches. In one step of SmolLM2, these calls took 1.3 ms in total. The arguments of
the C++ function are therefore created once. A step updates only the tokens and the cache slots of the new positions.

eligibility.py checks which models can run in one call.

Shapes: B batch, S new positions, V vocabulary.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial
from operator import sub
from typing import Any

import numpy as np
import paddle

from paddlenlp_ext.models.decoding.cpp_layers import CppLayers
from paddlenlp_ext.models.decoding.eligibility import fits_cpp, max_length, model_reason, prepared
from paddlenlp_ext.ops.attention.key_value_cache import KeyValueCache, ReservingCache
from paddlenlp_ext.ops.cpp import library
from paddlenlp_ext.ops.cpp.api_header import struct
from paddlenlp_ext.ops.training_blocks import AdaptedLinear


def run_cpp_model(model: Any, tokens_BS: Sequence[Sequence[int]], cache: KeyValueCache) -> np.ndarray | None:
    """Append new tokens to the cache and return their logits, fp32 [B, S, V].

    The next step with the same cache overwrites the returned array. If the model cannot run in one call, the result is
    None, and the cache does not change.

    Args:
        model: a `CausalLM`.
        tokens_BS: new tokens of each row.
        cache: keys and values of the earlier positions.

    Raises:
        ValueError: a token is not in the vocabulary.
    """
    length, scale = len(tokens_BS[0]), model.model.query_scale
    if not fits_cpp(cache, length) or (scale is not None and scale(cache.next_positions(length)) is not None):
        return None
    step = prepared(cache, CppModel, lambda: model, model_reason, CppModel, "a C++ model")
    return None if step is None else step(tokens_BS, cache)


class CppModel:
    """Decoding step of a model with one cache, with the structs that the C++ function reads.

    Args:
        model: a `CausalLM` that can run in one call (`model_reason`); its weights must not be replaced or changed.
    """

    def __init__(self, model: Any) -> None:
        decoder, head_VD = model.model, model.head_weight()
        table_VD = decoder.embed_tokens.weight
        self._num_ids, self._vocab_size = table_VD.shape[0], head_VD.shape[0]
        self._layers, self._rotary = CppLayers(decoder.layers), decoder.rotary
        self._ropes = (struct("DecodeRope") * len(self._rotary.distinct))()
        self._frequencies: list[tuple[np.ndarray, float]] = []
        self._constant_until: list[float] = []
        self._model = struct("DecodeModel")(
            embedding=library.pointer(table_VD),
            ropes=ctypes.addressof(self._ropes),
            norm=self._layers.norm(decoder.norm),
            lm_head=self._layers.matrix(AdaptedLinear(head_VD, None)),
            num_ropes=len(self._ropes),
            embedding_scale=(decoder.embedding_scale or 1.0) * decoder.embedding_multiplier,
            logit_scale=decoder.logit_scale,
            is_bf16=table_VD.dtype == paddle.bfloat16,
        )
        self._kept = model, head_VD, table_VD
        self._set_capacity(max_length())

    def _set_capacity(self, num_positions: int) -> None:
        """Allocate the token ids, rotation tables and logits of up to `num_positions` new positions in all rows."""
        sizes = [settings.rotary_dim for settings in self._rotary.distinct]
        self._tables = [np.empty([2, num_positions, size], np.float32) for size in sizes]  # cosines and sines
        for rope, (cos, sin), size in zip(self._ropes, self._tables, sizes, strict=True):
            rope.cos, rope.sin, rope.rotated = cos.ctypes.data, sin.ctypes.data, size
        by_layer = [self._ropes[self._rotary.index_by_layer[layer]] for layer in self._layers.attention_indices]
        self._layers.set_tables([(rope.cos, rope.sin, rope.rotated) for rope in by_layer])
        self._ids = (ctypes.c_int64 * num_positions)()
        self._logits = np.empty(num_positions * self._vocab_size, np.float32)
        self._run = partial(
            library.function("decode_tokens"),
            ctypes.byref(self._model),
            *self._layers.arguments,
            ctypes.byref(self._ids),
            self._logits.ctypes.data,
        )

    def __call__(self, tokens_BS: Sequence[Sequence[int]], cache: ReservingCache) -> np.ndarray:
        """Append new tokens to the cache and return their logits [B, S, V]; the next call overwrites the logits."""
        batch, length = len(tokens_BS), len(tokens_BS[0])
        ids = [token for row in tokens_BS for token in row]
        if not 0 <= min(ids) <= max(ids) < self._num_ids:
            raise ValueError(f"token ids from {min(ids)} to {max(ids)}, but the embedding has {self._num_ids} rows")
        if len(ids) > len(self._ids):
            self._set_capacity(len(ids))
        self._ids[: batch * length] = ids
        cache.begin_pass(length)  # after the checks, because `begin_pass` changes the cache
        reserved = self._layers.reserve(cache, batch, length)
        longest = max(map(sub, reserved.starts, reserved.firsts)) + length
        cache.note_frequency_sets(self._rotary.frequency_sets_at(longest))
        self._set_frequencies(longest)
        self._run()
        self._layers.keep_states(cache)
        return self._logits[: batch * length * self._vocab_size].reshape(batch, length, self._vocab_size)

    def _set_frequencies(self, length: int) -> None:
        """Set the rotary frequencies of a batch whose longest row has `length` tokens."""
        constant_until = [settings.constant_until(length) for settings in self._rotary.distinct]
        if constant_until == self._constant_until:
            return
        self._constant_until, self._frequencies = constant_until, self._rotary.inverse_frequencies(length)
        for rope, (frequencies, amplitude) in zip(self._ropes, self._frequencies, strict=True):
            assert frequencies.flags.c_contiguous and frequencies.dtype == np.float32
            rope.frequencies, rope.amplitude = frequencies.ctypes.data, amplitude
