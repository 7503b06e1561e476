"""BOFT: Orthogonal Butterfly, OFT with a product of sparse rotations and a scale for each output (Liu et al. 2023).

    y = s * (x R W^T) + b        R = M_(m-1) ... M_1 M_0        M_i = P_i D_i P_i^T
    merged: diag(s) W R^T        D_i = I and s = 1 at the start

arXiv:2311.06243. The blocks of the block-diagonal D_i are Cayley transforms (I - Q)(I + Q)^-1, Q = (A - A^T) / 2, where
A [b, b] is trained. In each group of 2^i blocks, the butterfly permutation P_i interleaves the half blocks of the first
half with the half blocks of the second half. P_0 is the identity. m factors therefore mix the features of 2^(m-1)
blocks. With one factor, R is the rotation of OFT.

Shapes: m factors; k blocks of b features each; in/out features of the adapted linear, in = k * b.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import paddle
from paddle import nn

from paddlenlp_ext.config.dataclass_options import option
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.peft.config import PeftConfig, refuse_unread_fields
from paddlenlp_ext.peft.layers import LinearAdapter, adapter_layers, as_linear, require_whole_blocks
from paddlenlp_ext.peft.linear_method_config import LinearTargetsConfig
from paddlenlp_ext.peft.methods.oft import cayley, chosen_block_size, rotate_blocks
from paddlenlp_ext.peft.registry import PEFT_METHODS
from paddlenlp_ext.peft.target_modules import shortest_targets, targets_from_peft
from paddlenlp_ext.sharding_spec import ShardGroup, Style

BLOCK_SIZE = 4


@PEFT_METHODS.register("boft")
@dataclass(kw_only=True)
class BOFTConfig(LinearTargetsConfig):
    """Options of BOFT.

    >>> BOFTConfig(boft_block_size=8, boft_n_butterfly_factor=2).boft_block_size
    8

    Raises:
        ValueError: an option is out of range, or both a block size and a number of blocks are set.
    """

    peft_type: ClassVar[str] = "BOFT"
    targets_key: ClassVar[str] = "boft_target_modules"
    free_on_resume: ClassVar[frozenset[str]] = PeftConfig.free_on_resume | {"boft_dropout"}

    boft_block_size: int | None = option(
        None,
        help="number of features per rotation block, a divisor of in_features; unset or 0: 4, unless boft_num_blocks "
        "is set",
        minimum=0,
        key="boft_block_size",
        arguments=("block_size",),
    )
    boft_block_num: int | None = option(
        None,
        help="number of blocks per layer, in place of boft_block_size",
        minimum=0,
        aliases=("boft_block_num",),
        key="boft_num_blocks",
        arguments=("num_blocks",),
    )
    boft_n_butterfly_factor: int = option(
        1,
        help="number of factors of the rotation; 1: the rotation of OFT",
        minimum=1,
        aliases=("boft_n_butterfly_factor",),
        key="boft_butterfly_factors",
        arguments=("butterfly_factors",),
    )
    boft_dropout: float = option(
        0.0,
        help="each training step replaces this fraction of the blocks of one random factor with the identity",
        minimum=0,
        below=1,
        key="boft_dropout",
        arguments=("dropout",),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.boft_block_num = self.boft_block_num or None  # PEFT writes 0 if unset
        self.boft_block_size = chosen_block_size("boft", self.boft_block_size or None, self.boft_block_num, BLOCK_SIZE)

    def block_size_of(self, name: str, in_features: int) -> int:
        """Return the block size of the layer `name`.

        Raises:
            ValueError: the block size is 1 or does not fit the number of butterfly factors, or the block size or the
                number of blocks does not divide `in_features`.
        """
        key = "boft_num_blocks" if self.boft_block_size is None else "boft_block_size"
        requested = self.boft_block_num if self.boft_block_size is None else self.boft_block_size
        assert requested is not None
        remedy = "choose another divisor, or leave this layer out of boft_target_modules"
        if in_features % requested:
            raise ValueError(f"{key}={requested} does not divide the {in_features} inputs of {name}; {remedy}")
        size = in_features // requested if self.boft_block_size is None else requested
        if size == 1:
            raise ValueError(
                f"{key}={requested} gives blocks of a single feature in {name} (in_features={in_features}), which "
                f"cannot be rotated; {remedy}"
            )
        span = size * 2 ** (self.boft_n_butterfly_factor - 1)
        if self.boft_n_butterfly_factor > 1 and (size % 2 or in_features % span):
            raise ValueError(
                f"boft_butterfly_factors={self.boft_n_butterfly_factor} requires an even block size b, and "
                f"in_features={in_features} of {name} must be a multiple of "
                f"{2 ** (self.boft_n_butterfly_factor - 1)} * b, but b is {size}; lower boft_butterfly_factors, "
                f"{remedy}"
            )
        return size

    def wrap(self, name: str, base: nn.Layer, seed: int) -> LinearAdapter:
        block_size = self.block_size_of(name, as_linear(base).in_features)
        return BOFTLinear(base, block_size, self.boft_n_butterfly_factor, self.boft_dropout)

    def decays(self, parameter_name: str) -> bool:
        """Return False for the scales, whose neutral value is 1: weight decay would pull them toward 0."""
        return not parameter_name.endswith("boft_s")

    # -- files --------------------------------------------------------------------------------------------------------
    def to_adapter_config(self, model: TrainableModel) -> dict[str, Any]:
        return {
            "boft_block_size": self.boft_block_size or 0,
            "boft_block_num": self.boft_block_num or 0,
            "boft_n_butterfly_factor": self.boft_n_butterfly_factor,
            "boft_dropout": self.boft_dropout,
            "target_modules": shortest_targets([name for name, _ in adapter_layers(model)], model),
            "bias": "none",
            "fan_in_fan_out": False,
            "init_weights": True,
            "modules_to_save": None,
        }

    @classmethod
    def from_adapter_config(cls, fields: Mapping[str, Any]) -> BOFTConfig:
        read = {"boft_block_size", "boft_block_num", "boft_n_butterfly_factor", "boft_dropout", "target_modules"}
        refuse_unread_fields(fields, read | {"layers_to_transform", "layers_pattern", "init_weights"})
        return cls(
            boft_block_size=fields.get("boft_block_size", BLOCK_SIZE) or None,
            boft_block_num=fields.get("boft_block_num") or None,
            boft_n_butterfly_factor=fields.get("boft_n_butterfly_factor", 1),
            boft_dropout=fields.get("boft_dropout", 0.0),
            target_modules=targets_from_peft(fields),
        )


class BOFTLinear(LinearAdapter):
    """Linear layer with rotated inputs and scaled outputs.

    Args:
        block_size: b, a divisor of `in_features`.
        factors: m; for m > 1, b is even and b * 2^(m-1) divides `in_features`.
        block_dropout: each training step replaces this fraction of the blocks of one random factor with the identity.
    """

    def __init__(self, base: nn.Layer, block_size: int, factors: int, block_dropout: float) -> None:
        super().__init__(base)
        self.block_size, self.factors, self.block_dropout = block_size, factors, block_dropout
        shape = (factors, self.in_features // block_size, block_size, block_size)
        self.boft_R = self.new_parameter(np.zeros(shape, np.float32))
        self.boft_s = self.new_parameter(np.ones((self.out_features, 1), np.float32))

    def adapter_forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """Map x [..., in] to [..., out]; the rotation costs m * b multiplications per feature."""
        blocks = self._drop_blocks(self.rotations()).astype(x.dtype)
        for factor in reversed(range(self.factors)):
            x = self._rotate(x, blocks[factor], factor)
        out = self.base.forward_without_bias(x)
        out = out * self.boft_s.flatten().astype(out.dtype)
        bias = getattr(self.base, "bias", None)
        return out if bias is None else out + bias.astype(out.dtype)

    def rotations(self) -> paddle.Tensor:
        """Return the blocks of all D_i, float32 [m, k, b, b]."""
        with paddle.amp.auto_cast(enable=False):
            values = self.boft_R.astype("float32")
            return cayley(0.5 * (values - values.transpose([0, 1, 3, 2])))

    def delta_weight(self) -> paddle.Tensor:
        """Return diag(s) W R^T - W, float32 [out, in]."""
        weight = self.base.weight_value()
        rotated, blocks = weight, self.rotations().transpose([0, 1, 3, 2])
        for factor in range(self.factors):
            rotated = self._rotate(rotated, blocks[factor], factor)
        return rotated * self.boft_s.astype("float32") - weight

    def sharding_axes(self, style: Style) -> dict[str, int | None]:
        assert style in ("colwise", "rowwise", "replicated"), f"a linear layer cannot be sharded {style}"
        return {"boft_R": 1 if style == "rowwise" else None, "boft_s": 0 if style == "colwise" else None}

    def set_tensor_parallel_shard(self, style: Style, group: ShardGroup) -> None:
        super().set_tensor_parallel_shard(style, group)
        span = self.block_size * 2 ** (self.factors - 1)
        remedy = "lower boft_block_size or boft_butterfly_factors"
        require_whole_blocks(self, "inputs", span, "the number of inputs that BOFT's factors mix,", remedy)

    def _rotate(self, x: paddle.Tensor, blocks: paddle.Tensor, factor: int) -> paddle.Tensor:
        """Return x M_i [..., in] for the blocks [k, b, b] of D_i."""
        mixed, half = 2**factor, self.block_size // 2
        if mixed == 1:
            return rotate_blocks(x, blocks)
        return _transpose_groups(rotate_blocks(_transpose_groups(x, 2, mixed, half), blocks), mixed, 2, half)

    def _drop_blocks(self, blocks: paddle.Tensor) -> paddle.Tensor:
        """Replace a fraction of the blocks of one random factor with the identity, as in Hugging Face PEFT.

        If the blocks are sharded, every rank draws the mask of all blocks and uses its slice.
        """
        if not self.block_dropout or not self.training:
            return blocks
        own = blocks.shape[1]
        group = self.shard_group if self.style == "rowwise" else None
        index, size = (0, 1) if group is None else (group.index, group.size)
        of_factor = paddle.arange(self.factors) == paddle.randint(0, self.factors, [1])
        of_block = paddle.randperm(own * size) < int(self.block_dropout * own * size)
        dropped = paddle.logical_and(of_factor.unsqueeze(1), of_block[index * own : (index + 1) * own].unsqueeze(0))
        return paddle.where(dropped.unsqueeze(-1).unsqueeze(-1), paddle.eye(self.block_size), blocks)


def _transpose_groups(x: paddle.Tensor, rows: int, columns: int, width: int) -> paddle.Tensor:
    """Split x [..., in] into groups of `width` adjacent features, and transpose each [rows, columns] grid of groups."""
    parts = x.reshape([-1, rows, columns, width]).transpose([0, 2, 1, 3])
    return parts.reshape(x.shape)
