"""HRA: Householder Reflection Adaptation, a chain of trained reflections of a linear layer's input (Yuan et al. 2024).

    W' = W H_1 H_2 ... H_r        H_i = I - 2 u_i u_i^T / |u_i|^2        U = [u_1, ..., u_r] [in, r]

arXiv:2405.17484. H is orthogonal, so it preserves the norms of the rows of W and the angles between them. The product
of reflections is applied in compact WY form with 2 * r * in multiplications per token, as many as LoRA needs for a
square W:

    y = x H^T W^T + b        x H^T = x - (x U) C U^T        C = D T^T D,  D = diag(1 / |u_i|)
    T^-1 = I / 2 + the part of D U^T U D above its diagonal

With `apply_GS` the u_i are orthonormalized first. H then depends only on the space that they span:

    C = 2 (U^T U)^-1

| start | U, Kaiming-uniform | H |
| --- | --- | --- |
| even r | pairs of equal columns | I: each pair of reflections cancels |
| odd r, or `apply_GS` | independent columns | not I: the model does not start as its base |

H - I has rank r, so the update of a given W is low-rank: delta W = -(W U) C^T U^T.

Shapes: r reflections, in/out features of the adapted linear.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import paddle
from paddle import nn

from paddlenlp_ext.config.options import option
from paddlenlp_ext.nn.submodules import layer_at
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.peft.config import refuse_unread_fields
from paddlenlp_ext.peft.layers import LinearAdapter, adapter_layers, as_linear, kaiming_uniform
from paddlenlp_ext.peft.linear_method_config import LinearTargetsConfig
from paddlenlp_ext.peft.registry import PEFT_METHODS
from paddlenlp_ext.peft.target_modules import shortest_targets, targets_from_peft
from paddlenlp_ext.sharding_spec import Style


@PEFT_METHODS.register("hra")
@dataclass(kw_only=True)
class HRAConfig(LinearTargetsConfig):
    """Options of HRA.

    >>> HRAConfig(r=8, apply_GS=True).apply_GS
    True

    Raises:
        ValueError: an option is out of range.
    """

    peft_type: ClassVar[str] = "HRA"
    targets_key: ClassVar[str] = "hra_target_modules"

    r: int = option(
        8,
        help="number r of reflections per layer; if r is even, the model starts as its base",
        minimum=1,
        maximum=65536,
        arguments=("rank",),
        key="hra_rank",
    )
    apply_GS: bool = option(  # noqa: N815 - name in Hugging Face PEFT
        False,
        help="orthonormalize the reflections of a layer; the model then does not start as its base",
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
                f"most {smallest} orthogonal vectors; lower the rank"
            )
        return names

    def wrap(self, name: str, base: nn.Layer, seed: int) -> HRALinear:
        return HRALinear(base, self.r, self.apply_GS, seed, name)

    def decays(self, parameter_name: str) -> bool:
        """Return False: weight decay shortens vectors, and only their directions matter."""
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
        base: linear layer to adapt, plain or quantized.
        rank: r, the number of reflections.
        gram_schmidt: orthonormalize the vectors of the reflections.
        seed, name: determine the initial values.
    """

    def __init__(self, base: nn.Layer, rank: int, gram_schmidt: bool, seed: int, name: str) -> None:
        super().__init__(base)
        self.gram_schmidt = gram_schmidt
        pairs = rank % 2 == 0 and not gram_schmidt
        # PEFT's initialization of a matrix [in, columns] has the bound 1 / sqrt(columns); the scale has no effect.
        start = kaiming_uniform((self.in_features, rank // 2 if pairs else rank), seed, f"{name}.hra_u")
        self.hra_u = self.new_parameter(np.repeat(start, 2, axis=1) if pairs else start)

    def adapter_forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """Map x [..., in] to [..., out]."""
        u = self.hra_u.astype(x.dtype)
        projected = self.reduce_over_inputs(paddle.matmul(x, u))
        coefficients = paddle.matmul(projected, self.coefficient_matrix().astype(x.dtype))
        # Each rank multiplies its shard of the inputs, so the gradients of the coefficients are summed over ranks.
        coefficients = self.copy_over_inputs(coefficients)
        return self.base(x - paddle.matmul(coefficients, u, transpose_y=True))

    def coefficient_matrix(self) -> paddle.Tensor:
        """Return C, float32 [r, r], with x H^T = x - (x U) C U^T."""
        with paddle.amp.auto_cast(enable=False):
            u = self.hra_u.astype("float64")  # U^T U has the squared condition number of U
            gram = self.reduce_over_inputs(paddle.matmul(u, u, transpose_x=True))
            inverse_norms = paddle.diagonal(gram).rsqrt()
            scales = inverse_norms.unsqueeze(0) * inverse_norms.unsqueeze(1)
            cosines = gram * scales
            # Paddle 3.3's gradients of solve and triangular_solve crash or are wrong if the right side is constant.
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
        """Shard U along the inputs."""
        assert style in ("colwise", "rowwise", "replicated"), f"a linear cannot be sharded {style}"
        return {"hra_u": 0 if style == "rowwise" else None}
