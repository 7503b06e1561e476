"""Gated delta net in the decoding step of several layers (csrc/decode_delta_net.h).

Shapes: B batch, N value heads, L taps, C channels.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import paddle

from paddlenlp_ext.nn.gated_delta_net import GatedDeltaNet
from paddlenlp_ext.ops.attention.key_value_cache import KeyValueCache
from paddlenlp_ext.ops.cpp import library
from paddlenlp_ext.ops.cpp.api_header import struct
from paddlenlp_ext.ops.gated_delta_rule.reference import NORM_EPSILON
from paddlenlp_ext.ops.tensor_utils import contiguous

LINEARS = {"in_proj_qkv": "qkv", "in_proj_z": "z", "in_proj_a": "a", "in_proj_b": "b"}
"""Fields of `DecodeDeltaNet` for the linear layers."""


class CppDeltaNet:
    """Struct of a gated delta net, with the states of the rows of a pass.

    Args:
        net: gated delta net that can run in C++; its weights must not be replaced.
        matrix: function that returns the address of the struct of a linear layer.

    Attributes:
        address: address of the `DecodeDeltaNet` struct.
    """

    def __init__(self, net: GatedDeltaNet, matrix: Callable[[Any], int]) -> None:
        self._net, shape = net, net.shape
        weights = {
            "kernel": contiguous(net.conv1d.weight.squeeze(1).transpose([1, 0])),
            "rates": -net.A_log.exp(),
            "dt_bias": net.dt_bias,
            "head_norm": net.head_norm.weight,
        }
        self._weights = weights  # keeps alive the memory that the struct points to
        self._struct = struct("DecodeDeltaNet")(
            **{field: matrix(getattr(net, name)) for name, field in LINEARS.items()},
            **{field: library.pointer(x) for field, x in weights.items()},
            key_heads=shape.num_key_heads,
            heads=shape.num_value_heads,
            key_dim=shape.key_dim,
            value_dim=shape.value_dim,
            num_taps=shape.num_taps,
            norm_epsilon=NORM_EPSILON,
            head_epsilon=shape.norm_epsilon,
        )
        self.address = ctypes.addressof(self._struct)
        self._before: list[paddle.Tensor] = []
        self._after: list[paddle.Tensor] = []

    def read_state(self, cache: KeyValueCache) -> None:
        """Point the struct to the windows [B, L - 1, C] and matrices [B, N, ...] before and after the step."""
        state = cache.state(self._net.layer_index, self._net.state_shapes(paddle.float32))
        self._before = [contiguous(x) for x in state]
        assert all(x.dtype == paddle.float32 for x in self._before), "the C++ step reads states in float32"
        window_BWC, matrices_BNHE = self._before
        overwrites = cache.owns_state(self._net.layer_index)
        after_BNHE = matrices_BNHE if overwrites else library.empty(matrices_BNHE.shape)
        self._after = [library.empty(window_BWC.shape), after_BNHE]
        for fields, tensors in ((("window", "states"), self._before), (("window_after", "states_after"), self._after)):
            for field, x in zip(fields, tensors, strict=True):
                setattr(self._struct, field, library.pointer(x))

    def keep_state(self, cache: KeyValueCache) -> None:
        """Store the state that the step has computed in the cache."""
        cache.keep_state(self._net.layer_index, tuple(self._after))
        self._before, self._after = [], []
