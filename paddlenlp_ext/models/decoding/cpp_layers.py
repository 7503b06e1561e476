"""Decoding step through several decoder layers in one C++ call (csrc/decode_layers.cpp).

In a small model, a step runs about 400 ops, and the call of an op from Python takes as long as its computation. A
single C++ call avoids this overhead. eligibility.py checks which layers can run in C++.

Shapes: B batch, S new positions, D hidden, R rotated channels.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from operator import is_not
from typing import Any

import paddle
from paddle import nn

from paddlenlp_ext.models.decoding.cpp_experts import CppExperts
from paddlenlp_ext.models.decoding.cpp_matrices import single_matrix
from paddlenlp_ext.models.decoding.cpp_stateful_mixers import (
    CppStatefulMixer,
    cpp_delta_net,
    cpp_mamba,
    cpp_short_convolution,
)
from paddlenlp_ext.models.decoding.eligibility import (
    feed_forwards,
    fits_cpp,
    is_plain,
    layers_reason,
    linear_operands,
    max_length,
    prepared,
)
from paddlenlp_ext.nn.attention import Attention, AttentionInputs
from paddlenlp_ext.nn.feed_forward import FeedForward, ScaledFeedForward
from paddlenlp_ext.nn.gated_attention import QueryGatedAttention
from paddlenlp_ext.nn.gated_delta_net import GatedDeltaNet
from paddlenlp_ext.nn.mamba2 import Mamba2
from paddlenlp_ext.nn.rms_norm import RMSNorm
from paddlenlp_ext.nn.short_convolution import ShortConvolution
from paddlenlp_ext.ops.attention.decode_attention import ReservedPositions
from paddlenlp_ext.ops.attention.key_value_cache import ReservingCache
from paddlenlp_ext.ops.cpp import library
from paddlenlp_ext.ops.cpp.api_header import struct
from paddlenlp_ext.ops.gates import geglu, swiglu
from paddlenlp_ext.ops.training_blocks import AdaptedLinear

_UNLIMITED = 1 << 40  # more than the number of positions in any cache


def run_cpp_layers(
    layers: nn.LayerList, start: int, stop: int, x_BSD: paddle.Tensor, inputs: AttentionInputs
) -> paddle.Tensor | None:
    """Run layers `start` to `stop` - 1 over new positions in C++; return None if C++ does not support the pass."""
    cache = inputs.cache
    if inputs.query_scale is not None or not fits_cpp(cache, x_BSD.shape[1], start) or not is_plain(inputs):
        return None
    if library.usable(x_BSD) is not None:
        return None
    key = CppLayers, start, stop
    step = prepared(cache, key, lambda: [*layers][start:stop], layers_reason, CppLayers, "C++ layers")
    return None if step is None else step(x_BSD, inputs.rotations, cache)


class CppLayers:
    """Decoding step of consecutive layers, with the structs that the C++ functions read.

    The structs contain the addresses of the weights, of the key-value cache and of the states of other mixers, and
    the slots of the new positions.

    Attributes:
        attention_indices: indices of the layers with attention.
        sizes: struct of sizes and positions.
        arguments: first arguments of the C++ functions: the layer structs, the number of layers, and `sizes`.

    Args:
        layers: decoder layers that can run in C++ (`layers_reason`); their weights must not be replaced or changed.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        mixers = [mixer for layer in layers for mixer in layer.mixers]
        self._attentions: list[Attention] = [mixer for mixer in mixers if isinstance(mixer, Attention)]
        self.attention_indices = [attention.layer_index for attention in self._attentions]
        self._kept: list[Any] = [*layers]  # keeps alive the memory that the structs point to
        # Weak references to the key tensors that the structs point to. A strong reference would keep the old tensors
        # alive when the cache grows or is emptied.
        self._stored: Sequence[Callable[[], paddle.Tensor | None]] = [lambda: None] * len(self._attentions)
        self._first_row, self._rank = 0, 0
        self._layers = (struct("DecodeLayer") * len(layers))()
        self._attention_layers: list[Any] = []  # structs of the layers with attention
        self._stateful: list[CppStatefulMixer] = []
        for layer, to in zip(layers, self._layers, strict=True):
            self._fill(layer, to)
        self.sizes = self._sizes(layers)
        self._set_capacity(max_length())
        self.arguments = ctypes.byref(self._layers), len(layers), ctypes.byref(self.sizes)

    def _sizes(self, layers: Sequence[Any]) -> Any:
        """Return the struct of the sizes, without positions."""
        first = self._attentions[0]
        dense = [block for block, _ in map(feed_forwards, layers) if block is not None]
        mixtures = [mixture for _, mixture in map(feed_forwards, layers) if mixture is not None]
        shapes = [mixture.shape for mixture in mixtures]
        gates = {each.gate for each in (*dense, *(mixture.experts for mixture in mixtures)) if hasattr(each, "gate")}
        assert not {swiglu, geglu} <= gates, "all gates of a model must have the same activation"
        mixers = [mixer for layer in layers for mixer in layer.mixers]
        return struct("DecodeSizes")(
            hidden=layers[0].hidden_size,
            inner=max((block.down_proj.in_features for block in dense), default=0),
            mixer_inputs=max(sum(each.out_features for m in layer.mixers for each in _inputs(m)) for layer in layers),
            mixer_width=max(sum(mixer.output_layer.in_features for mixer in layer.mixers) for layer in layers),
            mamba_heads=max((mixer.shape.num_heads for mixer in mixers if isinstance(mixer, Mamba2)), default=0),
            experts=max((shape.num_experts for shape in shapes), default=0),
            top_k=max((shape.router.top_k for shape in shapes), default=0),
            expert_inner=max((shape.intermediate_size for shape in shapes), default=0),
            heads=first.o_proj.in_features // first.head_dim,
            kv_heads=first.k_proj.out_features // first.head_dim,
            head_dim=first.head_dim,
            rank=self._rank,
            epsilon=layers[0].norms()[0].epsilon,
            residual_multiplier=layers[0].residual_multiplier,
            is_gelu=geglu in gates,
        )

    def __call__(self, x_BSD: paddle.Tensor, rotations: Sequence[Any], cache: ReservingCache) -> paddle.Tensor:
        """Run the layers over new positions, and append their keys and values to the cache.

        Args:
            x_BSD: hidden states of the new positions.
            rotations: cosines and sines of the new positions, for each layer of the model.
            cache: key-value cache of the earlier positions.

        Returns:
            Hidden states [B, S, D] after the last of these layers.
        """
        batch, length = x_BSD.shape[:2]
        self.reserve(cache, batch, length)
        tables = [rotations[index] for index in self.attention_indices]
        for cos, _ in tables:
            assert cos.shape[:2] == [batch, length], (
                "positions and hidden states must have the same batch size and length"
            )
        self.set_tables([(library.pointer(cos), library.pointer(sin), cos.shape[2]) for cos, sin in tables])
        out_BSD = x_BSD.clone()
        library.function("decode_layers")(*self.arguments, library.pointer(out_BSD))
        self.keep_states(cache)
        return out_BSD

    def reserve(self, cache: ReservingCache, batch: int, length: int) -> ReservedPositions:
        """Reserve `length` new positions per row in the cache; write their slots and the states into the structs."""
        reserved = cache.reserve(self.attention_indices, length)
        assert len(reserved.starts) == batch, "cache and hidden states must have the same batch size"
        if batch > len(self._starts):
            self._set_capacity(batch)
        self.sizes.batch, self.sizes.length, self.sizes.prefix = batch, length, reserved.prefix
        self._starts[:batch], self._firsts[:batch] = reserved.starts, reserved.firsts
        stored = [keys() for keys in self._stored]
        if reserved.first_row != self._first_row or any(map(is_not, [keys for keys, _ in reserved.stored], stored)):
            self._set_stored(reserved)
        for mixer in self._stateful:
            mixer.read_state(cache)
        return reserved

    def keep_states(self, cache: ReservingCache) -> None:
        """Store the states after the new positions in the cache."""
        for mixer in self._stateful:
            mixer.keep_state(cache)

    def _set_capacity(self, num_rows: int) -> None:
        """Allocate the slots of the new positions for up to `num_rows` rows."""
        self._starts, self._firsts = ((ctypes.c_int64 * num_rows)() for _ in range(2))
        self.sizes.starts, self.sizes.firsts = ctypes.addressof(self._starts), ctypes.addressof(self._firsts)

    def set_tables(self, tables: Sequence[tuple[int, int, int]]) -> None:
        """Set the addresses of the cosines and sines [B, S, R] of each layer with attention.

        Args:
            tables: for each layer with attention, the address of the cosines, the address of the sines, and R.
        """
        for attention, to, table in zip(self._attentions, self._attention_layers, tables, strict=True):
            if attention.rotates:
                to.cos, to.sin, to.rotated = table

    def matrix(self, linear: AdaptedLinear, scales: paddle.Tensor | None = None) -> int:
        """Create the struct of a linear layer and return its address; `single_matrix` describes the arguments."""
        matrix = single_matrix(linear, scales)
        self._rank = max(self._rank, matrix.rank)
        self._kept.append(matrix)
        return matrix.address

    def norm(self, norm: RMSNorm, factor: float = 1.0) -> int:
        """Return the address of a norm's scale, which is (weight + offset) * factor."""
        scale = _scale(norm, factor)
        self._kept.append(scale)
        return library.pointer(scale)

    def _set_stored(self, reserved: ReservedPositions) -> None:
        """Set the addresses of the cached keys and values of each layer; the addresses change when the cache grows."""
        self._stored, self._first_row = [weakref.ref(keys) for keys, _ in reserved.stored], reserved.first_row
        for to, (keys, values) in zip(self._attention_layers, reserved.stored, strict=True):
            _, kv_heads, to.capacity, size = keys.shape
            skipped = reserved.first_row * kv_heads * to.capacity * size * 4  # bytes before the first row of the pass
            to.keys, to.values = library.pointer(keys) + skipped, library.pointer(values) + skipped

    def _fill(self, layer: Any, to: Any) -> None:
        """Write the weights and options of `layer` into the struct `to`."""
        for role, norm in layer.norms_by_role().items():
            setattr(to, role, self.norm(norm))
        for mixer, (input_factor, output_factor) in zip(layer.mixers, layer.mixer_scales, strict=True):
            norm = layer.norms_by_role().get("attention_norm")
            if isinstance(mixer, Mamba2):
                scale_D = None if norm is None else _scale(norm, input_factor)
                self._stateful.append(cpp_mamba(mixer, self.linear, scale_D, output_factor))
                to.mamba = self._stateful[-1].address
                continue
            if norm is not None:
                to.attention_norm = self.norm(norm, input_factor)
            to.o = self.linear(mixer.output_layer, (layer.hidden_size, output_factor))
            if isinstance(mixer, GatedDeltaNet):
                self._stateful.append(cpp_delta_net(mixer, self.linear))
                to.delta_net = self._stateful[-1].address
            elif isinstance(mixer, ShortConvolution):
                self._stateful.append(cpp_short_convolution(mixer, self.linear))
                to.convolution = self._stateful[-1].address
            else:
                self._attention_layers.append(to)
                self._fill_attention(mixer, to)
        dense, mixture = feed_forwards(layer)
        if dense is not None:
            self._fill_feed_forward(dense, to)
        if mixture is not None:
            experts = CppExperts(mixture, self.linear)
            self._kept.append(experts)
            to.experts = experts.address

    def _fill_feed_forward(self, mlp: Any, to: Any) -> None:
        """Write the weights of a feed-forward block into the struct `to`."""
        gate_factor, down_factor = mlp.scales if isinstance(mlp, ScaledFeedForward) else (1.0, 1.0)
        if isinstance(mlp, FeedForward):
            to.gate = self.linear(mlp.gate_proj, (mlp.gate_proj.out_features, gate_factor))
        to.up = self.linear(mlp.up_proj)
        to.down = self.linear(mlp.down_proj, (mlp.down_proj.out_features, down_factor))

    def linear(self, linear: Any, *factors: tuple[int, float]) -> int:
        """Create the struct of a linear layer and return its address.

        Args:
            linear: dense or quantized linear layer.
            factors: number and factor of consecutive outputs, for all outputs; without factors, 1 for all outputs.
        """
        factors_F = None
        if any(factor != 1.0 for _, factor in factors):
            factors_F = paddle.concat([paddle.full([size], factor, "float32") for size, factor in factors])
            self._kept.append(factors_F)
        operands = linear_operands(linear)
        assert operands is not None, "the layer must be eligible"
        return self.matrix(operands, factors_F)

    def _fill_attention(self, attention: Attention, to: Any) -> None:
        """Write the weights and options of an attention layer into the struct `to`."""
        to.q, to.k, to.v = map(self.linear, _inputs(attention))
        to.has_gates = isinstance(attention, QueryGatedAttention)
        if attention.qk_norm is not None:
            to.q_norm, to.k_norm = (self.norm(getattr(attention, name)) for name in attention.qk_norm.names)
            to.norms_after_rotation = attention.qk_norm.after_rotation
        for sinks in attention.score_options.sink_tensors:
            self._kept.append(sinks)
            to.sinks = library.pointer(sinks)
        to.scale, to.softcap, to.is_interleaved = attention.scale, attention.softcap or 0.0, attention.interleaved
        to.window = _UNLIMITED if attention.window is None else attention.window


def _inputs(mixer: Any) -> list[Any]:
    """Return the linear layers of a mixer that read the output of the preceding norm."""
    return [getattr(mixer, name) for name in mixer.input_names]


def _scale(norm: RMSNorm, factor: float) -> paddle.Tensor:
    """Return the scale of a norm, (weight + offset) * factor."""
    scale = norm.weight if norm.offset == 0.0 else norm.weight + norm.offset
    return scale if factor == 1.0 else scale * factor
