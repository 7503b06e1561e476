"""Eligibility of models and layers for the fast decoding steps.

| fast step | check of the forward pass | check of the model |
| --- | --- | --- |
| C++ model (cpp_model.py) | `fits_cpp` | `model_reason`: all layers, embedding, final norm and lm_head |
| C++ layers (cpp_layers.py) | `fits_cpp`, `is_plain` | `layers_reason`: all given layers |
| fused norms (fused_norms.py) | `fits_fused_norms`, `is_plain` | `fused_norms_reason`: at least one block |

The forward pass is checked in each step, and the model once per cache. If a fast step is unavailable, `prepared` logs
the reason at level DEBUG, and the decoder runs its layers one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeGuard, TypeVar

import paddle
from paddle import nn

from paddlenlp_ext.models.decoder_layers import (
    ExpertPreNormLayer,
    PostNormLayer,
    PreNormLayer,
    SandwichLayer,
    SingleBlockLayer,
    TwoMixerLayer,
)
from paddlenlp_ext.nn.attention import Attention, AttentionInputs, AttentionLayer
from paddlenlp_ext.nn.embedding import Embedding
from paddlenlp_ext.nn.experts import Experts, MixtureOfExperts
from paddlenlp_ext.nn.feed_forward import FeedForward, ScaledFeedForward
from paddlenlp_ext.nn.gated_attention import QueryGatedAttention
from paddlenlp_ext.nn.gated_delta_net import GatedDeltaNet
from paddlenlp_ext.nn.grouped_linear import GroupedLinear
from paddlenlp_ext.nn.linear import Linear
from paddlenlp_ext.nn.mamba2 import GroupedRMSNorm, Mamba2
from paddlenlp_ext.nn.rms_norm import RMSNorm
from paddlenlp_ext.nn.routers import Router
from paddlenlp_ext.nn.short_convolution import DepthwiseKernel, ShortConvolution
from paddlenlp_ext.nn.ungated_feed_forward import SquaredReLU, UngatedFeedForward, squared_relu
from paddlenlp_ext.ops.attention.key_value_cache import KeyValueCache, ReservingCache
from paddlenlp_ext.ops.cpp import bf16, library
from paddlenlp_ext.ops.dispatch import on_cpu
from paddlenlp_ext.ops.gates import geglu, swiglu
from paddlenlp_ext.ops.norm_linear import norm_linear_op
from paddlenlp_ext.ops.norm_linear.fits_one_launch import MOST_POSITIONS
from paddlenlp_ext.ops.norm_linear.reference import norm_linear_reference
from paddlenlp_ext.ops.quantized_weight import QuantizedWeight
from paddlenlp_ext.ops.training_blocks import AdaptedLinear
from paddlenlp_ext.paddle_compat import has_forward_hooks
from paddlenlp_ext.quantization.quantized_grouped_linear import QuantizedGroupedLinear
from paddlenlp_ext.quantization.quantized_linear import QuantizedLinear
from paddlenlp_ext.utils.logging import get_logger

S = TypeVar("S")
T = TypeVar("T")
_NORM_READERS: dict[type[nn.Layer], tuple[str, ...]] = {
    Attention: ("q_proj", "k_proj", "v_proj"),
    FeedForward: ("gate_proj", "up_proj"),
}
"""Names of the linear layers that read the output of the preceding norm, by type of block."""
_LAYERS = PreNormLayer, ExpertPreNormLayer, SandwichLayer, PostNormLayer, SingleBlockLayer, TwoMixerLayer
"""Types of layers that the C++ step supports."""
_UNCHECKED = DepthwiseKernel, SquaredReLU
"""Types of sublayers that are neither norms nor linear layers."""


def prepared(
    cache: KeyValueCache,
    key: Hashable,
    target: Callable[[], S],
    reason: Callable[[S], str | None],
    make: Callable[[S], T],
    name: str,
) -> T | None:
    """Return the fast decoding step of a cache, or None if the step is unavailable; the first call creates the step.

    Args:
        cache: the cache that stores the step.
        key: key of the step in the cache.
        target: function that returns the model or the layers.
        reason: function that returns the reason why the step is unavailable for the model or the layers, or None if it
            is available.
        make: function that creates the step from the model or the layers.
        name: name of the step in the log.
    """

    def prepare() -> T | None:
        found = target()
        unavailable_reason = reason(found)
        if unavailable_reason is None:
            return make(found)
        get_logger(__name__).debug("decoding runs without %s: %s", name, unavailable_reason)
        return None

    return cache.derived(key, prepare)


def max_length() -> int:
    """Return the maximum number of new positions of a row in a C++ step; the number of rows is not limited.

    The step computes attention one position at a time. For more positions, the attention op is faster than the step.
    """
    return library.small_batch_rows(in_bf16=True)


def fits_cpp(cache: KeyValueCache | None, length: int, first_layer: int = 0) -> TypeGuard[ReservingCache]:
    """Return whether a forward pass can run in C++.

    Args:
        cache: cache of the pass; None: no cache.
        length: number of new positions of a row.
        first_layer: index of the first layer to run. Pipeline stages run their layers in several parts.
    """
    return isinstance(cache, ReservingCache) and cache.has_positions(first_layer) and length <= max_length()


def fits_fused_norms(cache: KeyValueCache | None, num_positions: int, x_BSD: paddle.Tensor) -> TypeGuard[KeyValueCache]:
    """Return whether a forward pass can fuse norms; `num_positions` is the number of new positions in all rows."""
    is_available = norm_linear_op.choose(x_BSD) is not norm_linear_reference
    return is_available and cache is not None and num_positions <= MOST_POSITIONS


def is_plain(inputs: AttentionInputs) -> bool:
    """Return whether a forward pass runs without gradients and without additional inputs of an adapter."""
    return inputs.adapter_inputs is None and not paddle.is_grad_enabled()


def model_reason(model: Any) -> str | None:
    """Return the reason why a `CausalLM` cannot run in one C++ call, or None if it can."""
    decoder, lm_head = model.model, model.lm_head
    embedding, norm = decoder.embed_tokens, decoder.norm
    if decoder.stage is not None or model.vocab_parallel is not None:
        return "the model is distributed over processes"
    if model.config.logit_softcap is not None:
        return "the C++ step does not support a soft-cap of the logits"
    if type(embedding) is not Embedding or type(norm) is not RMSNorm or type(lm_head) not in (Linear, type(None)):
        return "embedding, final norm or lm_head has an adapter, or the C++ step does not support its type"
    matrix = embedding if lm_head is None else lm_head
    dtypes = {embedding.weight.dtype, matrix.weight.dtype}
    if not dtypes <= {paddle.float32, paddle.bfloat16}:
        return f"embedding or lm_head is in {' or '.join(map(str, dtypes))}"
    return (
        _hook_reason((model, decoder, embedding, norm, matrix))
        or on_cpu(norm.weight)
        or library.unavailable_reason()
        or _norm_reason(norm)
        or layers_reason(decoder.layers)
    )


def layers_reason(layers: Iterable[Any]) -> str | None:
    """Return the reason why one of the decoder layers cannot run in C++, or None if all layers can."""
    layers = list(layers)
    reason = next(filter(None, map(_layer_reason, layers)), None)
    if reason is None and not any(isinstance(mixer, AttentionLayer) for layer in layers for mixer in layer.mixers):
        reason = "no layer has attention"
    return reason or library.products_unavailable_reason()


def _layer_reason(layer: Any) -> str | None:
    if type(layer) not in _LAYERS:
        return f"the C++ step does not support {type(layer).__name__}"
    dense, mixture = feed_forwards(layer)
    reason = next(filter(None, map(_mixer_reason, layer.mixers)), None)
    reason = reason or _feed_forward_reason(dense) or _experts_reason(mixture)
    if reason is not None:
        return reason
    scaled = PreNormLayer, ExpertPreNormLayer, SingleBlockLayer
    if layer.residual_multiplier != 1.0 and type(layer) not in scaled:
        return f"the C++ step does not support a residual multiplier in {type(layer).__name__}"
    blocks = [*layer.mixers, *([] if dense is None else [dense])]
    parts = [each for block in blocks for each in block.children() if not isinstance(each, _UNCHECKED)]
    gate = [] if mixture is None or mixture.shared_expert_gate is None else [mixture.shared_expert_gate]
    sublayers: list[Any] = [*parts, *gate, *layer.norms_by_role().values()]
    norms = (RMSNorm, GroupedRMSNorm)
    reasons = (_norm_reason(each) if type(each) in norms else _linear_reason(each) for each in sublayers)
    return _hook_reason(layer.sublayers(include_self=True)) or next(filter(None, reasons), None)


def _mixer_reason(mixer: Any) -> str | None:
    if type(mixer) in (GatedDeltaNet, Mamba2):
        return _recurrent_reason(mixer)
    if type(mixer) is ShortConvolution:
        is_float32 = all(each is None or each.dtype == paddle.float32 for each in (mixer.conv.weight, mixer.conv.bias))
        return "a convolution is sharded or not float32" if mixer.conv.channels is not None or not is_float32 else None
    return _attention_reason(mixer)


def _feed_forward_reason(mlp: Any) -> str | None:
    """Return the reason why a feed-forward block cannot run in C++; None if it can, or without a block."""
    gated = type(mlp) in (FeedForward, ScaledFeedForward) and mlp.gate in (swiglu, geglu)
    ungated = type(mlp) is UngatedFeedForward and type(mlp.act_fn) is SquaredReLU
    return None if mlp is None or gated or ungated else f"the C++ step does not support {type(mlp).__name__}"


def feed_forwards(layer: Any) -> tuple[Any, MixtureOfExperts | None]:
    """Return the feed-forward block or shared expert, and the expert layer; None for a part that the layer lacks."""
    mixture = layer.mixture
    return (layer.mlp if layer.mlp is not mixture else None if mixture is None else mixture.shared_layer), mixture


def _experts_reason(mixture: MixtureOfExperts | None) -> str | None:
    """Return the reason why an expert layer cannot run in C++; None if it can, or without an expert layer."""
    if mixture is None:
        return None
    if type(mixture) is not MixtureOfExperts:
        return f"the C++ step does not support {type(mixture).__name__}"
    shape, experts, router = mixture.shape, mixture.experts, mixture.router_layer
    if type(experts) is not Experts or type(router) is not Router:
        return f"the C++ step does not support {type(experts).__name__} with {type(router).__name__}"
    if experts.num_local != shape.num_experts:
        return "experts are distributed over processes"
    if shape.latent_size or shape.bias or experts.gate not in (swiglu, geglu, squared_relu):
        return "the C++ step does not support latents, biases or clamped gates of experts"
    if shape.router.num_groups > 1:
        return "the C++ step does not support groups of experts"
    if any(each is not None and each.dtype != paddle.float32 for each in (router.weight, router.bias)):
        return f"a router is in {router.weight.dtype}"
    return _grouped_reason(experts.input_layer) or _grouped_reason(experts.down_proj)


def _grouped_reason(layer: Any) -> str | None:
    if type(layer) is QuantizedGroupedLinear:
        return None if layer.stored.matrices.is_plain else "a weight has zero points or reordered columns"
    if type(layer) is not GroupedLinear:
        return f"the C++ step does not support {type(layer).__name__}"
    return _dense_reason(layer.weight)


def _attention_reason(attention: Any) -> str | None:
    if not isinstance(attention, AttentionLayer):
        return f"the C++ step does not support {type(attention).__name__}"
    if type(attention) not in (Attention, QueryGatedAttention) or attention.slopes_N is not None:
        return "the C++ step does not support latent attention, separate gates or ALiBi"
    if attention.qk_norm is not None and not attention.qk_norm.per_head:
        return "the C++ step does not support QK norms over all heads"
    return None


def _recurrent_reason(mixer: GatedDeltaNet | Mamba2) -> str | None:
    if mixer.conv1d.channels is not None:
        return f"the heads of a {mixer.shape.kind} mixer are sharded"
    weights = mixer.conv1d.weight, mixer.conv1d.bias, mixer.A_log, mixer.dt_bias, getattr(mixer, "D", None)
    is_float32 = all(each is None or each.dtype == paddle.float32 for each in weights)
    return None if is_float32 else "a convolution or decay is not float32"


def _hook_reason(layers: Sequence[nn.Layer]) -> str | None:
    return next((f"{type(layer).__name__} has hooks" for layer in layers if has_forward_hooks(layer)), None)


def _norm_reason(norm: RMSNorm) -> str | None:
    return None if norm.shards is None and norm.weight.dtype == paddle.float32 else "a norm is sharded or not float32"


def linear_operands(layer: Any) -> AdaptedLinear | None:
    """Return the operands of a linear layer, with or without LoRA; None if the C++ step does not support the layer."""
    base = getattr(layer, "base", layer)
    if type(base) not in (Linear, QuantizedLinear):
        return None
    if base is not layer:
        return layer.as_adapted_linear() if hasattr(layer, "as_adapted_linear") else None
    return AdaptedLinear(base.weight if type(base) is Linear else base.stored, base.bias)


def _linear_reason(layer: Any) -> str | None:
    operands = linear_operands(layer)
    if operands is None:
        return f"the C++ step does not support {type(layer).__name__}"
    weight, bias = operands.weight, operands.bias
    if bias is not None and bias.dtype != paddle.float32:
        return f"a bias is in {bias.dtype}"
    if isinstance(weight, QuantizedWeight):
        return None if weight.is_plain else "a weight has zero points or reordered columns"
    return _dense_reason(weight)


def _dense_reason(weight: paddle.Tensor) -> str | None:
    if weight.dtype == paddle.bfloat16:
        return bf16.unavailable_reason()
    return None if weight.dtype == paddle.float32 else f"a weight is in {weight.dtype}"


def block_reason(block: Any, norm: Any) -> str | None:
    """Return the reason why the norm before an attention or feed-forward block cannot be fused, or None if it can."""
    readers = norm_readers(block)
    if not readers:
        return f"a norm before {type(block).__name__} cannot be fused"
    if not all(type(each) is QuantizedLinear for each in readers):
        return "a linear layer that reads the norm is not quantized, or has an adapter"
    if type(norm) is not RMSNorm or norm.shards is not None:
        return "the norm is not an RMSNorm, or is sharded"
    return _hook_reason((block, norm, *readers))


def fused_norms_reason(layers: Iterable[Any]) -> str | None:
    """Return the reason why no norm of the given layers can be fused, or None if at least one norm can be fused."""
    reasons = [block_reason(block, norm) for layer in layers for block, norm in normed_blocks(layer)]
    return None if None in reasons else next(iter(reasons), "no layer has a norm before attention and feed-forward")


def normed_blocks(layer: Any) -> list[tuple[Any, Any]]:
    """Return (block, preceding norm) for a layer's attention and feed-forward.

    The result is empty if no norm precedes the blocks, or if the layer has hooks.
    """
    if type(layer) not in (PreNormLayer, SandwichLayer) or has_forward_hooks(layer):
        return []
    norms = layer.norms_by_role()
    return [(layer.mixer, norms["attention_norm"]), (layer.mlp, norms["mlp_norm"])]


def norm_readers(block: Any) -> list[Any]:
    """Return the linear layers of a block that read the output of the preceding norm."""
    return [getattr(block, name) for name in _NORM_READERS.get(type(block), ())]
