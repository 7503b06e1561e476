"""Inputs that the linear layers and adapters of a decoder layer save for the backward pass, from shapes only.

A trained linear layer saves its input in the matmul dtype. A frozen linear layer saves its input with Paddle's matmul,
but not with the C++ library. LoRA fused with its base layer saves its input in the matmul dtype. Every other adapter
computes in separate ops in full precision, and saves its input unconverted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

from paddle import nn

from paddlenlp_ext.models.decoder_layers import DecoderLayer, ParallelLayer, ScaledSandwichLayer, TwoMixerLayer
from paddlenlp_ext.nn.experts import MixtureOfExperts
from paddlenlp_ext.nn.feed_forward import FeedForward, FeedForwardLayer
from paddlenlp_ext.nn.layer_norm import LayerNorm
from paddlenlp_ext.nn.normed_mixture import NormedMixture
from paddlenlp_ext.nn.rms_norm import RMSNorm
from paddlenlp_ext.nn.token_mixer import TokenMixer
from paddlenlp_ext.peft.layers import AdapterLayer, LinearAdapter, adapter_layers
from paddlenlp_ext.peft.lora.expert_layers import LoRAExperts
from paddlenlp_ext.peft.methods.prompt_tuning import PromptAdapter
from paddlenlp_ext.peft.peft_model import PeftModel
from paddlenlp_ext.sharding_spec import is_expert_parallel
from paddlenlp_ext.trainer.memory.adapter_activations import saved_activations
from paddlenlp_ext.trainer.memory.layer_activations import Numerics, SavedInputs

_DROPOUT = 1.25
"""Memory that dropout saves per input element, in fp32 elements: 1 for the output, and 0.25 for a mask of one byte."""


def saved_inputs(model: Any, numerics: Numerics) -> SavedInputs:
    """Return the saved inputs of the model's decoder layers, averaged over the layers.

    Args:
        model: a `CausalLM` or `PeftModel`; only its shapes are read.
        numerics: dtypes and fused ops of the backend.
    """
    layers = [layer for _, layer in model.named_sublayers() if isinstance(layer, DecoderLayer)]
    each = [_inputs_of_layer(layer, model.config.hidden_size, numerics) for layer in layers]
    means = {name: math.fsum(getattr(one, name) for one in each) / len(each) for name in vars(each[0])}
    if isinstance(model, PeftModel) and isinstance(model.adapter, PromptAdapter) and not numerics.cpp:
        means["result"] = numerics.attention  # the input of o_proj concatenates the outputs for prompt and documents
    return SavedInputs(**means)


def has_separate_adapters(model: Any) -> bool:
    """Return whether an adapter computes in separate Paddle ops instead of an op fused with its base layer."""
    return any(_is_separate(layer) for _, layer in adapter_layers(model))


def _inputs_of_layer(layer: DecoderLayer, hidden_size: int, numerics: Numerics) -> SavedInputs:
    parts = list(layer.sublayers())
    mixers = [part for part in parts if isinstance(part, TokenMixer)]
    adapters = [part for part in parts if isinstance(part, AdapterLayer)]
    into_attention = [_readers(mixer) for mixer in mixers]
    if not (isinstance(layer, TwoMixerLayer) and layer.scales_inputs):
        into_attention = [[reader for readers in into_attention for reader in readers]]
    of_latents = [attrgetter(name)(mixer) for mixer in mixers for name in mixer.latent_names]
    out_of_attention = [mixer.output_layer for mixer in mixers]
    experts = next((part for part in parts if isinstance(part, MixtureOfExperts)), None)
    feed_forward = next((part for part in parts if isinstance(part, FeedForwardLayer)), None)
    into_feed_forward = () if feed_forward is None else _readers(feed_forward)
    out_of_feed_forward = () if feed_forward is None else (feed_forward.down_proj,)
    shares_norm = isinstance(layer, ParallelLayer)
    if shares_norm:
        into_attention[0] += into_feed_forward
    normed = 0.0 if shares_norm else _bytes_of_normed(into_feed_forward, numerics)
    if isinstance(experts, NormedMixture):
        normed += 2 * numerics.attention  # the normalized inputs of router and experts
    elif experts is not None:
        normed = max(normed, _bytes_of_expert_input(experts, numerics))
    is_gated = isinstance(feed_forward, FeedForward)  # only a gate op recomputes the input of down_proj
    as_product = numerics.gated if is_gated else numerics.product
    gated = _bytes_of_input(out_of_feed_forward, numerics, numerics.attention, as_product)
    of_embedding = 0.0
    if hasattr(layer, "per_layer_input_gate"):
        gate, projection = (getattr(layer, f"per_layer_{name}") for name in ("input_gate", "projection"))
        normed += _bytes_of_input([gate], numerics, numerics.attention, numerics.product)
        of_embedding = _bytes_of_input([projection], numerics, numerics.attention, numerics.gated)
    return SavedInputs(
        attention=sum(_bytes_of_normed(readers, numerics) for readers in into_attention),
        result=_bytes_of_input(out_of_attention, numerics, 0.0, numerics.result),
        latents=_bytes_of_input(of_latents, numerics, numerics.attention, numerics.product),
        feed_forward=normed,
        gated=gated if experts is None else _bytes_of_gated(experts, gated, numerics),
        adapters=sum(_bytes_of_adapter(adapter, numerics) * _rows_per_token(adapter, parts) for adapter in adapters),
        embedding=of_embedding,
        exchanged=0.0 if experts is None else _bytes_of_exchanged_rows(experts, hidden_size, numerics),
        norms=_num_norms(layer) + isinstance(layer, ScaledSandwichLayer),
    )


def _num_norms(layer: DecoderLayer) -> int:
    """Return the number of norms of hidden states, including norms that an adapter has replaced."""
    return sum(isinstance(getattr(each, "base", each), RMSNorm | LayerNorm) for each in layer.children())


def _readers(block: TokenMixer | FeedForwardLayer) -> list[nn.Layer]:
    """Return the linear layers of a block that read the hidden states."""
    return [attrgetter(name)(block) for name in block.input_names]


def _rows_per_token(adapter: AdapterLayer, parts: list[nn.Layer]) -> int:
    """Return the number of rows that an adapter processes per token: `top_k` for adapters of experts, else 1."""
    if not isinstance(adapter, LoRAExperts):
        return 1
    return next(part for part in parts if isinstance(part, MixtureOfExperts)).shape.router.top_k


def _bytes_of_expert_input(layer: MixtureOfExperts, numerics: Numerics) -> float:
    """Return the bytes that an expert layer saves per element of its input.

    The router saves the input, even if the router is frozen. A gated shared expert also saves its output, a tensor as
    large as the input.
    """
    return numerics.attention * (2 if layer.shape.gates_shared else 1)


def _bytes_of_gated(layer: MixtureOfExperts, of_shared: float, numerics: Numerics) -> float:
    """Return the bytes that an expert layer saves per element of act(gate) * up, averaged over its experts.

    Without the C++ library, the product with the router weights saves act(gate) * up. The down projection saves the
    scaled rows if its weight or its adapter is trained.

    Args:
        layer: the expert layer.
        of_shared: bytes per element of the shared expert.
        numerics: dtypes and fused ops of the backend.
    """
    shape = layer.shape
    trains = any(not parameter.stop_gradient for parameter in layer.experts.down_proj.parameters())
    of_routed = 0.0 if numerics.cpp else (2 if trains else 1) * numerics.product
    routed_size = shape.router.top_k * shape.intermediate_size
    return (of_routed * routed_size + of_shared * shape.shared_size) / shape.active_size


def _bytes_of_exchanged_rows(layer: MixtureOfExperts, hidden_size: int, numerics: Numerics) -> float:
    """Return the bytes per token of the hidden states that experts receive from other processes and save.

    Without expert parallelism, the result is 0, because the backward pass gathers the hidden states of local tokens
    again (ops/expert_rows.py).
    """
    if not any(is_expert_parallel(parameter) for parameter in layer.experts.parameters()):
        return 0.0
    return numerics.attention * layer.shape.router.top_k * hidden_size


def _bytes_of_normed(linears: Iterable[nn.Layer], numerics: Numerics) -> float:
    """Return the bytes that `linears` save per element of their common input, the output of a norm."""
    if not numerics.autocast:
        return _bytes_of_input(linears, numerics, numerics.attention, numerics.product)
    saving = [linear for linear in linears if _saves_input(linear, numerics)]
    return sum(2 if isinstance(linear, LinearAdapter) else 1 for linear in saving) * numerics.product


def _bytes_of_input(linears: Iterable[nn.Layer], numerics: Numerics, unconverted: float, as_product: float) -> float:
    """Return the bytes that `linears` save per element of their common input.

    The input is saved at most twice: unconverted, and in the matmul dtype. If both copies have the same size, only one
    tensor is saved.

    Args:
        linears: linear layers and linear adapters that read the input.
        numerics: dtypes and fused ops of the backend.
        unconverted: bytes per element of the unconverted input, which separate adapters save.
        as_product: bytes per element of the input in the matmul dtype, which linear layers and fused adapters save.
    """
    saving = [linear for linear in linears if _saves_input(linear, numerics)]
    return sum({unconverted if _is_separate(linear) else as_product for linear in saving})


def _saves_input(linear: Any, numerics: Numerics) -> bool:
    """Return whether a linear layer saves its input. Paddle's matmul saves the input even if the weight is frozen."""
    if isinstance(linear, LinearAdapter):
        row = saved_activations(linear)
        return row.saves_input(linear) or not (numerics.cpp or row.changes_input(linear))
    return not numerics.cpp or not linear.weight.stop_gradient


def _is_separate(linear: nn.Layer) -> bool:
    """Return whether a layer is an adapter that computes in separate ops, not fused with its base layer."""
    return isinstance(linear, LinearAdapter) and not saved_activations(linear).is_fused(linear)


def _bytes_of_adapter(adapter: AdapterLayer, numerics: Numerics) -> float:
    """Return the bytes per token that an adapter saves, plus the modified input that its base layer saves."""
    row = saved_activations(adapter)
    size = row.size(adapter)
    if not isinstance(adapter, LinearAdapter):
        return numerics.attention * size
    if not numerics.cpp and row.changes_input(adapter):
        size += adapter.in_features
    dropout = _DROPOUT * adapter.in_features if adapter.dropout else 0.0
    return (numerics.attention if _is_separate(adapter) else numerics.product) * (size + dropout)
