"""MoRA: High-Rank Updating for Parameter-Efficient Fine-Tuning (Jiang et al. 2024, arXiv 2405.12130).

One square matrix A [q, q] in place of LoRA's two, with as many parameters as a LoRA of rank r would have:
q = round(sqrt((in + out) r)). The input is cut into n = ceil(in / q) groups of q (what the last group lacks is the
input's own beginning again); A maps a group to a group, and the results are laid end to end up to `out` values.

rotated   y_j = A R_j x_j, group by group, and the output is y_0 y_1 ... y_(n-1) y_0 ... cut to `out`. R_j turns the
          pairs (k, k + q/2) by j * 10000^(-2k/q), as rotary embedding does for position j, so that the groups differ.
          q is even. The paper's choice for small ranks.
sharing   y = A (x_0 + ... + x_(n-1)), and the output is y y y ... cut to `out`. The paper's choice for large ranks.

A = 0 at the start. There is no scale, and so no alpha.

Shapes: q as above, n groups of the input, m groups of the output, in/out features of the adapted linear.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional as F

from paddlenlp_ext.config.schema import option
from paddlenlp_ext.peft.config import PeftConfig, refuse_unread_fields
from paddlenlp_ext.peft.layer import Factor, LinearAdapter, adapter_layers
from paddlenlp_ext.peft.ranges import require_choice, require_share, require_whole
from paddlenlp_ext.peft.registry import PEFT_METHODS
from paddlenlp_ext.peft.targets import as_targets, linear_names, select_targets, shortest_targets, targets_from_peft
from paddlenlp_ext.plan import Style

FOLDINGS = ("rotated", "sharing")


@PEFT_METHODS.register("use_mora")
@dataclass(kw_only=True)
class MoRAConfig(PeftConfig):
    """A square matrix over folded features (MoRA).

    Raises:
        ValueError: a value out of its range.
    """

    peft_type: ClassVar[str] = "MORA"
    refines: ClassVar[str | None] = "lora"
    random_start: ClassVar[bool] = False
    paddlenlp_config: ClassVar[str | None] = "lora_config.json"

    rank: int = option(8, help="As many parameters as a LoRA of this rank.", minimum=1, maximum=65536)
    dropout: float = option(0.0, help="Dropout on the adapter's input while training.", minimum=0, below=1)
    target_modules: tuple[str, ...] | None = option(
        None, help="Linear layers to adapt, as ends of names or regular expressions. Unset: all but the output head."
    )
    folding: str = option(
        "rotated",
        help="How features are folded: rotated (small ranks) or sharing (large ones).",
        choices=FOLDINGS,
        key="mora_folding",
    )

    def __post_init__(self) -> None:
        self.target_modules = as_targets(self.target_modules)
        require_whole("lora_rank", self.rank)
        require_share("lora_dropout", self.dropout)
        require_choice("mora_folding", self.folding, FOLDINGS)

    def targets(self, model: nn.Layer) -> list[str]:
        return select_targets(linear_names(model), self.target_modules, "lora_target_modules")

    def wrap(self, name: str, base: nn.Layer, seed: int) -> MoRALinear:
        return MoRALinear(base, self.rank, self.folding, self.dropout)

    def warm_start(self, stored: PeftConfig) -> PeftConfig:
        return dataclasses.replace(stored, path=self.path, dropout=self.dropout)

    # -- files --------------------------------------------------------------------------------------------------------
    def to_adapter_config(self, model: nn.Layer) -> dict[str, Any]:
        return {
            "r": self.rank,
            "lora_dropout": self.dropout,
            "mora_folding": self.folding,
            "target_modules": shortest_targets([name for name, _ in adapter_layers(model)], model),
        }

    @classmethod
    def from_adapter_config(cls, fields: Mapping[str, Any]) -> MoRAConfig:
        refuse_unread_fields(fields, {"r", "lora_dropout", "mora_folding", "target_modules"})
        return cls(
            rank=fields.get("r", 8),
            dropout=fields.get("lora_dropout", 0.0),
            folding=fields.get("mora_folding", "rotated"),
            target_modules=targets_from_peft(fields),
        )

    @classmethod
    def claims(cls, fields: Mapping[str, Any]) -> bool:
        return bool(fields.get("use_mora"))

    @classmethod
    def from_paddlenlp(cls, fields: Mapping[str, Any]) -> MoRAConfig:
        read = {"use_mora", "r", "lora_dropout", "target_modules"}
        read |= {"lora_alpha", "rslora", "lora_plus_scale", "scaling"}  # without effect there: MoRA's scale is 1
        read |= {"dtype", "head_dim", "tensor_parallel_degree", "merge_weights", "use_quick_lora"}  # change no number
        refuse_unread_fields(fields, read)
        return cls(
            rank=fields.get("r", 8),
            dropout=fields.get("lora_dropout", 0.0),
            target_modules=fields.get("target_modules"),
        )

    @classmethod
    def tensor_from_paddlenlp(cls, name: str, value: np.ndarray) -> tuple[str, np.ndarray]:
        return f"{name}.weight", value.T


class MoRALinear(LinearAdapter):
    """A linear with a square update.

    Args:
        base: has `in_features`, `out_features` and a forward from [..., in] to [..., out].
        rank: r, which gives q.
        folding: "rotated" or "sharing".
        dropout: probability, on the adapter's input while training.
    """

    def __init__(self, base: nn.Layer, rank: int, folding: str, dropout: float) -> None:
        super().__init__(base)
        self.dropout = dropout
        self.rotated = folding == "rotated"
        self.size = square_size(base.in_features, base.out_features, rank, even=self.rotated)
        self.num_groups = -(-base.in_features // self.size)
        self.lora_A = Factor(np.zeros((self.size, self.size), np.float32), self.dtype)
        if self.rotated:
            cos, sin = group_angles(self.num_groups, self.size)
            self.register_buffer("cos", paddle.to_tensor(cos).astype(self.dtype), persistable=False)
            self.register_buffer("sin", paddle.to_tensor(sin).astype(self.dtype), persistable=False)

    def adapted(self, x: paddle.Tensor) -> paddle.Tensor:
        """[..., in] to [..., out]."""
        inner = F.dropout(x, self.dropout, training=self.training) if self.dropout else x
        groups = self._filled(inner, self.num_groups * self.size).reshape([*x.shape[:-1], self.num_groups, self.size])
        if not self.rotated:
            update = paddle.matmul(groups.sum(axis=-2), self.lora_A.weight, transpose_y=True)
            return self.base(x) + self._filled(update, self.out_features)
        used = -(-self.out_features // self.size)
        update = self._map_rotated(groups[..., :used, :], self.cos[:used], self.sin[:used])
        return self.base(x) + self._filled(update.flatten(-2), self.out_features)

    def _map_rotated(self, groups: paddle.Tensor, cos: paddle.Tensor, sin: paddle.Tensor) -> paddle.Tensor:
        """A R_j x_j for each group; x_j in halves: R_j (u, v) = (u cos - v sin, v cos + u sin)."""
        first, second = groups.chunk(2, axis=-1)
        left, right = self.lora_A.weight.chunk(2, axis=-1)
        update = paddle.matmul(first * cos - second * sin, left, transpose_y=True)
        return update + paddle.matmul(second * cos + first * sin, right, transpose_y=True)

    @staticmethod
    def _filled(x: paddle.Tensor, length: int) -> paddle.Tensor:
        """The last axis repeated, or cut, to `length`."""
        copies = -(-length // x.shape[-1])
        return (paddle.concat([x] * copies, axis=-1) if copies > 1 else x)[..., :length]

    def delta_weight(self) -> paddle.Tensor:
        """The matrix of the whole map, float32 [out, in]: rows for y's groups, columns for x's, then both folded."""
        a, size, n = self.lora_A.weight.astype("float32"), self.size, self.num_groups
        m = -(-self.out_features // size)
        if self.rotated:
            cos, sin = (paddle.to_tensor(table) for table in group_angles(n, size))
            left, right = a.chunk(2, axis=-1)
            blocks = [
                paddle.concat([left * cos[j] + right * sin[j], right * cos[j] - left * sin[j]], axis=-1)
                for j in range(min(n, m))
            ]
            rows = [F.pad(blocks[i % n], [0, 0, i % n * size, (n - 1 - i % n) * size]) for i in range(m)]
        else:
            rows = [paddle.concat([a] * n, axis=-1)] * m
        whole = paddle.concat(rows)[: self.out_features]
        delta = whole[:, : self.in_features]
        for start in range(self.in_features, n * size, self.in_features):  # the input's beginning, read again
            again = whole[:, start : start + self.in_features]
            delta = delta + F.pad(again, [0, 0, 0, self.in_features - again.shape[1]])
        return delta

    def placements(self, style: Style) -> dict[str, int | None]:
        """A is whole.

        Raises:
            ValueError: the base is cut; a part of the features folds into other groups than the whole.
        """
        if style != "replicated":
            raise ValueError(
                f"MoRA folds all features of a layer together, which a layer cut {style} does not have; use another "
                "method with tensor parallelism, or tensor_parallel_degree 1."
            )
        return {"lora_A.weight": None}


def square_size(in_features: int, out_features: int, rank: int, even: bool) -> int:
    """q: the side of a square with about as many elements as both factors of a LoRA."""
    size = int(math.sqrt((in_features + out_features) * rank) + 0.5)
    return max(2, size // 2 * 2) if even else size


def group_angles(num_groups: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosine and sine of each group's turns, float32 [n, q/2]."""
    angles = np.outer(np.arange(num_groups), 10000.0 ** (-np.arange(0, size, 2) / size))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
