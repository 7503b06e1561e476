"""HRA: Householder Reflection Adaptation, a chain of trained reflections of a linear layer's input (Yuan et al. 2024).

    W' = W H_1 H_2 ... H_r        H_i = I - 2 u_i u_i^T / |u_i|^2        U = [u_1, ..., u_r] [in, r]

arXiv:2405.17484. H = H_1 ... H_r is orthogonal, so W H has the same row norms and angles between rows as W. H is
applied in compact WY form with `2 * r * in` multiplications per token (as many as LoRA for a square W):

    y = x H^T W^T + b        x H^T = x - (x U) C U^T        C = D T^T D,  D = diag(1 / |u_i|)
    T^-1 = I / 2 + the strict upper triangle of D U^T U D

With `apply_GS`, the u_i are orthonormalized first. H then depends only on the span of the u_i:

    C = 2 (U^T U)^-1

| start | U, Kaiming-uniform | H |
| --- | --- | --- |
| even r | pairs of equal columns | I: each pair of reflections cancels |
| odd r, or `apply_GS` | independent columns | not I: the initial model differs from its base |

H - I has rank r, so the update is low-rank: delta W = -(W U) C^T U^T.

Shapes: r reflections, in/out features of the adapted linear.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import paddle
from paddle import nn

from paddlenlp_ext.config.dataclass_options import option
from paddlenlp_ext.nn.submodules import layer_at
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.peft.config import refuse_unread_fields
from paddlenlp_ext.peft.layers import LinearAdapter, adapter_layers, as_linear, kaiming_uniform
from paddlenlp_ext.peft.linear_method_config import LinearTargetsConfig, rank_option
from paddlenlp_ext.peft.registry import PEFT_METHODS
from paddlenlp_ext.peft.target_modules import shortest_targets, targets_from_peft
from paddlenlp_ext.sharding_spec import Style


@PEFT_METHODS.register("hra")
@dataclass(kw_only=True)
class HRAConfig(LinearTargetsConfig):
    """Options of HRA.

    >>> HRAConfig(r=8, apply_GS=True).apply_GS
    True
    """

    peft_type: ClassVar[str] = "HRA"
    targets_key: ClassVar[str] = "hra_target_modules"

    r: int = rank_option(
        8,
        "hra_rank",
        "number of reflections per layer; if it is even and hra_gram_schmidt is false, the initial model equals the "
        "base",
    )
    apply_GS: bool = option(  # noqa: N815 - name in Hugging Face PEFT
        False,
        help="orthonormalize the reflections of a layer; the initial model then differs from the base",
        aliases=("hra_apply_GS",),
        arguments=("gram_schmidt",),
        key="hra_gram_schmidt",
    )

    def targets(self, model: TrainableModel) -> list[str]:
        names = super().targets(model)
        smallest = min(as_linear(layer_at(model, name)).in_features for name in names)
        if self.apply_GS and self.r > smallest:
            raise ValueError(
                f"hra_rank={self.r} with hra_gram_schmidt: a layer with {smallest} inputs has at "
                f"most {smallest} orthogonal vectors; lower hra_rank"
            )
        return names

    def wrap(self, name: str, base: nn.Layer, seed: int) -> HRALinear:
        return HRALinear(base, self.r, self.apply_GS, seed, name)

    def decays(self, parameter_name: str) -> bool:
        """Return False: weight decay shortens vectors, but H depends only on their directions."""
        return False

    def to_adapter_config(self, model: TrainableModel) -> dict[str, Any]:
        return {
            "r": self.r,
            "apply_GS": self.apply_GS,
            "target_modules": shortest_targets([name for name, _ in adapter_layers(model)], model),
            "bias": "none",
            "init_weights": True,
            "modules_to_save": None,
        }

    @classmethod
    def from_adapter_config(cls, fields: Mapping[str, Any]) -> HRAConfig:
        read = {"r", "apply_GS", "init_weights", "target_modules", "layers_to_transform", "layers_pattern"}
        refuse_unread_fields(fields, read)
        return cls(
            r=fields.get("r", 8),
            apply_GS=fields.get("apply_GS", False),
            target_modules=targets_from_peft(fields),
        )


class HRALinear(LinearAdapter):
    """Linear layer whose input is reflected r times.

    Args:
        rank: r, the number of reflections.
        gram_schmidt: orthonormalize the vectors of the reflections.
        seed: random seed of the initial values.
        name: name of the layer; the initial values also depend on the name.
    """

    def __init__(self, base: nn.Layer, rank: int, gram_schmidt: bool, seed: int, name: str) -> None:
        super().__init__(base)
        self.gram_schmidt = gram_schmidt
        pairs = rank % 2 == 0 and not gram_schmidt
        # As in PEFT, initial values are at most 1 / sqrt(columns) in magnitude. H does not depend on the scale of U.
        start = kaiming_uniform((self.in_features, rank // 2 if pairs else rank), seed, f"{name}.hra_u")
        self.hra_u = self.new_parameter(np.repeat(start, 2, axis=1) if pairs else start)

    def adapter_forward(self, x: paddle.Tensor) -> paddle.Tensor:
        u = self.hra_u.astype(x.dtype)
        projected = self.reduce_over_inputs(paddle.matmul(x, u))
        coefficients = paddle.matmul(projected, self.coefficient_matrix().astype(x.dtype))
        # Each rank multiplies the coefficients by its shard of U, so their gradients are summed over the ranks.
        coefficients = self.copy_over_inputs(coefficients)
        return self.base(x - paddle.matmul(coefficients, u, transpose_y=True))

    def coefficient_matrix(self) -> paddle.Tensor:
        """Return C, float32 [r, r], with x H^T = x - (x U) C U^T."""
        with paddle.amp.auto_cast(enable=False):
            u = self.hra_u.astype("float64")  # the condition number of U^T U is the square of the condition number of U
            gram = self.reduce_over_inputs(paddle.matmul(u, u, transpose_x=True))
            inverse_norms = paddle.diagonal(gram).rsqrt()
            scales = inverse_norms.unsqueeze(0) * inverse_norms.unsqueeze(1)
            cosines = gram * scales
            # In Paddle 3.3, gradients of solve and triangular_solve crash or are wrong for a constant right-hand side.
            if self.gram_schmidt:
                inner = 2 * paddle.linalg.inv(cosines)
            else:
                inner = paddle.linalg.inv(paddle.eye(gram.shape[0], dtype=gram.dtype) / 2 + paddle.triu(cosines, 1)).T
            return (inner * scales).astype("float32")

    def low_rank_factors(self) -> tuple[paddle.Tensor, paddle.Tensor] | None:
        """Return U^T [r, in] and -(W U) C^T [out, r]."""
        u = self.hra_u.astype("float32")
        moved = paddle.matmul(paddle.matmul(self.base.weight_value(), u), self.coefficient_matrix(), transpose_y=True)
        return u.T, -moved

    def sharding_axes(self, style: Style) -> dict[str, int | None]:
        assert style in ("colwise", "rowwise", "replicated"), f"a linear layer cannot be sharded {style}"
        return {"hra_u": 0 if style == "rowwise" else None}
