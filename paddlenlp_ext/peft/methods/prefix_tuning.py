"""Prefix tuning: trained keys and values before every document, in every layer (Li and Liang 2021, arXiv:2101.00190).

    attention(q, [K_prefix; K], [V_prefix; V])        [K_prefix, V_prefix] of layer i: trained [P, 2, K, H]
    with `prefix_projection`: [K_prefix, V_prefix] = tanh(E W_1^T + b_1) W_2(i)^T + b_2(i); E, W and b are trained

| tensor | shape | start |
| --- | --- | --- |
| prefix of a layer | [P, 2, K, H] | keys and values of random tokens (section 7.4 of the paper), or noise |
| E | [P, K H] | N(0, 1) |
| W_1, b_1 | [F, K H], [F] | Kaiming-uniform, 0 |
| W_2(i), b_2(i) of a layer | [2 K H, F], [2 K H] | Kaiming-uniform, 0 |

The prefix has one key and value per key-value head, as in grouped-query attention. With latent attention, the prefix
consists of latents and shared keys [P, L + R] (nn/latent_attention.py). As in Hugging Face PEFT, the prefix has
positions 0 to P-1, the positions of a document begin at P, and trained keys are not rotated. A sliding window also
applies to the prefix. With `prefix_projection`, every layer computes its keys and values from E, so that each layer can
be recomputed separately in the backward pass.

Shapes: B batch, S sequence, D hidden, P prefix tokens, K key-value heads, H head dimension, F width of the projection
(`encoder_hidden_size`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import paddle
from paddle import nn

from paddlenlp_ext.config.dataclass_options import option
from paddlenlp_ext.nn.attention import Attention, AttentionLayer
from paddlenlp_ext.nn.token_mixer import TokenMixer
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.nn.training_hooks import TrainingHooks
from paddlenlp_ext.peft.adapter import Adapter
from paddlenlp_ext.peft.config import PeftConfig, refuse_unread_fields, required_field
from paddlenlp_ext.peft.formats.adapter_config import PaddleNLPFiles
from paddlenlp_ext.peft.layers import adapter_layers_of, generator_for, has_values
from paddlenlp_ext.peft.method_internals.prefix_attention import (
    PrefixAttention,
    PrefixEncoder,
    decoder_prefix,
    prefix_width,
    project,
)
from paddlenlp_ext.peft.registry import PEFT_METHODS

STORED = "prompt_embeddings"
INIT_CHOICES = ("vocab", "random")
PADDLENLP_ARRAY = "pre_caches.npy"
_ENCODER = "prefix_encoder."


@dataclass(eq=False)
class PrefixAdapter(Adapter):
    """Adapter that adds the prefix to the attention of every document."""

    peft_config: PrefixTuningConfig

    UNSHIFTED: ClassVar[str] = "prefix_unshifted"
    """Name of a prefix [P, 2, K, H] that was trained with document positions starting at 0."""

    def __post_init__(self) -> None:
        layers = [layer for _, layer in adapter_layers_of(self.base_model, PrefixAttention)]
        first = layers[0]
        if first.hidden_size is None:
            if self.peft_config.init == "vocab" and self._layers_with_values():
                self._init_from_tokens(first.seed)
        else:
            encoder = PrefixEncoder(first.num_tokens, first.width, first.hidden_size, first.seed, first.dtype)
            self.own_layers["prefix_encoder"] = encoder
            for layer in layers:
                layer.encoder = (encoder,)

    def _layers_with_values(self) -> list[PrefixAttention]:
        """Return the layers of this pipeline stage; an empty list in a dry run, where the base has no values."""
        return [
            layer
            for _, layer in adapter_layers_of(self.base_model, PrefixAttention)
            if has_values(layer.base.output_layer)
        ]

    @paddle.no_grad()
    def _init_from_tokens(self, seed: int) -> None:
        """Initialize the prefix with the keys and values of randomly drawn tokens."""
        decoder, generator = self.base_model.model, generator_for(seed, "prefix")
        token_ids = generator.integers(0, self.base_model.config.vocab_size, self.peft_config.num_virtual_tokens)
        key_values = decoder_prefix(decoder, decoder.embed(paddle.to_tensor(token_ids))).key_values
        for layer in self._layers_with_values():
            pair = key_values[layer.base.layer_index]
            layer.prefix.set_value(layer.base.join_prefix(pair).astype(layer.dtype))

    def hidden_states(
        self,
        input_ids: paddle.Tensor,
        position_ids: paddle.Tensor | None = None,
        document_lengths: Any = None,
        cache: Any = None,
        document_parents: Any = None,
        loss_positions: paddle.Tensor | None = None,
    ) -> paddle.Tensor:
        """Return the last hidden states [B, S, D]; `position_ids` are counted from 0, without the prefix."""
        if not self.enabled:
            return super().hidden_states(
                input_ids, position_ids, document_lengths, cache, document_parents, loss_positions
            )
        if cache is not None and cache.is_new:
            layers = [layer for _, layer in adapter_layers_of(self.base_model, PrefixAttention) if layer.is_on_stage]
            cache.set_prefix({layer.base.layer_index: layer.keys_and_values() for layer in layers})
        decoder, num_tokens = self.base_model.model, self.peft_config.num_virtual_tokens
        inputs = decoder.attention_inputs(
            input_ids, position_ids, document_lengths, cache, num_tokens, document_parents, loss_positions
        )
        return decoder.forward_embeddings(decoder.embed(input_ids), inputs)

    def load_tensors(self, tensors: Mapping[str, np.ndarray], where: str) -> None:
        """Load the adapter's tensors; convert PEFT's layout, and prefixes for documents that start at position 0.

        Args:
            tensors: name -> value; PEFT's `prompt_embeddings` [P, layers * 2 * K * H] has the prefixes of all layers.
            where: source of the tensors, for error messages.

        Raises:
            ValueError: names or shapes do not match this model.
        """
        converted = dict(tensors)
        layers = dict(adapter_layers_of(self.base_model, PrefixAttention))
        if STORED in converted:
            stored = converted.pop(STORED)
            width = sum(layer.size for layer in layers.values())
            if stored.ndim != 2 or stored.shape[1] != width:
                raise ValueError(
                    f"{where}: the stored prefix has shape {list(stored.shape)}, but the {len(layers)} layers of this "
                    f"model need [tokens, {width}]; use the model that the prefix was trained with"
                )
            for (name, layer), part in zip(layers.items(), np.split(stored, len(layers), axis=1), strict=True):
                converted[f"{name}.prefix"] = part.reshape(len(part), *layer.base.prefix_shape)
        for name in [name for name in converted if name.endswith(self.UNSHIFTED)]:
            attention, value = layers[name.rpartition(".")[0]].base, converted.pop(name)
            # The shape check in `super().load_tensors` rejects a prefix of a different size.
            has_size = isinstance(attention, Attention) and value.shape[-1] == attention.head_dim
            converted[name.replace(self.UNSHIFTED, "prefix")] = (
                self._shift_keys(value, attention) if has_size else value
            )
        super().load_tensors(converted, where)

    def _shift_keys(self, prefix_P2KH: np.ndarray, attention: AttentionLayer) -> np.ndarray:
        """Rotate the keys by P positions, so that attention scores stay equal if documents start at P instead of 0."""
        if attention.qk_norm is not None and attention.qk_norm.after_rotation:
            raise ValueError(
                "a prefix for documents that start at position 0 cannot be used in a model with QK norms after RoPE; "
                "train the prefix again"
            )
        keys_1PKH = paddle.to_tensor(prefix_P2KH[None, :, 0].astype(np.float32))
        num_tokens = keys_1PKH.shape[1]
        rotations = self.base_model.model.rotary(paddle.full([1, num_tokens], num_tokens, dtype="int64"))
        cos_1PH, sin_1PH = rotations[attention.layer_index]
        # YaRN multiplies cosines and sines by an attention scale, which the stored keys already include.
        amplitude = float((cos_1PH[0, 0, 0] ** 2 + sin_1PH[0, 0, 0] ** 2).sqrt())
        if not attention.rotates:
            amplitude = 1.0
        rotated = (attention.rotate(keys_1PKH, cos_1PH, sin_1PH) / amplitude)[0].numpy()
        return np.stack([rotated, prefix_P2KH[:, 1]], axis=1)

    @staticmethod
    def projected(tensors: Mapping[str, paddle.Tensor]) -> list[paddle.Tensor]:
        """Compute the keys and values of each layer, [P, 2 * K * H], from the tensors of the projection."""
        encoder = [tensors[f"prefix_encoder.{name}"] for name in ("embedding", "weight", "bias")]
        hidden_PF = project(*encoder).tanh()
        names = [name.removesuffix("_weight") for name in sort_by_layer(tensors) if name.endswith(".prefix_weight")]
        return [project(hidden_PF, tensors[f"{name}_weight"], tensors[f"{name}_bias"]) for name in names]


def sort_by_layer(names: Iterable[str]) -> list[str]:
    """Sort tensor names numerically by their layer number: 2 before 10."""
    return sorted(names, key=lambda name: [int(number) for number in re.findall(r"\d+", name)])


@PEFT_METHODS.register("prefix_tuning")
@dataclass(kw_only=True)
class PrefixTuningConfig(PeftConfig):
    """Options of prefix tuning.

    >>> PrefixTuningConfig(num_virtual_tokens=30, prefix_projection=True).init
    'vocab'
    """

    starts_from_weights: ClassVar[bool] = True
    peft_type: ClassVar[str] = "PREFIX_TUNING"
    mergeable: ClassVar[bool] = False
    own_keys: ClassVar[Mapping[str, str]] = {STORED: STORED}
    key_prefix: ClassVar[str] = "base_model."
    adapter_class: ClassVar[type[TrainingHooks] | None] = PrefixAdapter
    paddlenlp_files: ClassVar[PaddleNLPFiles | None] = PaddleNLPFiles("prefix_config.json", array=PADDLENLP_ARRAY)
    free_on_resume: ClassVar[frozenset[str]] = PeftConfig.free_on_resume | {"init", "encoder_hidden_size"}

    path: str | None = option(
        None,
        help="folder of a saved prefix to start from; the run uses the saved length and projection",
        key="prefix_path",
    )
    num_virtual_tokens: int = option(
        128,
        help="number of prefix tokens",
        minimum=1,
        maximum=65536,
        key="num_prefix_tokens",
        arguments=("num_tokens",),
    )
    init: str = option(
        "vocab",
        help="initialization: keys and values of random tokens (vocab), or small random values (random)",
        choices=INIT_CHOICES,
        key="prefix_init",
    )
    prefix_projection: bool = option(
        False,
        help="compute the prefix with a trained two-layer network, which can make training more stable",
        key="prefix_projection",
        arguments=("projection",),
    )
    encoder_hidden_size: int | None = option(
        None,
        help="hidden size of the projection network; unset: number of key-value heads times head dimension",
        minimum=1,
        key="prefix_projection_hidden_size",
        arguments=("projection_hidden_size",),
    )
    dropout: float = option(0.0, help="dropout on the prefix during training", minimum=0, below=1, key="prefix_dropout")

    def targets(self, model: TrainableModel) -> list[str]:
        for name, layer in model.named_sublayers():
            if isinstance(layer, TokenMixer) and not isinstance(layer, AttentionLayer):
                raise ValueError(
                    f"prefix_tuning: {name} is a {type(layer).__name__}, which has no keys and values to extend; use "
                    "prompt_tuning, p_tuning or LoRA"
                )
        if len({*model.config.layer_shapes}) > 1:
            raise ValueError(
                "prefix_tuning: the layers of this model have keys and values of different sizes, and a prefix has one "
                "size; use prompt_tuning, p_tuning or LoRA"
            )
        return [name for name, _ in model.named_sublayers() if name.rpartition(".")[2] == "self_attn"]

    def wrap(self, name: str, base: nn.Layer, seed: int) -> PrefixAttention:
        assert isinstance(base, AttentionLayer)
        hidden_size = None
        if self.prefix_projection:
            hidden_size = self.encoder_hidden_size or prefix_width(base)
        return PrefixAttention(base, self.num_virtual_tokens, hidden_size, self.dropout, seed, name)

    # -- files --------------------------------------------------------------------------------------------------------
    def to_adapter_config(self, model: TrainableModel) -> dict[str, Any]:
        shape = model.config
        width = prefix_width(next(adapter_layers_of(model, PrefixAttention))[1].base)
        return {
            "num_virtual_tokens": self.num_virtual_tokens,
            "num_layers": shape.num_hidden_layers,
            "num_attention_heads": shape.num_key_value_heads if shape.latent is None else 1,
            "token_dim": width,
            "num_transformer_submodules": 1,
            "prefix_projection": self.prefix_projection,
            "encoder_hidden_size": self.encoder_hidden_size or width,
        }

    @classmethod
    def from_adapter_config(cls, fields: Mapping[str, Any]) -> PrefixTuningConfig:
        read = {"num_virtual_tokens", "prefix_projection", "encoder_hidden_size"}
        # The values of these fields follow from the stored tensors and the model.
        read |= {"num_layers", "num_attention_heads", "token_dim", "init_weights"}
        if fields.get("num_transformer_submodules") in (None, 1):
            read.add("num_transformer_submodules")
        refuse_unread_fields(fields, read)
        return cls(
            num_virtual_tokens=required_field(fields, "num_virtual_tokens"),
            init="random",  # the stored tensors replace the initial values
            prefix_projection=bool(fields.get("prefix_projection")),
            encoder_hidden_size=fields.get("encoder_hidden_size"),
        )

    def to_stored(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Return the prefixes of all layers as one tensor [P, layers * 2 * K * H], and the tensors of the projection.

        If there is a projection, its tensors are needed to continue training.
        """
        if not self.prefix_projection:
            return {STORED: paddle.concat([tensors[name].flatten(1) for name in sort_by_layer(tensors)], axis=1)}
        per_layer = PrefixAdapter.projected({name: tensor.astype("float32") for name, tensor in tensors.items()})
        return {STORED: paddle.concat(per_layer, axis=1), **tensors}

    def for_tensors(self, names: Collection[str]) -> PrefixTuningConfig:
        """Return a config without projection if the file has only the computed prefix, as in PEFT's files."""
        if any(name.startswith(_ENCODER) for name in names):
            return self
        return self.replace(prefix_projection=False, encoder_hidden_size=None)

    def from_stored(self, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Convert tensors to the in-memory form (inverse of `to_stored`), without a computed prefix."""
        return {name: value for name, value in tensors.items() if not (self.prefix_projection and name == STORED)}

    @classmethod
    def from_paddlenlp(cls, fields: Mapping[str, Any]) -> PrefixTuningConfig:
        dropout = fields.get("prefix_dropout") or 0.0
        return cls(num_virtual_tokens=required_field(fields, "num_prefix_tokens"), init="random", dropout=dropout)

    @classmethod
    def tensors_from_paddlenlp(cls, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Convert PaddleNLP's `pre_caches.npy` [layers, 2, K, P, H], which was trained with document positions from 0.

        Raises:
            ValueError: the array has the wrong shape.
        """
        value = tensors[PADDLENLP_ARRAY]
        if value.ndim != 5 or value.shape[1] != 2:
            raise ValueError(f"{PADDLENLP_ARRAY}: expected shape [layers, 2, K, P, H], got {list(value.shape)}")
        per_layer = value.transpose(0, 3, 1, 2, 4)
        return {
            f"model.layers.{index}.self_attn.{PrefixAdapter.UNSHIFTED}": np.ascontiguousarray(prefix_P2KH)
            for index, prefix_P2KH in enumerate(per_layer)
        }


PrefixConfig = PrefixTuningConfig  # the spelling of PaddleNLP
