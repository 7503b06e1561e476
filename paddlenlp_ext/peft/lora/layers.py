"""LoRA layers for linear layers, lm_head and embedding.

    linear       y = x W^T + s (dropout(x) A^T) B^T                   A [r, in], B [out, r]
    lm_head      the same, with logits y [.., V]; the fused loss computes the update from the factors
    embedding    e(t) = E[t] + s (A^T)[t] B^T                         A [r, V], B [D, r]
                 logits of a tied lm_head: h E^T + s (dropout(h) B) A

As in Hugging Face PEFT, B A is an update of the transposed embedding table. A has a column for each token and starts at
zero. B starts with normally distributed values.

Shapes: r rank, in/out features of the adapted linear, V vocabulary, D hidden.
"""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional as F

from paddlenlp_ext.nn.causal_lm_forward import AdaptedHead
from paddlenlp_ext.nn.embedding import Embedding
from paddlenlp_ext.nn.linear import Linear
from paddlenlp_ext.ops.cpp.bf16 import activation_dtype
from paddlenlp_ext.ops.frozen_linear import FrozenLinear
from paddlenlp_ext.ops.lora_linear import lora_linear
from paddlenlp_ext.ops.training_blocks import AdaptedLinear
from paddlenlp_ext.peft.layers import (
    Factor,
    LinearAdapter,
    WeightAdapter,
    factor_axes,
    generator_for,
    kaiming_uniform,
    new_parameter,
)
from paddlenlp_ext.sharding_spec import Style

LoRALinearT = TypeVar("LoRALinearT", bound="LoRALinear")


class LoRALinear(LinearAdapter):
    """Linear layer with a low-rank update.

    Args:
        rank: r, the rank of the update.
        scaling: s, the factor of the update.
        seed: random seed of the initial values of A.
        name: name of the layer; the initial values also depend on the name.
    """

    def __init__(self, base: nn.Layer, rank: int, scaling: float, dropout: float, seed: int, name: str) -> None:
        super().__init__(base)
        self.scaling = scaling
        self.dropout = dropout
        a = kaiming_uniform((rank, self.in_features), seed, f"{name}.lora_A.weight")
        self.lora_A = Factor(a, self.dtype)
        self.lora_B = Factor(np.zeros((self.out_features, rank), np.float32), self.dtype)

    @property
    def rank(self) -> int:
        """Rank r of the update."""
        return self.lora_A.weight.shape[0]

    def adapter_forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """Map x [..., in] to [..., out]; one fused op computes the base's output and the update, if possible."""
        base, bias = self.fusable_base(), self.lora_bias()
        if base is None:
            y = self.base(x) + self.lora_update(x)
        else:
            y = lora_linear(x, base, self.lora_A.weight, self.lora_b_weight(), self.scaling)
        return y if bias is None else y + bias.astype(y.dtype)

    def lora_bias(self) -> paddle.Tensor | None:
        """Return s times the bias of B, [out]; None if B has no bias.

        In a row-parallel layer, the outputs of all ranks are added, so only the first rank adds the bias.
        """
        bias = getattr(self.lora_B, "bias", None)
        if bias is None:
            return None
        is_first = self.shard_group is None or self.style != "rowwise" or self.shard_group.index == 0
        return bias * (self.scaling if is_first else 0.0)

    def delta_bias(self) -> paddle.Tensor | None:
        """Return s times the bias of B, float32 [out]; None if B has no bias.

        Raises:
            ValueError: B has a bias, but the base does not.
        """
        bias = self.lora_bias()
        if bias is not None and self.base.bias is None:
            raise ValueError(
                "lora_bias: the base layer has no bias to merge the adapter's bias into; load the adapter with the "
                "base model instead"
            )
        return None if bias is None else bias.astype("float32")

    def fusable_base(self) -> FrozenLinear | None:
        """Return the base as an operand of the fused op `lora_linear`; None if the op cannot be used."""
        return None if self.dropout and self.training else self.base.as_frozen_linear()

    def as_adapted_linear(self) -> AdaptedLinear | None:
        """Return the layer as an operand of a fused training block, or None if the block does not support the layer.

        The block does not support subclasses, which compute different updates.
        """
        if not self.enabled:
            return self.base.as_adapted_linear()
        has_dropout = self.dropout and self.training
        if type(self) is not LoRALinear or has_dropout or self.lora_bias() is not None or self.shard_group is not None:
            return None
        base = self.base.as_adapted_linear()
        factors = {"a": self.lora_A.weight, "b": self.lora_B.weight, "scaling": self.scaling}
        return None if base is None else dataclasses.replace(base, **factors)

    def lora_update(self, x: paddle.Tensor) -> paddle.Tensor:
        """Return s dropout(x) A^T B^T for x [..., in]."""
        inner = self.apply_dropout(x)
        inner = paddle.matmul(inner, self.lora_A.weight, transpose_y=True) * self.scaling
        return paddle.matmul(inner, self.lora_b_weight(), transpose_y=True)

    def lora_b_weight(self) -> paddle.Tensor:
        """Return the matrix [out, r] that multiplies the output of A; LoRA returns B."""
        return self.lora_B.weight

    def low_rank_factors(self) -> tuple[paddle.Tensor, paddle.Tensor] | None:
        """Return A [r, in] and s B [out, r]."""
        return self.lora_A.weight.astype("float32"), self.lora_B.weight.astype("float32") * self.scaling

    def sharding_axes(self, style: Style) -> dict[str, int | None]:
        a_axis, b_axis = factor_axes(style)
        axes = {"lora_A.weight": a_axis, "lora_B.weight": b_axis}
        return {**axes, "lora_B.bias": b_axis} if hasattr(self.lora_B, "bias") else axes


class LoRAHead(LoRALinear, AdaptedHead):
    """The lm_head with a low-rank update; arguments as in `LoRALinear`."""

    @property
    def weight(self) -> paddle.Tensor:
        """Weight [V, D] of the base, without the update."""
        assert isinstance(self.base, Linear), "the lm_head must not be quantized"
        return self.base.weight

    def logit_updates(self, hidden: paddle.Tensor) -> list[tuple[paddle.Tensor, paddle.Tensor]]:
        """Return the factors of the logit update: s dropout(h) A^T and B.

        If B has a bias, the list also contains the pair (column of ones, bias). The list is empty if the adapter is
        disabled.
        """
        if not self.enabled:
            return []
        inner = paddle.matmul(self.apply_dropout(hidden), self.lora_A.weight, transpose_y=True) * self.scaling
        updates, bias_V = [(inner, self.lora_b_weight())], self.lora_bias()
        if bias_V is not None:
            updates.append((paddle.ones_like(inner[..., :1]), bias_V.unsqueeze(1)))
        return updates


class LoRAEmbedding(WeightAdapter, AdaptedHead):
    """Embedding with a low-rank update, which a tied lm_head can share.

    Args:
        base: token embedding.
        rank, scaling, seed, name: as in `LoRALinear`.
        dropout: dropout probability on the input of a tied lm_head during training; lookups have no dropout.
        adapts_tied_head: apply the update in a tied lm_head too.
    """

    base: Embedding

    def __init__(
        self,
        base: Embedding,
        rank: int,
        scaling: float,
        dropout: float,
        seed: int,
        name: str,
        adapts_tied_head: bool = True,
    ) -> None:
        super().__init__(base)
        (vocab_size, width), dtype = base.weight.shape, activation_dtype(base.weight.dtype)
        self.scaling, self.dropout, self.adapts_tied_head = scaling, dropout, adapts_tied_head
        b = generator_for(seed, f"{name}.lora_embedding_B").standard_normal((width, rank))
        self.lora_embedding_A = new_parameter(self, np.zeros((rank, vocab_size), np.float32), dtype)
        self.lora_embedding_B = new_parameter(self, b.astype(np.float32), dtype)

    @property
    def weight(self) -> paddle.Tensor:
        """Weight [V, D] of the base, without the update."""
        return self.base.weight

    def adapter_forward(self, input_ids: paddle.Tensor) -> paddle.Tensor:
        vectors, inner = self.base(input_ids), self.base.lookup(self.lora_embedding_A.T, input_ids)
        update = paddle.matmul(inner, self.lora_embedding_B, transpose_y=True) * self.scaling
        return vectors + update.astype(vectors.dtype)

    def logit_updates(self, hidden: paddle.Tensor) -> list[tuple[paddle.Tensor, paddle.Tensor]]:
        """Return the factors of the logit update of a tied lm_head: s dropout(h) B and A^T.

        Return an empty list if the adapter is disabled or does not adapt the tied lm_head.
        """
        if not (self.enabled and self.adapts_tied_head):
            return []
        dropped = F.dropout(hidden, self.dropout) if self.dropout and self.training else hidden
        return [(paddle.matmul(dropped, self.lora_embedding_B) * self.scaling, self.lora_embedding_A.T)]

    def merged_weight(self) -> paddle.Tensor:
        """Return E + s (B A)^T, float32 [V, D]."""
        a, b = self.lora_embedding_A.astype("float32"), self.lora_embedding_B.astype("float32")
        return self.base.weight.astype("float32") + paddle.matmul(a.T, b.T) * self.scaling

    def sharding_axes(self, style: Style) -> dict[str, int | None]:
        return {"lora_embedding_A": 1 if style == "vocab" else None, "lora_embedding_B": None}
