"""OFT: Orthogonal Finetuning, a trained block-diagonal rotation of a linear layer's input (Qiu et al. 2023).

    y = (x R) W^T + b        R = (I - Q)(I + Q)^-1, Q = -Q^T        Q = 0 at the start
    merged: W R^T

arXiv:2306.07280. Q is skew-symmetric, so its Cayley transform R is orthogonal, and W R^T has the same row norms and
angles between rows as W. With `num_cayley_neumann_terms`, R is a polynomial in Q; Hugging Face PEFT uses the polynomial
by default. The polynomial needs no inverse, but is nearly orthogonal only for small Q. As in PEFT, the polynomial
rotates in the direction opposite to the Cayley transform.

Shapes: k blocks of b features each; in/out features of the adapted linear, in = k * b. The parameter stores the
b (b - 1) / 2 values above the diagonal of each block of Q.
"""

from __future__ import annotations

import re
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
from paddlenlp_ext.peft.layers import Factor, LinearAdapter, adapter_layers, as_linear, require_whole_blocks
from paddlenlp_ext.peft.linear_method_config import LinearTargetsConfig
from paddlenlp_ext.peft.registry import PEFT_METHODS
from paddlenlp_ext.peft.target_modules import shortest_targets, targets_from_peft
from paddlenlp_ext.sharding_spec import ShardGroup, Style
from paddlenlp_ext.utils.logging import get_logger

logger = get_logger("paddlenlp_ext.peft")

BLOCK_SIZE = 32


@PEFT_METHODS.register("oft")
@dataclass(kw_only=True)
class OFTConfig(LinearTargetsConfig):
    """Options of OFT.

    >>> OFTConfig(oft_block_size=16).r is None
    True

    Raises:
        ValueError: an option is out of range, or both a block size and a number of blocks are set.
    """

    peft_type: ClassVar[str] = "OFT"
    targets_key: ClassVar[str] = "oft_target_modules"

    oft_block_size: int | None = option(
        None,
        help="number of features per rotation block, rounded to a divisor of in_features; unset: 32, unless "
        "oft_num_blocks is set",
        minimum=2,
        key="oft_block_size",
        arguments=("block_size",),
    )
    r: int | None = option(
        None,
        help="number of blocks per layer, in place of oft_block_size",
        minimum=1,
        aliases=("oft_r",),
        arguments=("num_blocks",),
        key="oft_num_blocks",
    )
    block_share: bool = option(False, help="share one rotation between all blocks of a layer")
    num_cayley_neumann_terms: int = option(
        0,
        help="0: exact inverse (orthogonal); 2 or more: number of terms of a Neumann series that replaces the inverse",
        minimum=0,
        arguments=("neumann_terms",),
        key="oft_neumann_terms",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.oft_block_size = chosen_block_size("oft", self.oft_block_size, self.r, BLOCK_SIZE)
        if self.num_cayley_neumann_terms == 1:
            raise ValueError("oft_neumann_terms=1 is out of range; allowed: 0 (exact inverse), or at least 2")

    def targets(self, model: TrainableModel) -> list[str]:
        names = super().targets(model)
        sizes = sorted({as_linear(layer_at(model, name)).in_features for name in names})
        if self.oft_block_size is not None and any(size % self.oft_block_size for size in sizes):
            used = ", ".join(f"{self.block_size_of(size)} for {size} inputs" for size in sizes)
            logger.info(
                "oft_block_size %d does not divide the number of input features of some layers; block sizes used: %s",
                self.oft_block_size,
                used,
            )
        return names

    def block_size_of(self, in_features: int) -> int:
        """Return the block size of a layer.

        The configured block size or number of blocks is rounded to the nearest divisor of `in_features`; on a tie, to
        the smaller divisor.

        Raises:
            ValueError: the block size would be 1, and a single feature cannot be rotated.
        """
        requested = self.r if self.oft_block_size is None else self.oft_block_size
        assert requested is not None
        divisors = [divisor for divisor in range(1, in_features + 1) if in_features % divisor == 0]
        nearest = min(divisors, key=lambda divisor: (abs(divisor - requested), divisor))
        size = in_features // nearest if self.oft_block_size is None else nearest
        if size == 1:
            key = "oft_num_blocks" if self.oft_block_size is None else "oft_block_size"
            raise ValueError(
                f"{key}={requested} gives blocks of a single feature (in_features={in_features}), which cannot be "
                "rotated; choose a larger block size or fewer blocks"
            )
        return size

    def wrap(self, name: str, base: nn.Layer, seed: int) -> OFTLinear:
        return OFTLinear(
            base, self.block_size_of(as_linear(base).in_features), self.block_share, self.num_cayley_neumann_terms
        )

    def to_adapter_config(self, model: TrainableModel) -> dict[str, Any]:
        return {
            "r": self.r or 0,
            "oft_block_size": self.oft_block_size or 0,
            "block_share": self.block_share,
            "use_cayley_neumann": self.num_cayley_neumann_terms > 0,
            "num_cayley_neumann_terms": self.num_cayley_neumann_terms or 5,
            "target_modules": shortest_targets([name for name, _ in adapter_layers(model)], model),
            "bias": "none",
            "coft": False,
            "fan_in_fan_out": False,
            "init_weights": True,
            "module_dropout": 0.0,
            "modules_to_save": None,
            "peft_version": "0.18.0",  # the first version with the series of `cayley_series`
        }

    @classmethod
    def from_adapter_config(cls, fields: Mapping[str, Any]) -> OFTConfig:
        read = {"r", "oft_block_size", "block_share", "use_cayley_neumann", "num_cayley_neumann_terms"}
        read |= {"target_modules", "layers_to_transform", "layers_pattern"}
        # These fields affect only initialization, training, and `coft`; files that enable `coft` are rejected.
        read |= {"init_weights", "module_dropout", "eps"}
        refuse_unread_fields(fields, read)
        version = [int(part) for part in re.findall(r"\d+", str(fields.get("peft_version") or "0.0"))[:2]]
        if fields.get("use_cayley_neumann", True) and version < [0, 18]:
            raise ValueError(
                f"peft_version={fields.get('peft_version')!r} with use_cayley_neumann: PEFT before 0.18 used a "
                "different series, which is not supported; train the adapter again with PEFT 0.18 or later"
            )
        terms = fields.get("num_cayley_neumann_terms", 5) if fields.get("use_cayley_neumann", True) else 0
        return cls(
            r=fields.get("r") or None,
            oft_block_size=fields.get("oft_block_size", BLOCK_SIZE) or None,
            block_share=fields.get("block_share", False),
            num_cayley_neumann_terms=terms,
            target_modules=targets_from_peft(fields),
        )


class OFTLinear(LinearAdapter):
    """Linear layer with a block-diagonal rotation of its input.

    Args:
        block_size: b, a divisor of `in_features`.
        block_share: use one block's parameters for all blocks.
        neumann_terms: number of terms of `cayley_series`; 0: exact Cayley transform.
    """

    positions: paddle.Tensor
    signs: paddle.Tensor

    def __init__(self, base: nn.Layer, block_size: int, block_share: bool, neumann_terms: int) -> None:
        super().__init__(base)
        self.block_size, self.neumann_terms = block_size, neumann_terms
        num_blocks = 1 if block_share else self.in_features // block_size
        upper = np.triu_indices(block_size, 1)
        self.oft_R = Factor(np.zeros((num_blocks, len(upper[0])), np.float32), self.dtype)
        positions, signs = np.zeros((2, block_size, block_size), np.int64)
        positions[upper] = np.arange(len(upper[0]))
        signs[upper] = 1
        self.register_buffer("positions", paddle.to_tensor((positions + positions.T).flatten()), persistable=False)
        self.register_buffer("signs", paddle.to_tensor((signs - signs.T).astype(np.float32)), persistable=False)

    def adapter_forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """Map x [..., in] to [..., out]; the rotation costs b multiplications per feature."""
        return self.base(rotate_blocks(x, self.rotation().astype(x.dtype)))

    def rotation(self) -> paddle.Tensor:
        """Return the blocks of R, float32 [k, b, b], or [1, b, b] with `block_share`."""
        with paddle.amp.auto_cast(enable=False):
            upper = self.oft_R.weight.astype("float32")
            blocks = paddle.gather(upper, self.positions, axis=1).reshape([-1, self.block_size, self.block_size])
            skew = blocks * self.signs
            if self.neumann_terms:
                return cayley_series(skew, self.neumann_terms)
            return cayley(skew)

    def delta_weight(self) -> paddle.Tensor:
        """Return W R^T - W, float32 [out, in]."""
        weight = self.base.weight_value()
        return rotate_blocks(weight, self.rotation().transpose([0, 2, 1])) - weight

    def sharding_axes(self, style: Style) -> dict[str, int | None]:
        assert style in ("colwise", "rowwise", "replicated"), f"a linear layer cannot be sharded {style}"
        return {"oft_R.weight": 0 if style == "rowwise" and self.oft_R.weight.shape[0] > 1 else None}

    def set_tensor_parallel_shard(self, style: Style, group: ShardGroup) -> None:
        super().set_tensor_parallel_shard(style, group)
        remedy = f"set oft_block_size to a divisor of {self.in_features}"
        require_whole_blocks(self, "inputs", self.block_size, "OFT's block size", remedy)


def rotate_blocks(x: paddle.Tensor, blocks: paddle.Tensor) -> paddle.Tensor:
    """Multiply x [..., in] by the block-diagonal matrix of `blocks` [k, b, b]; one block [1, b, b] is repeated."""
    num_blocks, size, _ = blocks.shape
    if num_blocks == 1:
        return paddle.matmul(x.reshape([-1, size]), blocks[0]).reshape(x.shape)
    parts = x.reshape([-1, num_blocks, size]).transpose([1, 0, 2])
    return paddle.bmm(parts, blocks).transpose([1, 0, 2]).reshape(x.shape)


def cayley(skew: paddle.Tensor) -> paddle.Tensor:
    """Return the Cayley transform (I + Q)^-1 (I - Q) of a skew-symmetric Q [..., b, b]."""
    eye = paddle.eye(skew.shape[-1])
    return paddle.linalg.solve(eye + skew, eye - skew)


def chosen_block_size(method: str, block_size: int | None, num_blocks: int | None, default: int) -> int | None:
    """Return `block_size`, or `default` if neither the block size nor the number of blocks is set.

    Raises:
        ValueError: the block size and the number of blocks are both set.
    """
    if block_size is not None and num_blocks is not None:
        raise ValueError(
            f"{method}_block_size={block_size} and {method}_num_blocks={num_blocks} are mutually exclusive, because "
            "their product is the number of inputs of a layer; leave one of them out"
        )
    return default if block_size is None and num_blocks is None else block_size


def cayley_series(skew: paddle.Tensor, terms: int) -> paddle.Tensor:
    """Return I + 2 Q + 2 Q^2 + ... + Q^p, an approximation of (I + Q)(I - Q)^-1.

    p is `terms` - 1, except where Hugging Face PEFT differs (oft/layer.py): 2 terms give I + 2 Q, and 3 terms are
    treated as 4.

    Args:
        skew: Q [k, b, b], skew-symmetric.
        terms: number of terms, at least 2.
    """
    total = paddle.eye(skew.shape[-1]) + 2 * skew
    if terms == 2:
        return total
    power = skew
    highest = max(terms, 4) - 1
    for exponent in range(2, highest + 1):
        power = paddle.bmm(power, skew)
        total = total + (power if exponent == highest else 2 * power)
    return total
