"""Training blocks in C++: a norm and the token mixer or feed-forward layer after it (csrc/*_block.cpp).

    attention           y = x + o(attention(rotate(q(n)), rotate(k(n)), v(n)))        n = norm(x)
    gated delta net     y = x + o(norm(gated_delta_rule(silu(convolution(qkv(n))), a(n), b(n))) * silu(z(n)))
    feed-forward        y = x + down(activation(gate(n)) * up(n))

A block is one autograd node with one C++ call per direction. It replaces about ten ops and their autograd nodes. The
backward pass computes the gradients of x and of all trained parameters: weights, biases, low-rank factors and norms.

Shapes: B batch, S sequence, D hidden, H head dimension, R rotated channels of a head, N value
heads, C channels and L taps of a convolution.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import paddle
from paddle.autograd import PyLayer

from paddlenlp_ext.ops.attention import AttentionLayout
from paddlenlp_ext.ops.attention.cpp import attention_sizes
from paddlenlp_ext.ops.cpp import library
from paddlenlp_ext.ops.cpp.api_header import struct
from paddlenlp_ext.ops.cpp.bf16 import as_bf16, bf16_matmuls_enabled, uses_bf16
from paddlenlp_ext.ops.gated_delta_rule.cpp import DELTA_RULE
from paddlenlp_ext.ops.quantized_weight import QuantizedWeight
from paddlenlp_ext.ops.quantized_weight.cpp import packed_struct
from paddlenlp_ext.ops.tensor_utils import contiguous, needs_grad

_NORMS = ("norm", "q_norm", "k_norm")
"""Fields of the C++ structs for the scales of norms that can be trained."""


@dataclass(frozen=True)
class AdaptedLinear:
    """Linear layer with an optional low-rank update, x W^T + bias + s (x A^T) B^T.

    Attributes:
        weight: W [out, in].
        bias: [out], or None.
        a: A [r, in], or None without an update.
        b: B [out, r], or None without an update.
        scaling: factor s of the update.
    """

    weight: paddle.Tensor | QuantizedWeight
    bias: paddle.Tensor | None
    a: paddle.Tensor | None = None
    b: paddle.Tensor | None = None
    scaling: float = 0.0

    @property
    def tensors(self) -> list[paddle.Tensor]:
        """The unquantized tensors of the layer."""
        return [each for each in (self.weight, self.bias, self.a, self.b) if isinstance(each, paddle.Tensor)]


@dataclass(frozen=True)
class BlockNorm:
    """RMS norm before a block.

    Attributes:
        scale: factor of each channel, float32 [D].
        epsilon: constant added to the mean square; in attention, the QK norms use it too.
    """

    scale: paddle.Tensor
    epsilon: float


@dataclass(frozen=True)
class BlockAttention:
    """Options of the attention in a block.

    Attributes:
        head_dim: channels per head.
        scale: factor of the scores.
        softcap: soft-cap of the scores; 0: no soft-cap.
        layout: documents of the batch.
        rotation: cosines and sines [B, S, R]; None without RoPE.
        interleaved: whether RoPE rotates neighbouring channels instead of halves.
        qk_scales: scales of the QK norms of queries and keys, float32 [H]; None without QK norms.
        norms_after_rotation: whether the QK norms are applied after RoPE.
        has_gates: whether q returns the query and then the gate of each head; the output of attention is multiplied by
            sigmoid(gate).
    """

    head_dim: int
    scale: float
    softcap: float
    layout: AttentionLayout
    rotation: tuple[paddle.Tensor, paddle.Tensor] | None
    interleaved: bool
    qk_scales: tuple[paddle.Tensor, paddle.Tensor] | None
    norms_after_rotation: bool
    has_gates: bool


@dataclass(frozen=True)
class BlockDeltaNet:
    """Options of the gated delta net in a block.

    Attributes:
        heads: G key heads and N value heads.
        head_dims: channels of a key head and of a value head.
        layout: documents of the batch.
        head_norm: norm of the value heads.
        kernel: weight of the convolution, float32 [C, L].
        rates: -exp(A_log) of each value head, float32 [N].
        dt_bias: term of the input of softplus, float32 [N].
    """

    heads: tuple[int, int]
    head_dims: tuple[int, int]
    layout: AttentionLayout
    head_norm: BlockNorm
    kernel: paddle.Tensor
    rates: paddle.Tensor
    dt_bias: paddle.Tensor


def attention_block(
    x_BSD: paddle.Tensor, norm: BlockNorm, linears: Mapping[str, AdaptedLinear], options: BlockAttention
) -> paddle.Tensor:
    """Return `x + o(attention(...))` [B, S, D] for float32 x [B, S, D] on the CPU; `linears` are q, k, v and o."""
    kv_heads = linears["k"].weight.shape[0] // options.head_dim
    heads = linears["o"].weight.shape[1] // options.head_dim
    shape = heads, kv_heads, options.head_dim, options.head_dim, 0
    fields = {
        "sizes": attention_sizes(options.layout, *shape, options.softcap, None),
        "scale": options.scale,
        "is_interleaved": options.interleaved,
        "norms_after_rotation": options.norms_after_rotation,
        "has_gates": options.has_gates,
        "attends_in_bf16": bf16_matmuls_enabled(),
    }
    assert options.layout.num_positions == x_BSD.shape[0] * x_BSD.shape[1], f"{x_BSD.shape} does not match the layout"
    if options.rotation is not None:
        cos, sin = map(contiguous, options.rotation)
        assert cos.shape[:2] == sin.shape[:2] == x_BSD.shape[:2], "the tables' shape does not match x"
        fields |= {"cos": cos, "sin": sin, "rotated": cos.shape[2]}
    if options.qk_scales is not None:
        fields |= dict(zip(("q_norm", "k_norm"), options.qk_scales, strict=True))
    return _Block("attention_block", "AttentionBlock", norm, linears, fields).run(x_BSD)


def delta_net_block(
    x_BSD: paddle.Tensor, norm: BlockNorm, linears: Mapping[str, AdaptedLinear], options: BlockDeltaNet
) -> paddle.Tensor:
    """Return `x + mixer(norm(x))` [B, S, D] of a gated delta net, for float32 x [B, S, D] on the CPU.

    Args:
        x_BSD: input of the block.
        norm: norm before the block.
        linears: qkv, z, a, b and o.
        options: further weights and sizes.
    """
    positions = x_BSD.shape[0] * x_BSD.shape[1]
    assert options.layout.num_positions == positions, f"{x_BSD.shape} does not match the layout"
    kernel = contiguous(options.kernel.transpose([1, 0]))
    assert kernel.shape[1] == linears["qkv"].weight.shape[0], "kernel and projection do not match"
    fields = {
        "sizes": DELTA_RULE.sizes_of_documents(options.layout, (*options.heads, *options.head_dims)),
        "head_norm": options.head_norm.scale,
        "head_epsilon": options.head_norm.epsilon,
        "kernel": kernel,
        "num_taps": kernel.shape[0],
        "rates": options.rates,
        "dt_bias": options.dt_bias,
        "positions": positions,
    }
    return _Block("delta_net_block", "DeltaNetBlock", norm, linears, fields).run(x_BSD)


def feed_forward_block(
    x_BSD: paddle.Tensor, norm: BlockNorm, linears: Mapping[str, AdaptedLinear], is_gelu: bool
) -> paddle.Tensor:
    """Return `x + down(activation(gate(norm(x))) * up(norm(x)))` [B, S, D] for float32 x [B, S, D] on the CPU.

    Args:
        x_BSD: input of the block.
        norm: norm before the block.
        linears: gate, up and down.
        is_gelu: whether the activation is the tanh approximation of gelu; otherwise, the activation is silu.
    """
    fields = {"positions": x_BSD.shape[0] * x_BSD.shape[1], "is_gelu": is_gelu}
    return _Block("feed_forward_block", "FeedForwardBlock", norm, linears, fields).run(x_BSD)


class _Block:
    """Arguments of the C++ functions of a block.

    Each call reads the addresses of the tensors again, because a layer may release its weights between the forward and
    the backward pass (ZeRO stage 3).

    Attributes:
        trained: tensors that get gradients.
    """

    def __init__(
        self,
        name: str,
        struct_name: str,
        norm: BlockNorm,
        linears: Mapping[str, AdaptedLinear],
        fields: Mapping[str, Any],
    ) -> None:
        in_bf16 = {uses_bf16(each.weight) for each in linears.values()}
        assert len(in_bf16) == 1, "the products of a block have one dtype"
        self._name, self._struct_name, self._linears = name, struct_name, linears
        self._fields: dict[str, Any] = {**fields, "norm": norm.scale, "epsilon": norm.epsilon, "is_bf16": in_bf16.pop()}
        norms = [self._fields[each] for each in _NORMS if each in self._fields]
        tensors = [*norms, *(tensor for each in linears.values() for tensor in each.tensors)]
        self.trained = [each for each in tensors if not each.stop_gradient]
        # Layers that share a tensor would write their gradients to the same buffer.
        assert len({*map(id, self.trained)}) == len(self.trained), "layers of a block share a trained tensor"

    def run(self, x: paddle.Tensor) -> paddle.Tensor:
        """Run the forward pass, with autograd if a gradient is needed."""
        x = contiguous(x)
        return _Node.apply(x, self, *self.trained) if needs_grad(x, *self.trained) else self.forward(x)[0]

    def forward(self, x: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Return the output, and the tensors for the backward pass as bytes."""
        kept: list[Any] = []
        block, size = self._struct(x, {}, kept), ctypes.c_int64()
        library.function(f"{self._name}_saved")(block, ctypes.byref(size))
        y, saved = library.empty(x.shape), library.empty([size.value], "uint8")
        library.function(f"{self._name}_forward")(block, *map(library.pointer, (x, y, saved)))
        return y, saved

    def backward(
        self,
        x: paddle.Tensor,
        saved: paddle.Tensor,
        y_gradient: paddle.Tensor,
        x_gradient: paddle.Tensor | None,
    ) -> list[paddle.Tensor]:
        """Write the gradient of x unless it is None; return the gradients of the trained tensors."""
        kept: list[Any] = []
        gradients = {id(each): library.empty(each.shape) for each in self.trained}
        block = self._struct(x, gradients, kept)
        library.function(f"{self._name}_backward")(block, *map(_as_field, (x, saved, y_gradient, x_gradient)))
        # Sums are float32, and the gradient of a bfloat16 weight is rounded once.
        return [
            as_bf16(gradients[id(each)]) if each.dtype == paddle.bfloat16 else gradients[id(each)]
            for each in self.trained
        ]

    def _struct(self, x: paddle.Tensor, gradients: Mapping[int, paddle.Tensor], kept: list[Any]) -> object:
        """Return a pointer to the struct of the block.

        Args:
            x: input of the block.
            gradients: float32 tensors for the gradients, by the identity of the trained tensor.
            kept: receives the objects that must outlive the call.
        """
        fields = {**self._fields, "hidden": x.shape[-1]}
        fields |= {f"{each}_gradient": gradients.get(id(fields[each])) for each in _NORMS if each in fields}
        for name, linear in self._linears.items():
            fields[name] = self._linear_struct(linear, gradients, kept)
        kept.append(fields)
        return ctypes.byref(struct(self._struct_name)(**{name: _as_field(value) for name, value in fields.items()}))

    def _linear_struct(
        self, linear: AdaptedLinear, gradients: Mapping[int, paddle.Tensor], kept: list[Any]
    ) -> ctypes.Structure:
        weight, is_trained = linear.weight, False
        stored: list[Any]
        if isinstance(weight, QuantizedWeight):
            stored = [None, packed_struct(weight)]
        else:
            operand, is_trained = contiguous(weight), not weight.stop_gradient
            stored = [as_bf16(operand) if self._fields["is_bf16"] else operand, None]
        kept += stored
        rank = 0 if linear.a is None else linear.a.shape[0]
        parameters = weight, linear.bias, linear.a, linear.b
        pointers = map(_as_field, (*stored, *parameters[1:], *(gradients.get(id(each)) for each in parameters)))
        return struct("BlockLinear")(*pointers, *reversed(weight.shape), rank, linear.scaling, is_trained)


class _Node(PyLayer):
    @staticmethod
    def forward(ctx, x, block, *trained):
        y, saved = block.forward(x)
        ctx.block, ctx.needs_x = block, not x.stop_gradient
        ctx.save_for_backward(x, saved, *trained)
        return y

    @staticmethod
    def backward(ctx, y_gradient):
        x, saved, *_ = ctx.saved_tensor()
        x_gradient = library.empty(x.shape) if ctx.needs_x else None
        return x_gradient, *ctx.block.backward(x, saved, contiguous(y_gradient), x_gradient)


def _as_field(value: Any) -> Any:
    """Return the value of a field of a struct: an address for a tensor or another struct."""
    if isinstance(value, paddle.Tensor):
        return library.pointer(value)
    return ctypes.addressof(value) if isinstance(value, ctypes.Structure) else value
