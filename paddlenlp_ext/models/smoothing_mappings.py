"""AWQ smoothing mappings of a decoder layer: norms and linear layers that absorb the input scales of later layers.

| producer | consumers | where |
| --- | --- | --- |
| norm before attention | q, k, v, or the first projections of latents | pre-norm, sandwich, parallel |
| norm before a convolution | b, c, u | pre-norm, sandwich |
| c | o | short convolution |
| norm before the feed-forward block | gate, up; in a parallel layer also q, k, v | without experts |
| norm of a layer with one block | the linear layers that read it | single block, without experts |
| v | o; query heads with the same value head share its scales | attention without latents and value norms |
| norm of a latent | the projection that reads it | latent attention |
| up | down | feed-forward blocks with a gate, shared experts |

A norm after a block cannot absorb scales. A norm before experts cannot absorb scales, because the router also reads its
output. The up and down projections of experts are scaled per expert (quantization/ptq/quantize_experts.py).
"""

from __future__ import annotations

import numpy as np

from paddlenlp_ext.models.decoder_layers import (
    DecoderLayer,
    ExpertPreNormLayer,
    ParallelLayer,
    PreNormLayer,
    SandwichLayer,
    SingleBlockLayer,
)
from paddlenlp_ext.nn.attention import Attention
from paddlenlp_ext.nn.experts import MixtureOfExperts
from paddlenlp_ext.nn.feed_forward import FeedForward
from paddlenlp_ext.nn.latent_attention import LatentAttention
from paddlenlp_ext.nn.normed_value_attention import NormedValueAttention
from paddlenlp_ext.nn.short_convolution import ShortConvolution
from paddlenlp_ext.quantization.ptq.smoothing import SmoothingMapping

_MLP = "mlp"


def smoothing_mappings(layer: DecoderLayer) -> list[SmoothingMapping]:
    """Return the smoothing mappings of a decoder layer."""
    mixer, name, mlp = layer.mixer, layer.mixer_name, layer.mlp
    readers = tuple(f"{each.attribute}.{reader}" for each in layer.mixers for reader in each.input_names)
    has_experts = mlp is None or isinstance(mlp, MixtureOfExperts) or isinstance(layer, ExpertPreNormLayer)
    inner = () if has_experts else tuple(f"{_MLP}.{reader}" for reader in mlp.input_names)
    mappings = []
    if isinstance(layer, PreNormLayer | SandwichLayer):
        mappings = [
            SmoothingMapping(layer.norm_names["attention_norm"], readers),
            SmoothingMapping(layer.norm_names["mlp_norm"], inner),
        ]
    elif isinstance(layer, SingleBlockLayer):
        mappings = [SmoothingMapping("norm", (*readers, *inner))]
    elif isinstance(layer, ParallelLayer) and inner:
        mappings = [SmoothingMapping("input_layernorm", (*readers, *inner))]
    if isinstance(mixer, Attention) and not isinstance(mixer, NormedValueAttention):
        mappings.append(SmoothingMapping(f"{name}.v_proj", (f"{name}.o_proj",), _value_channels(mixer)))
    if isinstance(mixer, ShortConvolution):
        mappings.append(SmoothingMapping(f"{name}.c_proj", (f"{name}.o_proj",)))
    if isinstance(mixer, LatentAttention):
        latents = {"kv_a_layernorm": "kv_b_proj", "q_a_layernorm": "q_b_proj"}
        mappings += [
            SmoothingMapping(f"{name}.{norm}", (f"{name}.{reader}",))
            for norm, reader in latents.items()
            if reader in mixer.latent_names
        ]
    shared = mlp.shared_name if isinstance(mlp, MixtureOfExperts) else None
    block = _MLP if shared is None else f"{_MLP}.{shared}"
    if isinstance(mlp if shared is None else getattr(mlp, shared), FeedForward):
        mappings.append(SmoothingMapping(f"{block}.up_proj", (f"{block}.down_proj",)))
    return [mapping for mapping in mappings if mapping.consumers]


def _value_channels(attention: Attention) -> np.ndarray:
    """Return the output channel of v_proj that each input channel of o_proj reads."""
    channels = np.arange(attention.v_proj.out_features).reshape(-1, attention.head_dim)
    heads = attention.o_proj.in_features // attention.head_dim
    return channels.repeat(heads // len(channels), axis=0).reshape(-1)
