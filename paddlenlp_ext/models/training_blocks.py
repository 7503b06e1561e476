"""Token mixer and feed-forward of a decoder layer as training blocks, one C++ call each (ops/training_blocks.py).

`run_mixer_block` and `run_feed_forward_block` return None for a layer or a pass that the C++ call does not support. The
layer then runs op by op, and the reason is logged once at DEBUG.

| check | supported |
| --- | --- |
| pass | with gradients, in float32 on the CPU; no cache, key-value prefix, shared prompt or inputs of adapters |
| recomputation | whole layers, or none |
| attention | grouped-query attention, with QK norms per head and gates of `q_proj`; no ALiBi and no sinks |
| gated delta nets | separate projections, frozen convolution, decays and norm of heads; no tensor parallelism |
| feed-forward | SwiGLU and GeGLU |
| linear layers | trained, frozen or quantized, with LoRA or without an adapter |

Shapes: B batch, S sequence, D hidden.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import paddle

from paddlenlp_ext.nn.attention import Attention, AttentionInputs
from paddlenlp_ext.nn.feed_forward import FeedForward
from paddlenlp_ext.nn.gated_attention import QueryGatedAttention
from paddlenlp_ext.nn.gated_delta_net import GatedDeltaNet
from paddlenlp_ext.nn.recompute import is_recomputed, selects_regions
from paddlenlp_ext.nn.rms_norm import RMSNorm
from paddlenlp_ext.ops.cpp import library
from paddlenlp_ext.ops.cpp.bf16 import uses_bf16
from paddlenlp_ext.ops.gates import geglu, swiglu
from paddlenlp_ext.ops.quantized_weight import QuantizedWeight
from paddlenlp_ext.ops.rms_norm.reference import scale_of
from paddlenlp_ext.ops.tensor_utils import needs_grad
from paddlenlp_ext.ops.training_blocks import (
    AdaptedLinear,
    BlockAttention,
    BlockDeltaNet,
    BlockNorm,
    attention_block,
    delta_net_block,
    feed_forward_block,
)
from paddlenlp_ext.paddle_compat import has_forward_hooks, is_symbolic
from paddlenlp_ext.utils.logging import get_logger

_ATTENTION_LINEARS = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "o"}
_DELTA_NET_LINEARS = {"in_proj_qkv": "qkv", "in_proj_z": "z", "in_proj_a": "a", "in_proj_b": "b", "out_proj": "o"}
_FEED_FORWARD_LINEARS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
"""Fields of the C++ struct of a block for the linear layers."""


def run_mixer_block(layer: Any, x_BSD: paddle.Tensor, inputs: AttentionInputs) -> paddle.Tensor | None:
    """Return `x + mixer(norm(x))` [B, S, D] of a pre-norm layer, or None if the C++ call does not support it."""
    mixer, norm = layer.mixer, layer.norms_by_role()["attention_norm"]
    is_delta_net = type(mixer) is GatedDeltaNet
    names = _DELTA_NET_LINEARS if is_delta_net else _ATTENTION_LINEARS
    reason = _pass_reason(layer, norm, x_BSD, inputs)
    reason = reason or (_delta_net_reason(mixer) if is_delta_net else _attention_reason(mixer, norm.epsilon))
    linears: dict[str, AdaptedLinear] = {}
    reason = reason or _take_linears(mixer, names, linears) or _gradient_reason((x_BSD,), norm, linears)
    if reason is not None:
        _log("gated delta net" if is_delta_net else "attention", reason)
        return None
    if is_delta_net:
        return delta_net_block(x_BSD, _norm(norm), linears, _delta_net_options(mixer, inputs))
    return attention_block(x_BSD, _norm(norm), linears, _attention_options(mixer, inputs))


def run_feed_forward_block(
    layer: Any, x_BSD: paddle.Tensor, inputs: AttentionInputs, addend_BSD: paddle.Tensor | None = None
) -> paddle.Tensor | None:
    """Return `x + mlp(norm(x))` [B, S, D] of a pre-norm layer, or None if the C++ call does not support it.

    Args:
        layer: decoder layer.
        x_BSD: hidden states, or their first summand.
        inputs: inputs of the pass.
        addend_BSD: second summand of x; None: no second summand.
    """
    mlp, norm = layer.mlp, layer.norms_by_role()["mlp_norm"]
    reason = _pass_reason(layer, norm, x_BSD, inputs) or _feed_forward_reason(mlp)
    linears: dict[str, AdaptedLinear] = {}
    reason = reason or _take_linears(mlp, _FEED_FORWARD_LINEARS, linears)
    summands = (x_BSD,) if addend_BSD is None else (x_BSD, addend_BSD)
    reason = reason or _gradient_reason(summands, norm, linears)
    if reason is not None:
        _log("feed-forward", reason)
        return None
    total_BSD = x_BSD if addend_BSD is None else x_BSD + addend_BSD
    return feed_forward_block(total_BSD, _norm(norm), linears, is_gelu=mlp.gate is geglu)


def _attention_options(attention: Any, inputs: AttentionInputs) -> BlockAttention:
    return BlockAttention(
        attention.head_dim,
        attention.scale,
        attention.softcap or 0.0,
        inputs.layouts[attention.window],
        inputs.rotations[attention.layer_index] if attention.rotates else None,
        attention.interleaved,
        *_qk_norms(attention),
        has_gates=type(attention) is QueryGatedAttention,
    )


def _delta_net_options(net: GatedDeltaNet, inputs: AttentionInputs) -> BlockDeltaNet:
    shape = net.shape
    return BlockDeltaNet(
        (shape.num_key_heads, shape.num_value_heads),
        (shape.key_dim, shape.value_dim),
        inputs.layouts[None],
        _norm(net.head_norm),
        net.conv1d.weight.squeeze(1),
        -net.A_log.exp(),
        net.dt_bias,
    )


def _take_linears(block: Any, names: Mapping[str, str], linears: dict[str, AdaptedLinear]) -> str | None:
    """Add the linear layers to `linears`, by struct field; return the reason why a layer is unsupported, or None."""
    if has_forward_hooks(block):
        return f"{type(block).__name__} has hooks"
    for name, field in names.items():
        layer = getattr(block, name)
        hooked = (layer, layer.base) if hasattr(layer, "base") else (layer,)
        linear = layer.as_adapted_linear() if hasattr(layer, "as_adapted_linear") else None
        if linear is None or any(map(has_forward_hooks, hooked)):
            return f"{name} has hooks, dropout, 8-bit products or an adapter other than LoRA"
        reason = _linear_reason(linear)
        if reason is not None:
            return f"{name}: {reason}"
        linears[field] = linear
    return "products have different dtypes" if len({uses_bf16(each.weight) for each in linears.values()}) > 1 else None


def _gradient_reason(summands: Sequence[paddle.Tensor], norm: Any, linears: Mapping[str, AdaptedLinear]) -> str | None:
    """Return a reason if the pass needs no gradients.

    Without gradients, every model runs op by op, so that frozen weights give the same bits as trained weights.
    """
    tensors = [norm.weight, *(tensor for each in linears.values() for tensor in each.tensors)]
    return None if is_recomputed() or needs_grad(*summands, *tensors) else "the pass needs no gradients"


def _pass_reason(layer: Any, norm: Any, x_BSD: paddle.Tensor, inputs: AttentionInputs) -> str | None:
    if inputs.cache is not None or inputs.prefix is not None or inputs.num_shared or inputs.adapter_inputs is not None:
        return "the pass has a cache, a prefix, a shared prompt, or inputs of an adapter"
    if inputs.query_scale is not None or layer.residual_multiplier != 1.0:
        return "the C++ block does not support query scales or a residual multiplier"
    if is_symbolic(x_BSD):
        return "the model is being exported"
    unavailable_reason = library.usable(x_BSD) or library.products_unavailable_reason()
    if unavailable_reason is not None:
        return unavailable_reason
    if x_BSD.shape[0] * x_BSD.shape[1] <= library.small_batch_rows(in_bf16=True):
        return "the pass has only a few positions"
    return "the recompute plan selects regions of a layer" if selects_regions() else _norm_reason(norm)


def _attention_reason(attention: Any, epsilon: float) -> str | None:
    if type(attention) not in (Attention, QueryGatedAttention):
        return f"the C++ block does not support {type(attention).__name__}"
    if attention.slopes_N is not None or attention.sinks is not None:
        return "the C++ block does not support ALiBi or sinks"
    if attention.implementation not in (None, "cpp"):
        return f"the attention backend is {attention.implementation!r}"
    if attention.qk_norm is None:
        return None
    norms = [getattr(attention, name) for name in attention.qk_norm.names]
    if not attention.qk_norm.per_head or any(type(each) is RMSNorm and each.epsilon != epsilon for each in norms):
        return "the C++ block does not support QK norms over all heads, or with a different epsilon"
    return next(filter(None, map(_norm_reason, norms)), None)


def _delta_net_reason(net: GatedDeltaNet) -> str | None:
    weights = net.conv1d.weight, net.A_log, net.dt_bias
    if net.conv1d.channels is not None:
        return "the gated delta net is sharded"
    if any(not each.stop_gradient for each in (*weights, net.head_norm.weight)):
        return "the convolution, the decays or the norm of heads are trained"
    if any(each.dtype != paddle.float32 for each in weights):
        return "the convolution or the decays are not float32"
    return "the convolution has hooks" if has_forward_hooks(net.conv1d) else _norm_reason(net.head_norm)


def _feed_forward_reason(mlp: Any) -> str | None:
    is_covered = type(mlp) is FeedForward and mlp.gate in (swiglu, geglu)
    return None if is_covered else f"the C++ block does not support {type(mlp).__name__}"


def _norm_reason(norm: Any) -> str | None:
    if type(norm) is not RMSNorm or norm.shards is not None or norm.weight.dtype != paddle.float32:
        return "a norm is not an RMSNorm, or is sharded or not float32"
    return "a norm has hooks" if has_forward_hooks(norm) else None


def _linear_reason(linear: AdaptedLinear) -> str | None:
    weight = linear.weight
    if isinstance(weight, QuantizedWeight):
        if not weight.is_plain:
            return "the weight has zero points or reordered columns"
    elif not (weight.dtype == paddle.float32 or uses_bf16(weight)):
        return f"the weight is in {weight.dtype}, which matrix products do not support on this processor"
    others = [each for each in linear.tensors if each is not weight]
    if any(each.dtype != paddle.float32 or not each.is_contiguous() for each in others):
        return "a bias or a factor is not float32 or not contiguous"
    return None


def _qk_norms(attention: Any) -> tuple[tuple[paddle.Tensor, paddle.Tensor] | None, bool]:
    """Return the scales of the QK norms, and whether the norms are applied after RoPE."""
    if attention.qk_norm is None:
        return None, False
    q_scale, k_scale = (_norm(getattr(attention, name)).scale for name in attention.qk_norm.names)
    return (q_scale, k_scale), attention.qk_norm.after_rotation


def _norm(norm: Any) -> BlockNorm:
    return BlockNorm(scale_of(norm.weight, norm.offset), norm.epsilon)


@functools.cache
def _log(block: str, reason: str) -> None:
    """Log a reason once."""
    get_logger(__name__).debug("%s runs op by op: %s", block, reason)
