"""Configuration of a decoder, read from a Hugging Face config.json."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean
from types import MappingProxyType
from typing import Any

from paddlenlp_ext.checkpoint.config_json_schema import check_config_values
from paddlenlp_ext.checkpoint.file_layouts.base import FileLayout
from paddlenlp_ext.checkpoint.file_layouts.fused_projections import FusedLayers, join_fused, split_fused
from paddlenlp_ext.checkpoint.weight_source import WeightSource
from paddlenlp_ext.models.feed_forward_config import dense_feed_forward, read_activation
from paddlenlp_ext.models.layer_shape import LayerEmbeddingShape, LayerShape, attention_weights
from paddlenlp_ext.models.registry import FAMILIES, ConfigReader, unsupported_family
from paddlenlp_ext.nn.attention import Attention, AttentionLayer, AttentionShape, QKNorm
from paddlenlp_ext.nn.experts import ExpertShape, MixtureOfExperts
from paddlenlp_ext.nn.feed_forward import FeedForwardLayer
from paddlenlp_ext.nn.gated_attention import GATED_ATTENTION
from paddlenlp_ext.nn.latent_attention import LatentAttention, LatentShape
from paddlenlp_ext.nn.load_balancing_loss import LoadBalance
from paddlenlp_ext.nn.normed_value_attention import NormedValueAttention
from paddlenlp_ext.nn.query_scale import QueryScale
from paddlenlp_ext.nn.rms_norm import RMSNorm
from paddlenlp_ext.nn.rope import ALIBI, RopeSettings, rope_by_layer
from paddlenlp_ext.nn.shared_key_attention import SharedKeyAttention
from paddlenlp_ext.nn.short_convolution import ShortConvolution
from paddlenlp_ext.nn.token_mixer import MixerShape, SideMixer, TokenMixer
from paddlenlp_ext.sharding_spec import TensorPlan

_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes and options of a decoder.

    Attributes:
        shapes: sizes of each layer; None: all layers have the sizes of the model.
        layer_embeddings: sizes of layer embeddings (models/layer_embeddings.py); None: no layer embeddings.
        windows: sliding window of each layer; None for a layer with full attention.
        rotates: whether each layer applies RoPE to queries and keys; None: all layers apply RoPE.
        interleaved_rope: whether RoPE rotates pairs of neighbouring channels (2i, 2i + 1), instead of pairs
            (i, i + R / 2) of R channels.
        mixers: token mixer of each layer, with None for layers with attention; None: all layers have attention.
        side_mixer: token mixer beside attention in every layer; None: one token mixer per layer.
        latent: sizes of latent attention; None: grouped-query attention. With latent attention, `head_dim` is the size
            of queries and keys.
        attention_scale: factor of the attention scores; None: 1 / sqrt(head_dim).
        attention_softcap: soft-cap of the attention scores (ops/soft_cap.py); None: no soft-cap.
        attention_sinks: whether each head has a trained attention sink.
        attention_gate: layer that computes the gate of the attention output, "gate_proj" or "q_proj"
            (nn/gated_attention.py); None: no gate.
        norms_values: whether values are normalized (nn/normed_value_attention.py).
        query_scale: factor of the queries, which depends on the position; None: no factor.
        gated: whether the feed-forward has a gate; False: nn/ungated_feed_forward.py.
        feed_forward_scales: factors of the gate and of the output of the feed-forward; None: no factors.
        activation: activation of the feed-forward gate, "silu" or "gelu_tanh"; without a gate, "relu2" or "xielu".
        experts: experts of each layer, with None for dense layers; None: all layers are dense.
        router_loss: coefficient of the routers' auxiliary loss (nn/load_balancing_loss.py); 0: no loss.
        norm_offset: offset of the weights of RMS norms (nn/rms_norm.py).
        scales_embeddings: whether the token embeddings are multiplied by sqrt(hidden_size).
        embedding_multiplier: factor of the input of the first layer.
        residual_multiplier: factor of the outputs of attention and feed-forward before the residual addition.
        logit_scale: factor of the logits.
        logit_softcap: soft-cap of the logits (ops/soft_cap.py); None: no soft-cap.
        longest_answer: maximum number of tokens in a prompt and its continuation. Longer sequences need a scaling that
            is not implemented. None: no limit.
        num_labels: number of outputs of a sequence classifier; None for a causal language model.
        layer: order of norms, attention and feed-forward (models/decoder_layers.py), of all layers or of each layer.
        pre_norms: names of a pre-norm layer's norms: before attention and before feed-forward.
        sandwich_norms: names of a sandwich layer's norms: before and after attention, before and after feed-forward.
        ropes: rope settings of each layer.
        tensor_plan: sharding styles of the family's weights (sharding_spec.py).
        fused_layers: fused projection in the checkpoint -> single projections and their sizes
            (file_layouts/fused_projections.py).
        file_layout: names and shapes of checkpoint tensors that differ from the parameters.
        is_translated_by_peft: see `Family`.
        source: the config.json dict, written back by `save_pretrained`.
        config_overrides: keys of `source` that differ from the loaded file (models/context_extension.py).
        name_or_path: name of the model in messages and saved adapters; None: unnamed.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    initializer_range: float
    tie_word_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: QKNorm | None = None
    latent: LatentShape | None = None
    mixers: tuple[MixerShape | None, ...] | None = None
    side_mixer: SideMixer | None = None
    shapes: tuple[LayerShape, ...] | None = None
    layer_embeddings: LayerEmbeddingShape | None = None
    windows: tuple[int | None, ...]
    rotates: tuple[bool, ...] | None = None
    interleaved_rope: bool = False
    attention_scale: float | None = None
    attention_softcap: float | None = None
    attention_sinks: bool = False
    attention_gate: str | None = None
    norms_values: bool = False
    query_scale: QueryScale | None = None
    gated: bool = True
    feed_forward_scales: tuple[float, float] | None = None
    activation: str = "silu"
    experts: tuple[ExpertShape | None, ...] | None = None
    router_loss: float = 0.0
    norm_offset: float = 0.0
    scales_embeddings: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    longest_answer: int | None = None
    num_labels: int | None = None
    layer: str | tuple[str, ...] = "pre_norm"
    pre_norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    sandwich_norms: tuple[str, str, str, str] = (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )
    ropes: tuple[RopeSettings, ...]
    tensor_plan: TensorPlan = field(repr=False)
    fused_layers: FusedLayers = field(default_factory=dict, repr=False)
    file_layout: FileLayout = field(default_factory=FileLayout, repr=False)
    is_translated_by_peft: bool = field(default=False, repr=False)
    source: Mapping[str, Any] = field(repr=False)
    name_or_path: str | None = None
    config_overrides: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def from_dict(
        cls,
        source: Mapping[str, Any],
        name_or_path: str | None = None,
        config_overrides: Mapping[str, Any] = MappingProxyType({}),
    ) -> DecoderConfig:
        """Build the config from a config.json dict.

        Args:
            source: contents of config.json, with `config_overrides` already applied.
            name_or_path: name of the model in messages and saved adapters; None: unnamed.
            config_overrides: keys of `source` that differ from the loaded file.

        Raises:
            ValueError: `model_type`, activation or rope type is unknown, or a value is missing or invalid.
        """
        try:
            return cls._from_dict(source, name_or_path, config_overrides)
        except ValueError as error:
            if name_or_path is None:
                raise
            raise ValueError(f"{name_or_path}: {error}") from error

    @classmethod
    def _from_dict(
        cls, source: Mapping[str, Any], name_or_path: str | None, config_overrides: Mapping[str, Any]
    ) -> DecoderConfig:
        check_config_values(source)
        if "model_type" not in source:
            raise ValueError(f"config.json has no 'model_type'; set it to one of: {', '.join(FAMILIES.names())}")
        if source["model_type"] not in FAMILIES.names():
            raise ValueError(unsupported_family(source["model_type"]))
        family = FAMILIES.get(source["model_type"])
        for key in _REQUIRED:
            if key not in family.derived:
                ConfigReader(source, family).size(key)
        completed = family.complete(source)
        reader = ConfigReader(completed, family)
        hidden_size, num_heads = reader.size("hidden_size"), reader.size("num_attention_heads")
        num_kv_heads = reader.size("num_key_value_heads", default=num_heads)
        if num_heads % num_kv_heads:
            raise ValueError(f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}")
        if completed.get("head_dim") is None and hidden_size % num_heads:
            raise ValueError(f"hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}")
        head_dim = reader.size("head_dim", default=hidden_size // num_heads)
        num_layers = reader.size("num_hidden_layers")
        intermediate_size = reader.size("intermediate_size")
        outputs = {
            "q_proj": num_heads * head_dim,
            **dict.fromkeys(("k_proj", "v_proj"), num_kv_heads * head_dim),
            **dict.fromkeys(("gate_proj", "up_proj"), intermediate_size),
            **dict.fromkeys(ShortConvolution.input_names, hidden_size),
        }
        differences = family.differences(reader)
        head_dims = [shape.head_dim for shape in differences.get("shapes", ())] or [head_dim] * num_layers
        ropes = rope_by_layer({**family.defaults, **completed}, head_dims)
        if [rope.rotary_dim for rope in ropes] != head_dims and "partial_rotary_factor" not in family.defaults:
            raise ValueError(
                f"partial_rotary_factor in config.json is not supported for model_type {source['model_type']!r}; only "
                "the value 1.0 is supported"
            )
        values: dict[str, Any] = {
            "model_type": source["model_type"],
            "vocab_size": reader.size("vocab_size"),
            "hidden_size": hidden_size,
            "intermediate_size": intermediate_size,
            "num_hidden_layers": num_layers,
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_kv_heads,
            "head_dim": head_dim,
            "rms_norm_eps": float(reader.value("rms_norm_eps")),
            "max_position_embeddings": reader.size("max_position_embeddings"),
            "initializer_range": float(reader.value("initializer_range")),
            "tie_word_embeddings": bool(reader.value("tie_word_embeddings")),
            "gated": family.gated,
            "activation": read_activation(reader, family),
            "mlp_bias": bool(reader.value("mlp_bias")),
            "ropes": ropes,
            "tensor_plan": family.tensor_plan,
            "is_translated_by_peft": family.is_translated_by_peft,
            "fused_layers": {
                name: {part: outputs[part] for part in parts} for name, parts in family.fused_layers.items()
            },
            "source": {**source, "architectures": [family.architecture]},
            "name_or_path": name_or_path,
            "config_overrides": dict(config_overrides),
        }
        return cls(**{**values, **differences})

    def value(self, key: str) -> Any:
        """Return the value of a key of config.json, or the family's default; None if the value is null or absent."""
        family = FAMILIES.get(self.model_type)
        return ConfigReader(family.complete(self.source), family).value(key)

    @property
    def max_context(self) -> int:
        """Context length that the scaled RoPE covers, in the full-attention layers if there are any."""
        full = [rope for rope, window in zip(self.ropes, self.windows, strict=True) if window is None]
        return min(rope.max_context for rope in full or self.ropes)

    @property
    def num_outputs(self) -> int:
        """Number of outputs per position: vocabulary size, or number of labels of a classifier."""
        return self.num_labels or self.vocab_size

    @property
    def has_linear_biases(self) -> bool:
        """True if a layer has ALiBi instead of RoPE."""
        return any(rope.rope_type == ALIBI for rope in self.ropes)

    @property
    def n_head(self) -> int:
        """Number of attention heads, under PaddleNLP's name."""
        return self.num_attention_heads

    @property
    def n_layer(self) -> int:
        """Number of layers, under PaddleNLP's name."""
        return self.num_hidden_layers

    def rms_norm(self) -> RMSNorm:
        """Build an RMS norm of hidden states."""
        return RMSNorm(self.hidden_size, self.rms_norm_eps, self.norm_offset)

    @property
    def value_dim(self) -> int:
        """Number of value channels per head."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def latent_size(self) -> int:
        """Number of latent channels per position; 0 without latent attention."""
        return 0 if self.latent is None else (self.latent.query_rank or 0) + self.latent.kv_rank

    @property
    def other_mixers(self) -> list[MixerShape]:
        """Token mixers other than attention, of all layers."""
        side = [] if self.side_mixer is None else [self.side_mixer.shape] * self.num_hidden_layers
        return [mixer for mixer in self.mixers or () if mixer is not None] + side

    @property
    def attention_share(self) -> float:
        """Fraction of the layers with attention."""
        return 1.0 - sum(mixer is not None for mixer in self.mixers or ()) / self.num_hidden_layers

    @property
    def mixer_weights(self) -> float:
        """Number of weights in the linear layers of the token mixers of a layer, averaged over the layers."""
        others = sum(mixer.num_weights for mixer in self.other_mixers)
        return self.attention_share * attention_weights(self) + others / self.num_hidden_layers

    def token_mixer(self, layer_index: int) -> TokenMixer | None:
        """Build the token mixer of one layer; return None for a layer without one."""
        mixer = None if self.mixers is None else self.mixers[layer_index]
        return self.attention(layer_index) if mixer is None else mixer.build(layer_index)

    def attention(self, layer_index: int) -> AttentionLayer:
        """Build the attention of one layer."""
        shape = self.attention_shape(layer_index)
        if self.latent is not None:
            return LatentAttention(shape, self.latent, layer_index)
        if shape.source is not None:
            return SharedKeyAttention(shape, layer_index)
        if self.norms_values:
            return NormedValueAttention(shape, layer_index)
        attention = Attention if self.attention_gate is None else GATED_ATTENTION[self.attention_gate]
        return attention(shape, layer_index)

    def feed_forward(self, layer_index: int) -> FeedForwardLayer | MixtureOfExperts | None:
        """Build the feed-forward block or the experts of one layer; return None for a layer without them."""
        shape = self.expert_shape(layer_index)
        if shape is not None and shape.shared_name is not None:
            return MixtureOfExperts(self.hidden_size, shape)
        inner = self.layer_shapes[layer_index].intermediate_size
        if not inner:
            return None
        sizes = self.hidden_size, inner
        return dense_feed_forward(sizes, self.mlp_bias, self.activation, self.gated, self.feed_forward_scales)

    def expert_shape(self, layer_index: int) -> ExpertShape | None:
        """Return the sizes of the experts of one layer; None for a dense layer."""
        return None if self.experts is None else self.experts[layer_index]

    def load_balance(self) -> LoadBalance | None:
        """Build the load balancing of the experts; return None for a model without experts."""
        shapes = [shape for shape in self.experts or () if shape is not None]
        if not shapes:
            return None
        first = shapes[0]
        return LoadBalance(first.num_experts, first.router.top_k, self.num_hidden_layers, len(shapes), self.router_loss)

    @property
    def active_size(self) -> float:
        """Intermediate size of the feed-forward layers or experts that a token uses, averaged over the layers."""
        pairs = zip(self.layer_shapes, self.experts or (None,) * self.num_hidden_layers, strict=True)
        return fmean(shape.intermediate_size if sparse is None else sparse.active_size for shape, sparse in pairs)

    @property
    def layer_shapes(self) -> tuple[LayerShape, ...]:
        """Sizes of each layer."""
        sizes = self.head_dim, self.value_dim, self.num_key_value_heads, self.intermediate_size
        return self.shapes or (LayerShape(*sizes),) * self.num_hidden_layers

    def to_dict(self) -> dict[str, Any]:
        """Return a copy of the config.json dict, like `PretrainedConfig.to_dict` in transformers."""
        return copy.deepcopy(dict(self.source))

    def from_files(self, source: WeightSource) -> WeightSource:
        """Convert checkpoint tensors to the names and shapes of decoder parameters.

        Raises:
            ValueError: a fused layer has the wrong number of rows, a tensor of an expert is missing, or only some
                experts of a layer are quantized.
        """
        return self.file_layout.open(split_fused(source, self.fused_layers))

    def to_files(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Convert decoder tensors to the names and shapes of checkpoints.

        Raises:
            ValueError: the projections of a fused layer are quantized in a format that cannot be joined.
        """
        return self.file_layout.to_files(join_fused(tensors, self.fused_layers))

    def attention_shape(self, layer_index: int) -> AttentionShape:
        """Return the sizes and options of the attention of one layer."""
        shape = self.layer_shapes[layer_index]
        return AttentionShape(
            hidden_size=self.hidden_size,
            num_heads=self.num_attention_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            has_v_proj=shape.has_v_proj,
            source=shape.source,
            qkv_bias=self.qkv_bias,
            output_bias=self.output_bias,
            qk_norm=self.qk_norm,
            norm_epsilon=self.rms_norm_eps,
            norm_offset=self.norm_offset,
            scale=self.attention_scale,
            softcap=self.attention_softcap,
            has_sinks=self.attention_sinks,
            rotates=self.rotates is None or self.rotates[layer_index],
            interleaved=self.interleaved_rope,
            window=self.windows[layer_index],
            has_linear_biases=self.ropes[layer_index].rope_type == ALIBI,
        )
