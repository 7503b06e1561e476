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

from paddlenlp_ext.config.options import option
from paddlenlp_ext.peft.config import PeftConfig, refuse_unread_fields
from paddlenlp_ext.peft.inject import as_targets, linear_names, select_targets, shortest_targets, targets_from_peft
from paddlenlp_ext.peft.layers import Factor, LinearAdapter, adapter_layers
from paddlenlp_ext.peft.methods.lora import IGNORED_PADDLENLP_FIELDS
from paddlenlp_ext.peft.option_checks import require_choice, require_share, require_whole
from paddlenlp_ext.peft.registry import PEFT_METHODS
from paddlenlp_ext.sharding_spec import Style

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
    excludes: ClassVar[Mapping[str, str]] = {
        "tensor_parallel_degree": "all features of a layer are folded together, which a cut layer does not have"
    }

    rank: int = option(8, help="As many parameters as a LoRA of this rank.", minimum=1, maximum=65536, arguments=("r",))
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
        refuse_unread_fields(fields, read | IGNORED_PADDLENLP_FIELDS)
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
            self.register_buffer("cos", paddle.to_tensor(cos), persistable=False)
            self.register_buffer("sin", paddle.to_tensor(sin), persistable=False)

    def adapter_forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """[..., in] to [..., out]. The matrices are turned and folded, not the features: they are far smaller."""
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
        """A R_j x_j [..., q] for each block A R_j; the last group is filled with the input's beginning."""
        last = self.in_features - (self.num_groups - 1) * self.size
        groups = x.split([self.size] * (self.num_groups - 1) + [last], axis=-1)
        results = []
        for group, block in zip(groups, blocks, strict=False):  # groups beyond the outputs go unread
            block, width = block.astype(self.dtype), group.shape[-1]
            result = paddle.matmul(group, block[:, :width], transpose_y=True)
            if width < self.size:
                again = fold_columns(block[:, width:], self.in_features)
                result = result + paddle.matmul(groups[0][..., : again.shape[1]], again, transpose_y=True)
            results.append(result)
        return results

    def _matrices(self, count: int) -> list[paddle.Tensor]:
        """A R_j, float32 [q, q], of the first groups; A itself without rotation."""
        a = self.lora_A.weight.astype("float32")
        if not self.rotated:
            return [a] * count
        left, right = a.chunk(2, axis=-1)  # R_j (u, v) = (u cos - v sin, v cos + u sin) for a group in halves u, v
        turns = [(self.cos[j], self.sin[j]) for j in range(count)]
        return [paddle.concat([left * cos + right * sin, right * cos - left * sin], axis=-1) for cos, sin in turns]

    def delta_weight(self) -> paddle.Tensor:
        """The matrix of the whole map, float32 [out, in]: rows for y's groups, columns for x's, then both folded."""
        size, n, m = self.size, self.num_groups, -(-self.out_features // self.size)
        if self.rotated:
            blocks = self._matrices(min(n, m))
            rows = [F.pad(blocks[i % n], [0, 0, i % n * size, (n - 1 - i % n) * size]) for i in range(m)]
        else:
            rows = [paddle.concat(self._matrices(n), axis=-1)] * m
        return fold_columns(paddle.concat(rows)[: self.out_features], self.in_features)

    def sharding_axes(self, style: Style) -> dict[str, int | None]:
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


def fold_columns(matrix: paddle.Tensor, width: int) -> paddle.Tensor:
    """[rows, any] to [rows, width] at most: column c + k * width is added to column c, as inputs are read again."""
    folded = matrix[:, :width]
    for start in range(width, matrix.shape[1], width):
        again = matrix[:, start : start + width]
        folded = folded + F.pad(again, [0, 0, 0, width - again.shape[1]])
    return folded
