"""What prefix tuning does to a model: attention that sees a prefix, and the model that begins behind it.

Shapes: B batch, S sequence, D hidden, P prefix tokens, K key-value heads, H head dimension, E = K * H, F width of the
projection.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional as F

from paddlenlp_ext.nn.attention import AttentionInputs
from paddlenlp_ext.nn.module_utils import new_parameter
from paddlenlp_ext.ops.attention import KeyValuePrefix
from paddlenlp_ext.ops.rope import apply_rope
from paddlenlp_ext.peft.base import PeftModel
from paddlenlp_ext.peft.layer import AdapterLayer, Parts, adapter_layers, generator_for, has_values, kaiming_uniform
from paddlenlp_ext.peft.virtual_tokens import keys_and_values
from paddlenlp_ext.sharding_spec import Style

_START = 0.02  # standard deviation of keys and values at the start: small against a model's own


class PrefixEncoder(nn.Layer):
    """The part of the projection that layers share: E, W_1 and b_1.

    The start of E is N(0, 1), that of W_1 Kaiming-uniform, that of b_1 zero.
    """

    def __init__(self, num_tokens: int, width: int, hidden_size: int, seed: int, dtype: paddle.dtype) -> None:
        super().__init__()
        embedding = generator_for(seed, "prefix_encoder.embedding").standard_normal((num_tokens, width), np.float32)
        weight = kaiming_uniform((hidden_size, width), seed, "prefix_encoder.weight")
        self.embedding = new_parameter(self, embedding, dtype)
        self.weight = new_parameter(self, weight, dtype)
        self.bias = new_parameter(self, np.zeros(hidden_size, np.float32), dtype)

    def forward(self) -> paddle.Tensor:
        """[P, F]."""
        return project(self.embedding, self.weight, self.bias).tanh()


class PrefixAttention(AdapterLayer):
    """Attention with a learned prefix of its own.

    Args:
        base: the attention of one layer.
        num_tokens: P.
        hidden_size: F of the projection; None without one.
        dropout: probability, on keys and values while training.
        seed, name: fix the start.
    """

    by_heads: ClassVar[bool] = True

    def __init__(
        self, base: nn.Layer, num_tokens: int, hidden_size: int | None, dropout: float, seed: int, name: str
    ) -> None:
        super().__init__(base)
        self.dropout, self.seed, self.num_tokens, self.hidden_size = dropout, seed, num_tokens, hidden_size
        self.dtype, self.width = base.k_proj.compute_dtype, base.k_proj.out_features
        shape = (num_tokens, 2, self.width // base.head_dim, base.head_dim)
        self.encoder: tuple[PrefixEncoder, ...] = ()  # in a tuple: its parameters are the model's, not the layer's
        if hidden_size is None:
            start = _START * generator_for(seed, f"{name}.prefix").standard_normal(shape, np.float32)
            self.prefix = new_parameter(self, start, self.dtype)
        else:
            weight = kaiming_uniform((2 * self.width, hidden_size), seed, f"{name}.prefix_weight")
            self.prefix_weight = new_parameter(self, weight, self.dtype)
            self.prefix_bias = new_parameter(self, np.zeros(2 * self.width, np.float32), self.dtype)

    def keys_and_values(self) -> KeyValuePrefix:
        """Two of [P, K, H]."""
        if self.hidden_size is None:
            prefix_P2KH = self.prefix
        else:
            flat = project(self.encoder[0](), self.prefix_weight, self.prefix_bias)
            prefix_P2KH = self._own_heads(flat.reshape([self.num_tokens, 2, -1, self.base.head_dim]))
        if self.dropout and self.training:
            whole = [self.num_tokens, 2, self.width // self.base.head_dim, self.base.head_dim]
            # Drawn for all heads: the same entries drop however many of them are here.
            prefix_P2KH = prefix_P2KH * self._own_heads(F.dropout(paddle.ones(whole, self.dtype), self.dropout))
        return prefix_P2KH[:, 0], prefix_P2KH[:, 1]

    def adapted(self, x_BSD: paddle.Tensor, inputs: AttentionInputs) -> paddle.Tensor:
        """[B, S, D] to the same. A cache holds the prefix already."""
        if inputs.cache is None:
            inputs = dataclasses.replace(inputs, prefix=self.keys_and_values())
        return self.base(x_BSD, inputs)

    def placements(self, style: Style) -> dict[str, int | None]:
        """Cut by heads where keys and values are; what a projection makes is cut afterwards."""
        return {name: 2 if name == "prefix" and style == "colwise" else None for name in self.own_state()}

    def become_part(self, style: Style, parts: Parts) -> None:
        super().become_part(style, parts)
        for encoder in self.encoder:
            for parameter in encoder.parameters():
                parameter.is_partial = True  # every rank uses it for its own heads

    def _own_heads(self, prefix_P2KH: paddle.Tensor) -> paddle.Tensor:
        """Of all heads, those of this rank."""
        if self.parts is None:
            return prefix_P2KH
        return prefix_P2KH.split(self.parts.size, axis=2)[self.parts.index]


class PrefixModel(PeftModel):
    """A model whose documents begin behind the prefix."""

    UNSHIFTED: ClassVar[str] = "prefix_unshifted"
    """Name of a prefix [P, 2, K, H] that was learned where a document's own positions begin at 0."""

    def __init__(self, model: nn.Layer, peft_config: Any) -> None:
        super().__init__(model, peft_config)
        first = next(layer for _, layer in adapter_layers(model))
        if first.hidden_size is None:
            if peft_config.init == "vocab" and self._own_layers():
                self._start_from_tokens(first.seed)
        else:
            self.prefix_encoder = PrefixEncoder(
                first.num_tokens, first.width, first.hidden_size, first.seed, first.dtype
            )
            for _, layer in adapter_layers(model):
                layer.encoder = (self.prefix_encoder,)

    def _own_layers(self) -> list[PrefixAttention]:
        """Those whose base has its weights here: not so in a plan, or of a pipeline's other stages."""
        return [layer for _, layer in adapter_layers(self.base_model) if has_values(layer.base.k_proj)]

    @paddle.no_grad()
    def _start_from_tokens(self, seed: int) -> None:
        """Let the prefix be what tokens drawn at random leave in every layer."""
        decoder, generator = self.base_model.model, generator_for(seed, "prefix")
        token_ids = generator.integers(0, self.config.vocab_size, self.peft_config.num_tokens)
        made = keys_and_values(decoder, decoder.embed_tokens(paddle.to_tensor(token_ids)))
        for layer in self._own_layers():
            pair = made[layer.base.layer_index]
            layer.prefix.set_value(paddle.stack(pair, axis=1).astype(layer.dtype))

    def hidden_states(
        self,
        input_ids: paddle.Tensor,
        position_ids: paddle.Tensor | None = None,
        document_lengths: Any = None,
        cache: Any = None,
    ) -> paddle.Tensor:
        """[B, S, D]; arguments as the model's, positions counted without the prefix."""
        if not self.adapter_enabled:
            return super().hidden_states(input_ids, position_ids, document_lengths, cache)
        if cache is not None and cache.is_new:
            own = [layer for _, layer in adapter_layers(self.base_model) if layer.is_here]
            cache.begin_with({layer.base.layer_index: layer.keys_and_values() for layer in own})
        decoder, num_tokens = self.base_model.model, self.peft_config.num_tokens
        inputs = decoder.attention_inputs(input_ids, position_ids, document_lengths, cache, first_position=num_tokens)
        return decoder.run_layers(decoder.embed_tokens(input_ids), inputs)

    def load_tensors(self, tensors: Mapping[str, np.ndarray], where: str) -> None:
        """As `PeftModel.load_tensors`; also all layers' keys and values in one tensor, and unshifted ones.

        Raises:
            ValueError: as there.
        """
        own = dict(tensors)
        layers = dict(adapter_layers(self.base_model))
        if "prompt_embeddings" in own:
            stored = own.pop("prompt_embeddings")
            width = sum(2 * layer.width for layer in layers.values())
            if stored.ndim != 2 or stored.shape[1] != width:
                raise ValueError(
                    f"{where}: the stored prefix has shape {list(stored.shape)}, and this model's {len(layers)} layers "
                    f"need [tokens, {width}]: the prefix belongs to another model."
                )
            for (name, layer), part in zip(layers.items(), np.split(stored, len(layers), axis=1), strict=True):
                own[f"{name}.prefix"] = part.reshape(len(part), 2, -1, layer.base.head_dim)
        for name in [name for name in own if name.endswith(self.UNSHIFTED)]:
            own[name.replace(self.UNSHIFTED, "prefix")] = self._shifted(own.pop(name))
        super().load_tensors(own, where)

    def _shifted(self, prefix_P2KH: np.ndarray) -> np.ndarray:
        """The prefix that has the same scores when the document's positions begin at P: its keys turned by P."""
        keys_1PKH = paddle.to_tensor(prefix_P2KH[None, :, 0].astype(np.float32))
        num_tokens = keys_1PKH.shape[1]
        cos_1PH, sin_1PH = self.base_model.model.rotary(paddle.full([1, num_tokens], num_tokens, dtype="int64"))
        amplitude = float((cos_1PH[0, 0, 0] ** 2 + sin_1PH[0, 0, 0] ** 2).sqrt())  # of YaRN; the queries have it too
        turned = (apply_rope(keys_1PKH, cos_1PH, sin_1PH) / amplitude)[0].numpy()
        return np.stack([turned, prefix_P2KH[:, 1]], axis=1)

    @staticmethod
    def projected(tensors: Mapping[str, paddle.Tensor]) -> list[paddle.Tensor]:
        """Keys and values that a projection makes, [P, 2 * E] for each layer, from the adapter's own tensors."""
        encoder = [tensors[f"prefix_encoder.{name}"] for name in ("embedding", "weight", "bias")]
        hidden_PF = project(*encoder).tanh()
        names = [name.removesuffix("_weight") for name in in_layer_order(tensors) if name.endswith(".prefix_weight")]
        return [project(hidden_PF, tensors[f"{name}_weight"], tensors[f"{name}_bias"]) for name in names]


def in_layer_order(names: Iterable[str]) -> list[str]:
    """Names with a layer's number in them, in the order of the layers: 2 before 10, however they come."""
    return sorted(names, key=lambda name: [int(number) for number in re.findall(r"\d+", name)])


def project(x: paddle.Tensor, weight: paddle.Tensor, bias: paddle.Tensor) -> paddle.Tensor:
    """x W^T + b."""
    return paddle.matmul(x, weight, transpose_y=True) + bias
