"""Count the parameters of a model with an adapter, and describe them in one line."""

from __future__ import annotations

import math
import re
from collections import Counter

from paddle import nn

from paddlenlp_ext.nn.experts import MixtureOfExperts
from paddlenlp_ext.peft.layers import adapter_layers
from paddlenlp_ext.quantization.quantize_model import quantized_layers
from paddlenlp_ext.sharding_spec import full_shape


def count_parameters(model: nn.Layer) -> tuple[int, int]:
    """Return the trainable and total parameter counts of a model; each element of a quantized weight counts as one."""
    trainable = sum(parameter.size for parameter in model.parameters() if not parameter.stop_gradient)
    packed = sum(layer.stored.num_weights for layer in quantized_layers(model).values())
    return trainable, sum(parameter.size for parameter in model.parameters()) + packed


def describe_parameters(model: nn.Layer) -> str:
    """Return a line with the trainable and total parameter counts, the adapted layers, and the counts by layer kind."""
    trainable, total = count_parameters(model)
    names = (name.split(".") for name, _ in adapter_layers(model))
    leaves = Counter(next(part for part in reversed(parts) if not part.isdigit()) for parts in names)
    where = ", ".join(f"{leaf} x{count}" for leaf, count in leaves.items())
    share = 100 * trainable / total
    report = f"trainable params: {trainable:,} || all params: {total:,} || trainable%: {share:.4f} || in: {where}"
    return f"{report} || of which: {describe_kinds(model)}"


_KINDS = {
    "experts": r"\.(mlp|moe)\.experts\.",
    "routers": r"\.(mlp|moe)\.(gate|router)\.",
    "shared experts": r"\.mlp\.shared_expert",
    "attention": r"\.self_attn\.",
    "convolutions": r"\.conv\.",
    "gated delta nets": r"\.linear_attn\.",
    "Mamba-2 layers": r"\.mamba\.",
    "feed-forward blocks": r"\.mlp\.",
    "layer embeddings": r"per_layer_|_per_layer\.",
    "norms": r"norm\.",
    "embedding": r"embed_tokens\.",
    "lm_head": r"lm_head\.",
}


def describe_kinds(model: nn.Layer) -> str:
    """Describe how many trainable parameters each layer kind has, counting all shards; zero counts are left out."""
    counts: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        if not parameter.stop_gradient:
            kind = next((kind for kind, pattern in _KINDS.items() if re.search(pattern, name)), "others")
            counts[kind] += math.prod(full_shape(parameter))
    return ", ".join(f"{kind} {counts[kind]:,}" for kind in (*_KINDS, "others") if counts[kind])


def describe_experts(model: nn.Layer) -> str | None:
    """Describe how many parameters are in experts, and how many are active for a token; None for a dense model.

    Each element of a quantized weight counts as one parameter.
    """
    layers = [layer for layer in model.sublayers() if isinstance(layer, MixtureOfExperts)]
    if not layers:
        return None
    router, number = layers[0].shape.router, layers[0].shape.num_experts
    in_experts, total = sum(_full_size(layer.experts) for layer in layers), _full_size(model)
    active = total - in_experts + in_experts * router.top_k // number
    return (
        f"{in_experts:,} of {total:,} parameters are in experts ({len(layers)} layers x {number} experts); each token "
        f"uses {router.top_k} experts of each layer; {active:,} parameters are active"
    )


def _full_size(model: nn.Layer) -> int:
    """Return the parameter count of a model, counting all shards and the elements of quantized weights."""
    packed = sum(layer.num_weights for layer in quantized_layers(model).values())
    return packed + sum(math.prod(full_shape(parameter)) for parameter in model.parameters())
