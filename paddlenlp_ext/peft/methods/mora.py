"""MoRA: High-Rank Updating for Parameter-Efficient Fine-Tuning (Jiang et al. 2024, arXiv:2405.12130).

    y = x W^T + unfold(A fold(dropout(x)))        A [q, q] = 0        q = round(sqrt((in + out) r))

One square matrix A has as many parameters as the two matrices of a LoRA of rank r. `fold` splits the input into
n = ceil(in / q) groups of q features, and pads the last group with the first features of the input. A maps each group
to q outputs. `unfold` concatenates the outputs and truncates them to `out` features. The update has no scale.

| folding | formula | output | q | recommended in the paper for |
| --- | --- | --- | --- | --- |
| rotated | y_j = A R_j x_j | y_0 y_1 ... y_(n-1) y_0 ... | even | small ranks |
| sharing | y = A (x_0 + ... + x_(n-1)) | y y y ... | any | large ranks |

R_j rotates the pairs (k, k + q/2) by j * 10000^(-2k/q), like a rotary position embedding for position j, so that A
distinguishes the groups.

Shapes: q side of A, n groups of the input, m groups of the output, in/out features of the adapted linear.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional as F

from paddlenlp_ext.config.dataclass_options import option
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.peft.config import PeftConfig, refuse_unread_fields
from paddlenlp_ext.peft.formats.adapter_config import PaddleNLPFiles
from paddlenlp_ext.peft.layers import Factor, LinearAdapter, adapter_layers
from paddlenlp_ext.peft.linear_method_config import LinearTargetsConfig, dropout_option, rank_option
from paddlenlp_ext.peft.lora.low_rank_config import IGNORED_PADDLENLP_FIELDS
from paddlenlp_ext.peft.registry import PEFT_METHODS
from paddlenlp_ext.peft.target_modules import shortest_targets, targets_from_peft
from paddlenlp_ext.sharding_spec import Style

FOLDINGS = ("rotated", "sharing")


@PEFT_METHODS.register("use_mora")
@dataclass(kw_only=True)
class MoRAConfig(LinearTargetsConfig):
    """Options of MoRA: a square matrix over folded features.

    >>> MoRAConfig(r=8, folding="sharing").r
    8
    """

    peft_type: ClassVar[str] = "MORA"
    targets_key: ClassVar[str] = "lora_target_modules"
    free_on_resume: ClassVar[frozenset[str]] = PeftConfig.free_on_resume | {"lora_dropout"}
    refines: ClassVar[str | None] = "lora"
    paddlenlp_files: ClassVar[PaddleNLPFiles | None] = PaddleNLPFiles("lora_config.json")
    excludes: ClassVar[Mapping[str, str]] = {
        "tensor_parallel_degree": "all features of a layer are folded together, but a shard has only some of them"
    }

    r: int = rank_option(8, "lora_rank", "rank of a LoRA with the same number of parameters")
    lora_dropout: float = dropout_option("lora_dropout")
    folding: str = option(
        "rotated",
        help="how features are grouped: rotated (for small ranks) or sharing (for large ranks)",
        choices=FOLDINGS,
        key="mora_folding",
    )

    def wrap(self, name: str, base: nn.Layer, seed: int) -> MoRALinear:
        return MoRALinear(base, self.r, self.folding, self.lora_dropout)

    # -- files --------------------------------------------------------------------------------------------------------
    def to_adapter_config(self, model: TrainableModel) -> dict[str, Any]:
        return {
            "r": self.r,
            "lora_dropout": self.lora_dropout,
            "mora_folding": self.folding,
            "target_modules": shortest_targets([name for name, _ in adapter_layers(model)], model),
        }

    @classmethod
    def from_adapter_config(cls, fields: Mapping[str, Any]) -> MoRAConfig:
        refuse_unread_fields(fields, {"r", "lora_dropout", "mora_folding", "target_modules"})
        return cls(
            r=fields.get("r", 8),
            lora_dropout=fields.get("lora_dropout", 0.0),
            folding=fields.get("mora_folding", "rotated"),
            target_modules=targets_from_peft(fields),
        )

    @classmethod
    def claims(cls, fields: Mapping[str, Any]) -> bool:
        return bool(fields.get("use_mora"))

    @classmethod
    def from_paddlenlp(cls, fields: Mapping[str, Any]) -> MoRAConfig:
        read = {"use_mora", "r", "lora_dropout", "target_modules"}
        read |= {
            "lora_alpha",
            "rslora",
            "lora_plus_scale",
            "scaling",
        }  # these fields have no effect in PaddleNLP, where MoRA has scale 1
        refuse_unread_fields(fields, read | IGNORED_PADDLENLP_FIELDS)
        return cls(
            r=fields.get("r", 8),
            lora_dropout=fields.get("lora_dropout", 0.0),
            target_modules=fields.get("target_modules"),
        )

    @classmethod
    def tensors_from_paddlenlp(cls, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {f"{name}.weight": value.T for name, value in tensors.items()}


class MoRALinear(LinearAdapter):
    """Linear layer with a square update matrix over folded features.

    Args:
        rank: r, which determines q.
        folding: one of `FOLDINGS`.
    """

    cos: paddle.Tensor
    sin: paddle.Tensor

    def __init__(self, base: nn.Layer, rank: int, folding: str, dropout: float) -> None:
        super().__init__(base)
        self.dropout = dropout
        self.rotated = folding == "rotated"
        self.size = square_size(self.in_features, self.out_features, rank, even=self.rotated)
        self.num_groups = -(-self.in_features // self.size)
        self.lora_A = Factor(np.zeros((self.size, self.size), np.float32), self.dtype)
        if self.rotated:
            cos, sin = group_angles(self.num_groups, self.size)
            self.register_buffer("cos", paddle.to_tensor(cos), persistable=False)
            self.register_buffer("sin", paddle.to_tensor(sin), persistable=False)

    def adapter_forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """Map x [..., in] to [..., out]; rotation and folding are applied to A, which is smaller than x."""
        inner = self.apply_dropout(x)
        num_results = -(-self.out_features // self.size)
        if self.rotated:
            blocks = self._matrices(min(self.num_groups, num_results))
            results = self._map_groups(inner, blocks)
        else:
            rows = fold_columns(paddle.concat(self._matrices(self.num_groups), axis=-1), self.in_features)
            results = [paddle.matmul(inner, rows.astype(self.dtype), transpose_y=True)]
        results = [results[i % len(results)] for i in range(num_results)]
        results[-1] = results[-1][..., : self.out_features - (num_results - 1) * self.size]
        return self.base(x) + (paddle.concat(results, axis=-1) if num_results > 1 else results[0])

    def _map_groups(self, x: paddle.Tensor, blocks: list[paddle.Tensor]) -> list[paddle.Tensor]:
        """Return A R_j x_j [..., q] for the given blocks A R_j; the last group is padded with the first inputs."""
        last = self.in_features - (self.num_groups - 1) * self.size
        groups = x.split([self.size] * (self.num_groups - 1) + [last], axis=-1)
        results = []
        for group, block in zip(groups, blocks, strict=False):  # groups without a block have no output
            block, width = block.astype(self.dtype), group.shape[-1]
            result = paddle.matmul(group, block[:, :width], transpose_y=True)
            if width < self.size:
                repeated = fold_columns(block[:, width:], self.in_features)
                result = result + paddle.matmul(groups[0][..., : repeated.shape[1]], repeated, transpose_y=True)
            results.append(result)
        return results

    def _matrices(self, count: int) -> list[paddle.Tensor]:
        """Return A R_j, float32 [q, q], for the first `count` groups; without rotation, A for each group."""
        a = self.lora_A.weight.astype("float32")
        if not self.rotated:
            return [a] * count
        left, right = a.chunk(2, axis=-1)  # R_j (u, v) = (u cos - v sin, v cos + u sin), u and v: halves of a group
        rotations = [(self.cos[j], self.sin[j]) for j in range(count)]
        return [paddle.concat([left * cos + right * sin, right * cos - left * sin], axis=-1) for cos, sin in rotations]

    def delta_weight(self) -> paddle.Tensor:
        """Return the update, float32 [out, in]; columns for padding are added to the columns of the first inputs."""
        size, n, m = self.size, self.num_groups, -(-self.out_features // self.size)
        if self.rotated:
            blocks = self._matrices(min(n, m))
            rows = [F.pad(blocks[i % n], [0, 0, i % n * size, (n - 1 - i % n) * size]) for i in range(m)]
        else:
            rows = [paddle.concat(self._matrices(n), axis=-1)] * m
        return fold_columns(paddle.concat(rows)[: self.out_features], self.in_features)

    def sharding_axes(self, style: Style) -> dict[str, int | None]:
        """Replicate A.

        Raises:
            ValueError: the base is sharded, so its features would be folded into different groups.
        """
        if style != "replicated":
            raise ValueError(
                f"MoRA folds all features of a layer together, but a {style} shard has only some of the features; use "
                "another method with tensor parallelism, or tensor_parallel_degree 1"
            )
        return {"lora_A.weight": None}


def square_size(in_features: int, out_features: int, rank: int, even: bool) -> int:
    """Return the side q of a square matrix with about as many elements as the two factors of a LoRA of rank `rank`."""
    size = int(math.sqrt((in_features + out_features) * rank) + 0.5)
    return max(2, size // 2 * 2) if even else size


def group_angles(num_groups: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the cosines and sines of each group's rotation, float32 [n, q/2] each."""
    angles = np.outer(np.arange(num_groups), 10000.0 ** (-np.arange(0, size, 2) / size))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def fold_columns(matrix: paddle.Tensor, width: int) -> paddle.Tensor:
    """Fold a matrix to at most `width` columns by adding column c + k * width to column c."""
    folded = matrix[:, :width]
    for start in range(width, matrix.shape[1], width):
        block = matrix[:, start : start + width]
        folded = folded + F.pad(block, [0, 0, 0, width - block.shape[1]])
    return folded
