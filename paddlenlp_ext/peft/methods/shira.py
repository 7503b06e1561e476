"""SHiRA: Sparse High Rank Adapters, a trained update of a few elements of each weight (Bhardwaj et al. 2024).

    y = x W^T + b + x S^T        S [out, in] has r (in + out) trained elements, 0 at the start

arXiv:2406.13175. All other elements of S are zero. A layer has as many trained values as a LoRA of rank r, but the rank
of S is not limited to r. The positions of the trained elements are random, and are stored with the values. Hugging Face
PEFT draws different positions for the same seed, but loads the stored positions.

Shapes: r rank of a LoRA of the same size; in/out features of the adapted linear; k = r (in + out) trained values.
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
from paddlenlp_ext.nn.training_hooks import TrainingHooks
from paddlenlp_ext.peft.adapter import Adapter
from paddlenlp_ext.peft.config import PeftConfig, refuse_unread_fields
from paddlenlp_ext.peft.layers import LinearAdapter, adapter_layers, adapter_layers_of, first_features, generator_for
from paddlenlp_ext.peft.linear_method_config import LinearTargetsConfig, rank_option
from paddlenlp_ext.peft.recomputed_delta import product_with_update
from paddlenlp_ext.peft.registry import PEFT_METHODS
from paddlenlp_ext.peft.target_modules import shortest_targets, targets_from_peft
from paddlenlp_ext.sharding_spec import Style


class SHiRAAdapter(Adapter):
    """Adapter that checks whether stored positions are inside the weights of the layers."""

    def load_tensors(self, tensors: Mapping[str, np.ndarray], where: str) -> None:
        for name, layer in adapter_layers_of(self.base_model, SHiRALinear):
            positions = tensors.get(f"{name}.shira_indices")
            if positions is None or positions.ndim != 2 or len(positions) != 2:
                continue  # `super().load_tensors` reports the missing tensor or wrong shape
            if (positions < 0).any() or (positions >= np.array(layer.full_size)[:, None]).any():
                raise ValueError(
                    f"{where}: {name}.shira_indices has positions outside the weight {list(layer.full_size)}; the "
                    "file is damaged or belongs to another model; use another file"
                )
        super().load_tensors(tensors, where)


@PEFT_METHODS.register("shira")
@dataclass(kw_only=True)
class SHiRAConfig(LinearTargetsConfig):
    """Options of SHiRA.

    >>> SHiRAConfig(r=16, random_seed=1).r
    16
    """

    peft_type: ClassVar[str] = "SHIRA"
    targets_key: ClassVar[str] = "shira_target_modules"
    adapter_class: ClassVar[type[TrainingHooks] | None] = SHiRAAdapter
    free_on_resume: ClassVar[frozenset[str]] = PeftConfig.free_on_resume | {"random_seed"}

    r: int = rank_option(8, "shira_rank", "rank of a LoRA with the same number of trained parameters")
    random_seed: int | None = option(None, help="seed for the choice of elements; unset: the run's seed", minimum=0)

    def wrap(self, name: str, base: nn.Layer, seed: int) -> LinearAdapter:
        return SHiRALinear(base, self.r, seed if self.random_seed is None else self.random_seed, name)

    def from_stored(self, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Convert the positions to integers: Hugging Face PEFT stores them as float32 on Windows."""
        return {
            name: value.astype(np.int32) if name.endswith(".shira_indices") else value
            for name, value in tensors.items()
        }

    # -- files --------------------------------------------------------------------------------------------------------
    def to_adapter_config(self, model: TrainableModel) -> dict[str, Any]:
        return {
            "r": self.r,
            "random_seed": self.random_seed,
            "mask_type": "random",
            "target_modules": shortest_targets([name for name, _ in adapter_layers(model)], model),
            "fan_in_fan_out": False,
            "init_weights": True,
            "modules_to_save": None,
        }

    @classmethod
    def from_adapter_config(cls, fields: Mapping[str, Any]) -> SHiRAConfig:
        read = {"r", "random_seed", "target_modules"}
        refuse_unread_fields(fields, read | {"mask_type", "init_weights"})  # these affect only initialization
        return cls(
            r=fields.get("r", 32), random_seed=fields.get("random_seed"), target_modules=targets_from_peft(fields)
        )


ShiraConfig = SHiRAConfig  # the spelling of Hugging Face PEFT


class SHiRALinear(LinearAdapter):
    """Linear layer with a sparse update.

    Args:
        rank: r, which determines the number of trained values.
        seed: random seed of the positions.
        name: name of the layer; the positions also depend on the name.

    Raises:
        ValueError: the rank selects more values than the weight has elements.
    """

    shira_indices: paddle.Tensor

    def __init__(self, base: nn.Layer, rank: int, seed: int, name: str) -> None:
        super().__init__(base)
        self.full_size = (self.out_features, self.in_features)
        count, size = rank * sum(self.full_size), self.out_features * self.in_features
        if count > size:
            largest = size // sum(self.full_size)  # 0 for a layer with a single input or output
            raise ValueError(
                f"shira_rank={rank} selects {count} elements of {name}, whose weight has only {size} elements; "
                + (f"lower shira_rank to at most {largest}, or " if largest else "")
                + "leave this layer out of shira_target_modules"
            )
        flat = np.sort(generator_for(seed, f"{name}.shira_indices").choice(size, count, replace=False, shuffle=False))
        positions = np.stack(np.unravel_index(flat, self.full_size)).astype(np.int32)
        self.register_buffer("shira_indices", paddle.to_tensor(positions))
        self.shira_weight = self.new_parameter(np.zeros(count, np.float32))

    def adapter_forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """Map x [..., in] to [..., out]; S is stored as a dense matrix, because Paddle's sparse products are slow."""
        return self.base(x) + product_with_update(x, self._update, self.shira_weight)

    def delta_weight(self) -> paddle.Tensor:
        """Return S, float32 [out, in]."""
        return self._update(self.shira_weight)

    def sharding_axes(self, style: Style) -> dict[str, int | None]:
        return {"shira_weight": None, "shira_indices": None}

    def _update(self, values: paddle.Tensor) -> paddle.Tensor:
        size = self.out_features * self.in_features
        indices = self.shira_indices.astype("int64")
        first_output, first_input = first_features(self)
        rows, columns = indices[0] - first_output, indices[1] - first_input
        inside = (rows >= 0) & (rows < self.out_features) & (columns >= 0) & (columns < self.in_features)
        # Values of other shards are written to an extra element, so that shapes do not depend on the positions.
        flat = paddle.where(inside, rows * self.in_features + columns, paddle.full_like(rows, size))
        elements = paddle.scatter(paddle.zeros([size + 1]), flat, values.astype("float32"))
        return elements[:size].reshape([self.out_features, self.in_features])
