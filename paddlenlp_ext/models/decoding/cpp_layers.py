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

from paddlenlp_ext.models.decoding.cpp_delta_net import CppDeltaNet
from paddlenlp_ext.models.decoding.eligibility import (
    fits_cpp,
    is_plain,
    layers_reason,
    linear_operands,
    max_length,
    prepared,
)
from paddlenlp_ext.nn.attention import Attention, AttentionInputs
from paddlenlp_ext.nn.gated_attention import QueryGatedAttention
from paddlenlp_ext.nn.gated_delta_net import GatedDeltaNet
from paddlenlp_ext.nn.rms_norm import RMSNorm
from paddlenlp_ext.ops.attention.decode_attention import ReservedPositions
from paddlenlp_ext.ops.attention.key_value_cache import ReservingCache
from paddlenlp_ext.ops.cpp import library
from paddlenlp_ext.ops.cpp.api_header import struct
from paddlenlp_ext.ops.gates import geglu
from paddlenlp_ext.ops.quantized_weight.cpp import packed_struct
from paddlenlp_ext.ops.tensor_utils import contiguous
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

    The structs contain the addresses of the weights, of the key-value cache and of the states of gated delta nets, and
    the slots of the new positions.

    Attributes:
        attention_indices: indices of the layers with attention.
        sizes: struct of sizes and positions.
        arguments: first arguments of the C++ functions: the layer structs, the number of layers, and `sizes`.

    Args:
        layers: decoder layers that can run in C++ (`layers_reason`); their weights must not be replaced or changed.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        with_attention = [layer for layer in layers if isinstance(layer.mixer, Attention)]
        self._attentions: list[Attention] = [layer.mixer for layer in with_attention]
        self.attention_indices = [attention.layer_index for attention in self._attentions]
        self._kept: list[Any] = [*layers]  # keeps alive the memory that the structs point to
        # Weak references to the key tensors that the structs point to. A strong reference would keep the old tensors
        # alive when the cache grows or is emptied.
        self._stored: Sequence[Callable[[], paddle.Tensor | None]] = [lambda: None] * len(self._attentions)
        self._first_row, self._rank = 0, 0
        self._layers = (struct("DecodeLayer") * len(layers))()
        self._attention_layers: list[Any] = []  # structs of the layers with attention
        self._delta_nets: list[CppDeltaNet] = []
        for layer, to in zip(layers, self._layers, strict=True):
            self._fill(layer, to)
        first = self._attentions[0]
        self.sizes = struct("DecodeSizes")(
            hidden=layers[0].hidden_size,
            inner=layers[0].mlp.down_proj.in_features,
            mixer_inputs=max(sum(linear.out_features for linear in _mixer_inputs(layer.mixer)) for layer in layers),
            mixer_width=max(layer.mixer.output_layer.in_features for layer in layers),
            heads=first.o_proj.in_features // first.head_dim,
            kv_heads=first.k_proj.out_features // first.head_dim,
            head_dim=first.head_dim,
            rank=self._rank,
            epsilon=layers[0].norms()[0].epsilon,
            residual_multiplier=layers[0].residual_multiplier,
            is_gelu=layers[0].mlp.gate is geglu,
        )
        self._set_capacity(max_length())
        self.arguments = ctypes.byref(self._layers), len(layers), ctypes.byref(self.sizes)

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
        for net in self._delta_nets:
            net.read_state(cache)
        return reserved

    def keep_states(self, cache: ReservingCache) -> None:
        """Store the states after the new positions in the cache."""
        for net in self._delta_nets:
            net.keep_state(cache)

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

    def matrix(self, linear: AdaptedLinear) -> int:
        """Create the struct of a linear layer, whose weight and bias must outlive this object; return its address."""
        weight, bias = linear.weight, linear.bias
        (out_features, in_features), dense, quantized = weight.shape, None, None
        is_bf16 = weight.dtype == paddle.bfloat16
        few_rows = library.small_batch_rows(is_bf16)
        if isinstance(weight, paddle.Tensor):
            dense = library.pointer(weight)
        else:
            packed = packed_struct(weight)
            self._kept.append(packed)
            quantized = ctypes.addressof(packed)
        bias_address = None if bias is None else library.pointer(bias)
        factors = self._factors(linear)
        rank = factors[0].shape[0] if factors else 0
        self._rank = max(self._rank, rank)
        update = [library.pointer(each) for each in factors] or [None, None]
        sizes = (in_features, out_features, rank, few_rows)
        matrix = struct("DecodeMatrix")(dense, quantized, bias_address, *update, *sizes, is_bf16)
        self._kept += [factors, matrix]
        return ctypes.addressof(matrix)

    @staticmethod
    def _factors(linear: AdaptedLinear) -> list[paddle.Tensor]:
        """Return A [r, in] and s B^T [r, out] of an update, in float32; [] without an update."""
        if linear.a is None or linear.b is None:
            return []
        a, b = linear.a.astype("float32"), linear.b.astype("float32")
        return [contiguous(a), contiguous(b.T * linear.scaling)]

    def norm(self, norm: RMSNorm) -> int:
        """Return the address of a norm's scale, which is weight + offset."""
        scale = norm.weight if norm.offset == 0.0 else norm.weight + norm.offset
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
        mixer, mlp = layer.mixer, layer.mlp
        for role, norm in layer.norms_by_role().items():
            setattr(to, role, self.norm(norm))
        to.o = self._linear(mixer.output_layer)
        to.gate, to.up, to.down = map(self._linear, (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
        if isinstance(mixer, GatedDeltaNet):
            self._delta_nets.append(CppDeltaNet(mixer, self._linear))
            to.delta_net = self._delta_nets[-1].address
        else:
            self._attention_layers.append(to)
            self._fill_attention(mixer, to)

    def _linear(self, linear: Any) -> int:
        """Create the struct of a linear layer and return its address."""
        operands = linear_operands(linear)
        assert operands is not None, "the layer must be eligible"
        return self.matrix(operands)

    def _fill_attention(self, attention: Attention, to: Any) -> None:
        """Write the weights and options of an attention layer into the struct `to`."""
        to.q, to.k, to.v = map(self._linear, _mixer_inputs(attention))
        to.has_gates = isinstance(attention, QueryGatedAttention)
        if attention.qk_norm is not None:
            to.q_norm, to.k_norm = (self.norm(getattr(attention, name)) for name in attention.qk_norm.names)
            to.norms_after_rotation = attention.qk_norm.after_rotation
        for sinks in attention.score_options.sink_tensors:
            self._kept.append(sinks)
            to.sinks = library.pointer(sinks)
        to.scale, to.softcap, to.is_interleaved = attention.scale, attention.softcap or 0.0, attention.interleaved
        to.window = _UNLIMITED if attention.window is None else attention.window


def _mixer_inputs(mixer: Any) -> list[Any]:
    """Return the linear layers of a mixer that read the output of the preceding norm."""
    return [getattr(mixer, name) for name in mixer.input_names]
