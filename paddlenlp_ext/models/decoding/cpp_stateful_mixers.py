"""Mixers with a state in the decoding step of several layers: gated delta nets, Mamba-2 and short convolutions.

The C++ functions are in csrc/decode_delta_net.h, csrc/decode_mamba.h and csrc/decode_convolution.h.

Shapes: B batch, N heads, H rows and E columns of a matrix, L taps, C channels, D hidden, F outputs of a linear layer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

import paddle

from paddlenlp_ext.nn.gated_delta_net import GatedDeltaNet
from paddlenlp_ext.nn.mamba2 import Mamba2
from paddlenlp_ext.nn.short_convolution import DepthwiseKernel, ShortConvolution
from paddlenlp_ext.nn.token_mixer import TokenMixer
from paddlenlp_ext.ops.attention.key_value_cache import KeyValueCache
from paddlenlp_ext.ops.cpp import library
from paddlenlp_ext.ops.cpp.api_header import struct
from paddlenlp_ext.ops.gated_delta_rule.reference import NORM_EPSILON
from paddlenlp_ext.ops.tensor_utils import contiguous

_DELTA_NET_LINEARS = {"in_proj_qkv": "qkv", "in_proj_z": "z", "in_proj_a": "a", "in_proj_b": "b"}
"""Fields of `DecodeDeltaNet` for the linear layers."""


class CppStatefulMixer:
    """Struct of a mixer with a state, with the states of the rows of a pass.

    Args:
        mixer: mixer that can run in C++; its weights must not be replaced.
        kernel: convolution of the mixer.
        name: name of the struct.
        weights: tensors by field, None for a null pointer.
        fields: other fields of the struct.

    Attributes:
        address: address of the struct.
    """

    def __init__(
        self,
        mixer: TokenMixer,
        kernel: DepthwiseKernel,
        name: str,
        weights: Mapping[str, paddle.Tensor | None],
        fields: Mapping[str, Any],
    ) -> None:
        self._mixer = mixer
        self._weights = {  # keeps alive the memory that the struct points to
            **weights,
            "kernel": contiguous(kernel.weight.squeeze(1).transpose([1, 0])),
        }
        addresses = {field: None if x is None else library.pointer(x) for field, x in self._weights.items()}
        num_taps = kernel.window_length + 1
        self._struct = struct(name)(**addresses, num_taps=num_taps, **fields)
        self.address = ctypes.addressof(self._struct)
        self._before: list[paddle.Tensor] = []
        self._after: list[paddle.Tensor] = []

    def read_state(self, cache: KeyValueCache) -> None:
        """Point the struct to the windows [B, L - 1, C] and matrices [B, N, H, E] before and after the step."""
        state = cache.state(self._mixer.layer_index, self._mixer.state_shapes(paddle.float32))
        self._before = [contiguous(x) for x in state]
        assert all(x.dtype == paddle.float32 for x in self._before), "the C++ step reads states in float32"
        overwrites = cache.owns_state(self._mixer.layer_index)
        window_BWC, *matrices = self._before
        # A step writes the window while it still reads the old one.
        self._after = [library.empty(window_BWC.shape)]
        self._after += [x if overwrites else library.empty(x.shape) for x in matrices]
        for name, before, after in zip(("window", "states"), self._before, self._after, strict=False):
            setattr(self._struct, name, library.pointer(before))
            setattr(self._struct, f"{name}_after", library.pointer(after))

    def keep_state(self, cache: KeyValueCache) -> None:
        """Store the state that the step has computed in the cache."""
        cache.keep_state(self._mixer.layer_index, tuple(self._after))
        self._before, self._after = [], []


def cpp_delta_net(net: GatedDeltaNet, matrix: Callable[[Any], int]) -> CppStatefulMixer:
    """Create the `DecodeDeltaNet` struct of a gated delta net.

    Args:
        net: gated delta net that can run in C++.
        matrix: function that returns the address of the struct of a linear layer.
    """
    shape = net.shape
    fields = {
        **{field: matrix(getattr(net, name)) for name, field in _DELTA_NET_LINEARS.items()},
        "key_heads": shape.num_key_heads,
        "heads": shape.num_value_heads,
        "key_dim": shape.key_dim,
        "value_dim": shape.value_dim,
        "norm_epsilon": NORM_EPSILON,
        "head_epsilon": shape.norm_epsilon,
    }
    return CppStatefulMixer(
        net, net.conv1d, "DecodeDeltaNet", {"head_norm": net.head_norm.weight, **_decays(net)}, fields
    )


def cpp_mamba(
    mamba: Mamba2, matrix: Callable[..., int], input_norm_D: paddle.Tensor | None, output_factor: float
) -> CppStatefulMixer:
    """Create the `DecodeMamba` struct of a Mamba-2 mixer.

    Args:
        mamba: Mamba-2 mixer that can run in C++.
        matrix: function that returns the address of the struct of a linear layer, given the layer, and the number and
            factor of consecutive outputs (`CppLayers.linear`).
        input_norm_D: scale of the norm before the mixer; None without a norm.
        output_factor: factor of the output of the mixer.
    """
    shape = mamba.shape
    sections = (
        () if shape.section_scales is None else tuple(zip(shape.section_sizes, shape.section_scales, strict=True))
    )
    smallest, largest = shape.step_limits
    fields = {
        "in": matrix(mamba.in_proj, *sections),
        "out": matrix(mamba.out_proj, (shape.hidden_size, output_factor)),
        "groups": shape.num_groups,
        "heads": shape.num_heads,
        "state_dim": shape.state_dim,
        "head_dim": shape.head_dim,
        "smallest_step": smallest,
        "largest_step": largest,
        "epsilon": shape.norm_epsilon,
        "norms_first": shape.norm == "norm_first",
    }
    weights = {
        "input_norm": input_norm_D,
        "conv_bias": mamba.conv1d.bias,
        "skips": mamba.D,
        "norm": None if mamba.norm is None else mamba.norm.weight,
    }
    return CppStatefulMixer(mamba, mamba.conv1d, "DecodeMamba", {**weights, **_decays(mamba)}, fields)


def cpp_short_convolution(mixer: ShortConvolution, matrix: Callable[[Any], int]) -> CppStatefulMixer:
    """Create the `DecodeShortConvolution` struct of a short convolution.

    Args:
        mixer: short convolution that can run in C++.
        matrix: function that returns the address of the struct of a linear layer.
    """
    fields = {name.removesuffix("_proj"): matrix(getattr(mixer, name)) for name in mixer.input_names}
    return CppStatefulMixer(mixer, mixer.conv, "DecodeShortConvolution", {"conv_bias": mixer.conv.bias}, fields)


def _decays(mixer: GatedDeltaNet | Mamba2) -> dict[str, paddle.Tensor]:
    """Return the fields of the decays."""
    return {"rates": -mixer.A_log.exp(), "dt_bias": mixer.dt_bias}
