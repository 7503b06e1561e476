"""MiSS: Matrix Shard Sharing, one small trained matrix that all shards of a weight share (Kang and Yin 2024).

    y = x W^T + b + (x_0 + x_1 + ... + x_(n-1)) D        D [r, out] = 0 at the start

arXiv:2409.15371. The former name of the method is Bone. The input features are divided into n shards x_j of r features
(the last shard may be shorter). D^T is added to each shard W_j [out, r] of the weight.

| `init_weights` | parameter | updated shard or block of W | rank of the update |
| --- | --- | --- | --- |
| balance | D [r, out] | W_j + D^T | r |
| mini | M [r, k] | W_j + D^T, where D repeats the k columns of M | min(r, k) |
| bat | B [out / r, r, r] | blocks [r, r]: W_ij + W_ij B_i + B_i | any |

Shapes: r rank, k mini rank, in/out features of the adapted linear.
"""

from __future__ import annotations

import re
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
from paddlenlp_ext.peft.layers import LinearAdapter, adapter_layers, first_features, require_whole_blocks
from paddlenlp_ext.peft.linear_method_config import LinearTargetsConfig, dropout_option, rank_option
from paddlenlp_ext.peft.recomputed_delta import product_with_update
from paddlenlp_ext.peft.registry import FORMER_PEFT_TYPES, PEFT_METHODS
from paddlenlp_ext.peft.target_modules import shortest_targets, targets_from_peft
from paddlenlp_ext.sharding_spec import ShardGroup, Style

VARIANTS = ("balance", "mini", "bat")
FORMER_PEFT_TYPES["BONE"] = "MISS"


@PEFT_METHODS.register("miss")
@dataclass(kw_only=True)
class MiSSConfig(LinearTargetsConfig):
    """Options of MiSS.

    >>> MiSSConfig(r=16, init_weights="bat").mini_r
    1
    """

    peft_type: ClassVar[str] = "MISS"
    targets_key: ClassVar[str] = "miss_target_modules"
    free_on_resume: ClassVar[frozenset[str]] = PeftConfig.free_on_resume | {"miss_dropout"}

    r: int = rank_option(
        32, "miss_rank", "number of input features per shard; with miss_variant balance, also the rank of the update"
    )
    init_weights: str = option(
        "balance",
        help="variant: balance, mini (trains only miss_mini_rank columns), or bat (the update also depends on the "
        "weight)",
        choices=VARIANTS,
        arguments=("variant",),
        key="miss_variant",
    )
    mini_r: int = option(
        1,
        help="number of trained columns in the variant mini; must divide out_features",
        minimum=1,
        arguments=("mini_rank",),
        key="miss_mini_rank",
    )
    miss_dropout: float = dropout_option("miss_dropout")

    def __post_init__(self) -> None:
        if self.init_weights is True:  # Hugging Face PEFT's value for the variant balance
            self.init_weights = "balance"
        super().__post_init__()
        if self.init_weights == "bat" and self.miss_dropout:
            raise ValueError(f"miss_dropout={self.miss_dropout} has no effect with miss_variant bat; leave it out")

    def wrap(self, name: str, base: nn.Layer, seed: int) -> LinearAdapter:
        layer = MiSSBatLinear if self.init_weights == "bat" else MiSSLinear
        return layer(base, self, name)

    def warm_start(self, stored: PeftConfig) -> PeftConfig:
        assert isinstance(stored, MiSSConfig)
        dropout = 0.0 if stored.init_weights == "bat" else self.miss_dropout
        return stored.replace(path=self.path, miss_dropout=dropout)

    def from_stored(self, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Rename tensors that have the method's former name, Bone, as in older versions of Hugging Face PEFT."""
        return {re.sub(r"\.bone_block$", ".miss_block", name): value for name, value in tensors.items()}

    # -- files --------------------------------------------------------------------------------------------------------
    def to_adapter_config(self, model: TrainableModel) -> dict[str, Any]:
        return {
            "r": self.r,
            "mini_r": self.mini_r,
            "miss_dropout": self.miss_dropout,
            "init_weights": True if self.init_weights == "balance" else self.init_weights,
            "target_modules": shortest_targets([name for name, _ in adapter_layers(model)], model),
            "bias": "none",
            "modules_to_save": None,
        }

    @classmethod
    def from_adapter_config(cls, fields: Mapping[str, Any]) -> MiSSConfig:
        read = {"r", "mini_r", "miss_dropout", "init_weights", "target_modules", "layers_to_transform"}
        refuse_unread_fields(fields, {*read, "layers_pattern"})
        variant = fields.get("init_weights", True)
        return cls(
            r=fields.get("r", 64),
            init_weights="balance" if variant in (True, False) else variant,  # False in PEFT: random start
            mini_r=fields.get("mini_r", 1),
            miss_dropout=0.0 if variant == "bat" else fields.get("miss_dropout", 0.0),
            target_modules=targets_from_peft(fields),
        )


MissConfig = MiSSConfig  # the spelling of Hugging Face PEFT


class _MiSSLayer(LinearAdapter):
    def __init__(self, base: nn.Layer, config: MiSSConfig, name: str) -> None:
        super().__init__(base)
        self.rank, self.dropout = config.r, config.miss_dropout
        if self.rank > self.in_features:
            raise ValueError(
                f"miss_rank={self.rank} exceeds the {self.in_features} inputs of {name}; lower miss_rank, or leave "
                "this layer out of miss_target_modules"
            )


class MiSSLinear(_MiSSLayer):
    """Linear layer that adds the product of D and the sum of the input's shards (balance and mini).

    Args:
        config: options of the method.
        name: name of the layer, for error messages.

    Raises:
        ValueError: the rank exceeds `in_features`, or `mini_r` does not divide `out_features`.
    """

    def __init__(self, base: nn.Layer, config: MiSSConfig, name: str) -> None:
        super().__init__(base, config, name)
        self.columns = config.mini_r if config.init_weights == "mini" else None
        if self.columns is not None and self.out_features % self.columns:
            raise ValueError(
                f"miss_mini_rank={self.columns} does not divide the {self.out_features} outputs of {name}; choose a "
                "divisor, or leave this layer out of miss_target_modules"
            )
        shape = (self.rank, self.out_features if self.columns is None else self.columns)
        self.miss_block = self.new_parameter(np.zeros(shape, np.float32))

    def adapter_forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """Map x [..., in] to [..., out]; add the shards of the input before the product with D."""
        shards = fold_features(self.apply_dropout(x), self.rank, first_features(self)[1])
        return self.base(x) + paddle.matmul(shards, self._matrix())

    def low_rank_factors(self) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Return the 0-1 matrix [r, in] that sums the shards of the input, and D^T [out, r]."""
        row_of_input = (np.arange(self.in_features) + first_features(self)[1]) % self.rank
        sums = (row_of_input == np.arange(self.rank)[:, None]).astype(np.float32)
        return paddle.to_tensor(sums), self._matrix().astype("float32").T

    def sharding_axes(self, style: Style) -> dict[str, int | None]:
        return {"miss_block": 1 if style == "colwise" and self.columns is None else None}

    def set_tensor_parallel_shard(self, style: Style, group: ShardGroup) -> None:
        super().set_tensor_parallel_shard(style, group)
        if self.columns is not None:
            remedy = f"set miss_mini_rank to a divisor of {self.out_features}"
            require_whole_blocks(self, "outputs", self.columns, "miss_mini_rank", remedy)

    def _matrix(self) -> paddle.Tensor:
        """Return D [r, out]."""
        if self.columns is None:
            return self.miss_block
        return paddle.tile(self.miss_block, [1, self.out_features // self.columns])


class MiSSBatLinear(_MiSSLayer):
    """Linear layer whose blocks W_ij [r, r] become W_ij + W_ij B_i + B_i (bat).

    Args:
        config: options of the method.
        name: name of the layer, for error messages.

    Raises:
        ValueError: the rank does not divide both `in_features` and `out_features`.
    """

    def __init__(self, base: nn.Layer, config: MiSSConfig, name: str) -> None:
        super().__init__(base, config, name)
        if self.in_features % self.rank or self.out_features % self.rank:
            raise ValueError(
                f"miss_variant bat: miss_rank={self.rank} must divide both the {self.in_features} inputs and the "
                f"{self.out_features} outputs of {name}; choose a divisor of both, or leave this layer out of "
                "miss_target_modules"
            )
        shape = (self.out_features // self.rank, self.rank, self.rank)
        self.miss_block = self.new_parameter(np.zeros(shape, np.float32))

    def adapter_forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.base(x) + product_with_update(x, self._update, self.miss_block)

    def delta_weight(self) -> paddle.Tensor:
        """Return W_ij B_i + B_i for all blocks, float32 [out, in]."""
        return self._update(self.miss_block)

    def sharding_axes(self, style: Style) -> dict[str, int | None]:
        return {"miss_block": 0 if style == "colwise" else None}

    def set_tensor_parallel_shard(self, style: Style, group: ShardGroup) -> None:
        super().set_tensor_parallel_shard(style, group)
        for kind, features in (("inputs", self.in_features), ("outputs", self.out_features)):
            require_whole_blocks(self, kind, self.rank, "miss_rank", f"set miss_rank to a divisor of {features}")

    def _update(self, blocks: paddle.Tensor) -> paddle.Tensor:
        blocks = blocks.astype("float32")
        rows, rank = blocks.shape[0], self.rank
        products = paddle.bmm(self.base.weight_value().reshape([rows, -1, rank]), blocks)
        update = products.reshape([rows, rank, -1, rank]) + blocks.unsqueeze(2)
        return update.reshape([self.out_features, self.in_features])


def fold_features(x: paddle.Tensor, width: int, first: int = 0) -> paddle.Tensor:
    """Return [..., width], where feature i is the sum of the features of x [..., in] with index i modulo `width`.

    The indices of the features of x start at `first`.
    """
    rows = x.reshape([-1, x.shape[-1]])
    left = first % width
    right = -(left + x.shape[-1]) % width
    if left or right:
        rows = F.pad(rows, [0, 0, left, right])
    return rows.reshape([rows.shape[0], -1, width]).sum(axis=1).reshape([*x.shape[:-1], width])
