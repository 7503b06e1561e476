"""AdaLoRA: Adaptive Budget Allocation for Parameter-Efficient Fine-Tuning (Zhang et al. 2023, arXiv:2303.10512).

    y = x W^T + s ((dropout(x) Q^T) Λ) P^T        delta W = s P Λ Q        s = alpha / r0
    Q = lora_A [r0, in] and P = lora_B [out, r0] ~ N(0, 0.02^2), Λ = diag(lora_E), lora_E [r0, 1] = 0

The update has the form of a singular value decomposition. The loss includes `orth_reg_weight` times the mean of
||P^T P - I|| and ||Q Q^T - I|| over all layers, so that P and Q stay nearly orthonormal. Every layer starts with rank
r0. During training, the least important singular values are set to zero until `target_r` per layer remain on average
(`method_internals/adalora_rank_allocator.py`). The final adapter has only the remaining triplets.

Shapes: r rank, in/out features of the adapted linear.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import paddle
from paddle import nn

from paddlenlp_ext.config.dataclass_options import option
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.nn.training_hooks import TrainingHooks
from paddlenlp_ext.peft.adapter import Adapter
from paddlenlp_ext.peft.config import PeftConfig, field_or, refuse_unread_fields
from paddlenlp_ext.peft.formats.adapter_config_schema import FLAGS_BY_LAYER
from paddlenlp_ext.peft.layers import (
    LinearAdapter,
    adapter_layers,
    adapter_layers_of,
    factor_axes,
    generator_for,
    take_ranks,
)
from paddlenlp_ext.peft.linear_method_config import LinearTargetsConfig, dropout_option
from paddlenlp_ext.peft.lora.low_rank_config import IGNORED_PEFT_FIELDS, TARGETS_OF_TENSORS, resolve_targets
from paddlenlp_ext.peft.method_internals.adalora_rank_allocator import (
    BudgetSchedule,
    ImportanceAverages,
    Triplets,
    select_ranks,
)
from paddlenlp_ext.peft.registry import PEFT_METHODS
from paddlenlp_ext.peft.target_modules import shortest_targets, targets_from_peft
from paddlenlp_ext.sharding_spec import Style, set_placement, shard_of
from paddlenlp_ext.utils.json_schema import check_values
from paddlenlp_ext.utils.logging import get_logger

logger = get_logger("paddlenlp_ext.peft")

_INIT_STD = 0.02  # standard deviation of the entries of P and Q
_EPSILON = 1e-5  # added to the rank in alpha / rank, as in PEFT
_MASK = "kept"


@dataclass(eq=False)
class AdaLoRAAdapter(Adapter):
    """Adapter that prunes singular values during training, and saves the importance averages in checkpoints."""

    peft_config: AdaLoRAConfig

    def __post_init__(self) -> None:
        self.importance = ImportanceAverages(self.peft_config.beta1, self.peft_config.beta2)
        self.masks: dict[str, np.ndarray] = {}
        """Layer -> bool [r], False for singular values that the last selection pruned; empty before any selection."""
        self._offer_allocation()

    def _offer_allocation(self) -> None:
        """Add `update_and_allocate(step)` to the base model, for training loops written for Hugging Face PEFT."""
        self.base_model.update_and_allocate = self.update_and_allocate

    def attach(self) -> None:
        super().attach()
        self._offer_allocation()

    def detach(self) -> None:
        super().detach()
        delattr(self.base_model, "update_and_allocate")

    def update_and_allocate(self, global_step: int) -> None:
        """Update the importance averages, and prune singular values at the steps of the schedule.

        Call this method after the optimizer step, before the gradients are cleared. The config's `total_step` is the
        number of steps of the run.

        Args:
            global_step: number of the optimizer step, counted from 1.

        Raises:
            ValueError: the config has no `total_step`, or the schedule leaves no step for pruning.
        """
        if self.peft_config.total_step is None:
            raise ValueError("update_and_allocate: the length of the run is unknown; pass total_step to AdaLoraConfig")
        self.after_step(global_step, self.peft_config.total_step, 0.0)

    def layers(self) -> dict[str, AdaLoRALinear]:
        """Return the adapted layers with a rank above 0, by name."""
        return {name: layer for name, layer in adapter_layers_of(self.base_model, AdaLoRALinear) if layer.rank}

    def local_layers(self) -> dict[str, AdaLoRALinear]:
        """Return the layers of this process's pipeline stage, by name."""
        return {name: layer for name, layer in self.layers().items() if layer.is_on_stage}

    def auxiliary_loss(self) -> paddle.Tensor | None:
        """Return this pipeline stage's share of the orthogonality loss; None if the share is 0."""
        layers = self.local_layers().values()
        errors = [error for layer in layers for error in layer.orthogonality_errors()]
        if not errors or self.peft_config.orth_reg_weight == 0:
            return None
        return paddle.stack(errors).sum() * (self.peft_config.orth_reg_weight / (2 * len(self.layers())))

    def plan_steps(self, total_steps: int) -> None:
        """Fill in unset steps of the schedule in this adapter's config, which is saved with the adapter."""
        self.peft_config = self.peft_config.for_run(total_steps)
        self._schedule(total_steps)

    def _schedule(self, total_steps: int) -> BudgetSchedule:
        num_values = sum(layer.rank for layer in self.layers().values())
        return self.peft_config.schedule(total_steps, num_values, sum(1 for _ in adapter_layers(self.base_model)))

    def after_step(self, step: int, total_steps: int, learning_rate: float) -> None:
        """Update the importance averages; prune at the scheduled steps, and at every step after the last one."""
        layers, schedule = self.local_layers(), self._schedule(total_steps)
        if (
            step < schedule.last_update_step or step == 1
        ):  # without `or step == 1`, a run of one step would have no averages
            self.importance.update({name: layer.triplets() for name, layer in layers.items()})
        if schedule.updates_ranks(step):
            scores, stage = self.importance.scores(layers), self.base_model.model.stage
            self.masks = select_ranks(scores if stage is None else stage.union(scores), schedule.budget(step))
        if schedule.updates_ranks(step) or step > schedule.last_update_step:
            for name, mask in self.masks.items():
                if name in layers:
                    layers[name].prune(mask)
        if step >= schedule.last_update_step:
            self.importance.averages.clear()

    def training_state(self) -> dict[str, paddle.Tensor]:
        """Return the importance averages, and the masks of the last selection of singular values."""
        masks = {f"{name}.{_MASK}": paddle.to_tensor(mask.astype(np.float32)) for name, mask in self.masks.items()}
        return {**self.importance.averages, **masks}

    def restore_training_state(self, tensors: Mapping[str, np.ndarray]) -> None:
        masks = {name: value for name, value in tensors.items() if name.endswith(f".{_MASK}")}
        self.masks = {name.removesuffix(f".{_MASK}"): value != 0 for name, value in masks.items()}
        self.importance.averages, layers = {}, self.local_layers()
        for name in sorted(tensors.keys() - masks.keys()):
            layer_name, leaf, _ = name.rsplit(".", 2)
            if layer_name not in layers:
                continue
            shard = shard_of(layers[layer_name].triplets()[leaf])
            average = paddle.to_tensor(tensors[name] if shard is None else tensors[name][shard.index])
            set_placement(average, shard=shard)
            self.importance.averages[name] = average

    def save_finished(self, folder: str | os.PathLike[str], tensors: Mapping[str, Any] | None = None) -> None:
        """Save the triplets with nonzero singular values, or all triplets if all values are zero.

        The file's `rank_pattern` records the saved triplets.
        """
        tensors = self.full_state(tensors)
        masks = {name: tensors[f"{name}.lora_E"].numpy().flatten() != 0 for name in self.layers()}
        if not any(mask.any() for mask in masks.values()):  # not trained yet
            masks = {name: np.ones_like(mask) for name, mask in masks.items()}
        remaining, total = sum(int(mask.sum()) for mask in masks.values()), sum(mask.size for mask in masks.values())
        logger.info("AdaLoRA: %d of %d ranks remain, in %d layers", remaining, total, sum(map(np.any, masks.values())))
        config = self.peft_config.with_ranks(masks)
        for name, mask in masks.items():
            indices = np.flatnonzero(mask)
            for leaf, axis in (("lora_A", 0), ("lora_E", 0), ("lora_B", 1)):
                tensors[f"{name}.{leaf}"] = take_ranks(tensors[f"{name}.{leaf}"], indices, axis)
        self.write_files(folder, config.peft_type, config.to_adapter_config(self.base_model), tensors)


@PEFT_METHODS.register("adalora")
@dataclass(kw_only=True)
class AdaLoRAConfig(LinearTargetsConfig):
    """Options of AdaLoRA.

    >>> AdaLoRAConfig(init_r=12, target_r=4).lora_alpha
    24
    """

    peft_type: ClassVar[str] = "ADALORA"
    targets_key: ClassVar[str] = "adalora_target_modules"
    adapter_class: ClassVar[type[TrainingHooks] | None] = AdaLoRAAdapter
    free_on_resume: ClassVar[frozenset[str]] = PeftConfig.free_on_resume | {
        *("target_r", "tinit", "tfinal", "deltaT", "total_step", "lora_dropout"),
        *("beta1", "beta2", "orth_reg_weight"),
    }

    init_r: int = option(12, help="initial rank of every layer's update", minimum=1)
    target_r: int = option(8, help="average of the final ranks of the layers", minimum=1)
    lora_alpha: float | None = option(
        None,
        help="the update is scaled by alpha / init_r; unset: alpha is 2 * init_r",
        above=0,
        arguments=("alpha",),
        key="adalora_alpha",
    )
    lora_dropout: float = dropout_option("adalora_dropout")
    tinit: int | None = option(None, help="initial steps without rank pruning; unset: 10 % of the run", minimum=0)
    tfinal: int | None = option(None, help="final steps with fixed ranks; unset: 30 % of the run", minimum=0)
    deltaT: int = option(  # noqa: N815 - name in Hugging Face PEFT
        1, help="steps between rank allocations", minimum=1, key="adalora_deltaT", arguments=("delta_t",)
    )
    beta1: float = option(0.85, help="decay rate of the average sensitivity", above=0, below=1)
    beta2: float = option(0.85, help="decay rate of the average uncertainty", above=0, below=1)
    orth_reg_weight: float = option(0.5, help="weight of the orthogonality loss of P and Q", minimum=0)
    ensure_weight_tying: bool = True
    total_step: int | None = None
    """Optimizer steps of the run that trained the adapter; None before training."""
    rank_pattern: dict[str, list[bool]] = field(default_factory=dict)
    """`<layer>.lora_E` -> `init_r` flags, True for stored triplets; layers without an entry have all triplets."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target_r > self.init_r:
            raise ValueError(
                f"adalora_target_r={self.target_r} is above adalora_init_r={self.init_r}, and ranks only decrease; "
                "raise adalora_init_r or lower adalora_target_r"
            )
        if self.lora_alpha is None:
            self.lora_alpha = 2 * self.init_r

    def wrap(self, name: str, base: nn.Layer, seed: int) -> AdaLoRALinear:
        assert self.lora_alpha is not None
        rank = sum(self.rank_pattern.get(f"{name}.lora_E", [True] * self.init_r))
        return AdaLoRALinear(base, rank, self.lora_alpha / (self.init_r + _EPSILON), self.lora_dropout, seed, name)

    def warm_start(self, stored: PeftConfig) -> AdaLoRAConfig:
        assert isinstance(stored, AdaLoRAConfig)
        shape = {name: getattr(stored, name) for name in ("init_r", "lora_alpha", "target_modules", "rank_pattern")}
        return self.replace(**shape)

    def for_run(self, total_steps: int) -> AdaLoRAConfig:
        """Return this config with unset schedule steps computed from the length of the run."""
        tinit = total_steps // 10 if self.tinit is None else self.tinit
        tfinal = 3 * total_steps // 10 if self.tfinal is None else self.tfinal
        return self.replace(total_step=total_steps, tinit=tinit, tfinal=tfinal)

    def schedule(self, total_steps: int, num_values: int, num_layers: int) -> BudgetSchedule:
        """Return the budget schedule of a run.

        Args:
            total_steps: optimizer steps of the run.
            num_values: number of singular values in all layers.
            num_layers: number of adapted layers.

        Raises:
            ValueError: the warmup and final steps leave no step for pruning.
        """
        config = self.for_run(total_steps)
        assert config.tinit is not None and config.tfinal is not None
        return BudgetSchedule(
            initial=num_values,
            target=min(self.target_r * num_layers, num_values),
            warmup=config.tinit,
            final=config.tfinal,
            interval=self.deltaT,
            total_steps=total_steps,
        )

    def with_ranks(self, masks: Mapping[str, np.ndarray]) -> AdaLoRAConfig:
        """Return this config for an adapter with only the triplets selected by `masks` (layer -> bool [r])."""
        pattern = dict(self.rank_pattern)
        for name, mask in masks.items():
            before, flags = pattern.get(f"{name}.lora_E", [True] * self.init_r), iter(mask.tolist())
            pattern[f"{name}.lora_E"] = [had and next(flags) for had in before]
        return self.replace(rank_pattern=pattern)

    # -- files --------------------------------------------------------------------------------------------------------
    def to_adapter_config(self, model: TrainableModel) -> dict[str, Any]:
        tinit, tfinal = self.tinit or 0, self.tfinal or 0
        return {
            "init_r": self.init_r,
            "target_r": self.target_r,
            "lora_alpha": self.lora_alpha,
            "lora_dropout": self.lora_dropout,
            "target_modules": shortest_targets([name for name, _ in adapter_layers(model)], model),
            "tinit": tinit,
            "tfinal": tfinal,
            "deltaT": self.deltaT,
            "beta1": self.beta1,
            "beta2": self.beta2,
            "orth_reg_weight": self.orth_reg_weight,
            "total_step": self.total_step or tinit + tfinal + 1,  # PEFT requires a value
            "rank_pattern": self.rank_pattern or None,
            "bias": "none",
            "fan_in_fan_out": False,
            "init_lora_weights": True,
            "modules_to_save": None,
        }

    def for_tensors(self, names: Collection[str]) -> AdaLoRAConfig:
        return self.replace(target_modules=resolve_targets(self.target_modules, names))

    @classmethod
    def from_adapter_config(cls, fields: Mapping[str, Any]) -> AdaLoRAConfig:
        same = ("init_r", "target_r", "tinit", "tfinal", "beta1", "beta2", "orth_reg_weight", "total_step")
        read = {*same, "deltaT", "lora_alpha", "lora_dropout", "target_modules", "rank_pattern", "init_lora_weights"}
        read |= {"layers_to_transform", "layers_pattern"}
        read |= {"r", "lora_bias", "alpha_pattern", "use_rslora"}  # PEFT's AdaLoRA ignores these fields
        refuse_unread_fields(fields, read | IGNORED_PEFT_FIELDS)
        check_values(fields, {"rank_pattern": FLAGS_BY_LAYER}, "the adapter's config")
        pattern = fields.get("rank_pattern") or {}
        return cls(
            **{name: fields[name] for name in same if fields.get(name) is not None},
            lora_alpha=field_or(fields, "lora_alpha", 8),
            lora_dropout=field_or(fields, "lora_dropout", 0.0),
            deltaT=field_or(fields, "deltaT", 1),
            target_modules=targets_from_peft(fields) if fields.get("target_modules") else TARGETS_OF_TENSORS,
            rank_pattern={name.replace(".default", ""): list(flags) for name, flags in pattern.items()},
        )


AdaLoraConfig = AdaLoRAConfig  # the spelling of Hugging Face PEFT


class AdaLoRALinear(LinearAdapter):
    """Linear layer with an update of the form P Λ Q; a layer of rank 0 returns the output of its base.

    Args:
        rank: r, the rank of the update.
        scaling: s, the factor of the update.
        seed: random seed of the initial values of P and Q.
        name: name of the layer; the initial values also depend on the name.
    """

    def __init__(self, base: nn.Layer, rank: int, scaling: float, dropout: float, seed: int, name: str) -> None:
        super().__init__(base)
        self.rank, self.scaling, self.dropout = rank, scaling, dropout
        a, b = (
            generator_for(seed, f"{name}.{leaf}").normal(0, _INIT_STD, shape).astype(np.float32)
            for leaf, shape in (("lora_A", (rank, self.in_features)), ("lora_B", (self.out_features, rank)))
        )
        self.lora_A = self.new_parameter(a)
        # Float32, so the optimizer does not keep a master copy. A master copy would undo the zeros set by pruning.
        self.lora_E = self.create_parameter(
            [rank, 1], dtype="float32", default_initializer=nn.initializer.Constant(0.0)
        )
        self.lora_B = self.new_parameter(b)

    def adapter_forward(self, x: paddle.Tensor) -> paddle.Tensor:
        if self.rank == 0:
            return self.base(x)
        inner = self.apply_dropout(x)
        inner = paddle.matmul(inner, self.lora_A, transpose_y=True)
        inner = inner * (self.lora_E.flatten() * self.scaling).astype(inner.dtype)
        return self.base(x) + paddle.matmul(inner, self.lora_B, transpose_y=True)

    def low_rank_factors(self) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Return the factors s Λ Q and P; for rank 0, zero factors of rank 1, because LoRA files cannot have rank 0."""
        if self.rank == 0:
            return paddle.zeros([1, self.in_features]), paddle.zeros([self.out_features, 1])
        return self.lora_A.astype("float32") * (self.lora_E * self.scaling), self.lora_B.astype("float32")

    def sharding_axes(self, style: Style) -> dict[str, int | None]:
        a_axis, b_axis = factor_axes(style)
        return {"lora_A": a_axis, "lora_E": None, "lora_B": b_axis}

    def triplets(self) -> Triplets:
        """Return the trained tensors Q, Λ and P by name."""
        return {"lora_A": self.lora_A, "lora_E": self.lora_E, "lora_B": self.lora_B}

    def orthogonality_errors(self) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Return the Frobenius norms of Q Q^T - I and P^T P - I, float32."""
        q, p = self.lora_A.astype("float32"), self.lora_B.astype("float32")
        grams = (
            self.reduce_over_inputs(paddle.matmul(q, q, transpose_y=True)),
            self.reduce_over_outputs(paddle.matmul(p, p, transpose_x=True)),
        )
        q_error, p_error = ((gram - paddle.eye(self.rank)).norm() for gram in grams)
        return q_error, p_error

    def mean_over_features(self, matrix: paddle.Tensor, axis: int) -> paddle.Tensor:
        """Return the mean of a matrix over features: axis 1 for Q [r, in], axis 0 for P [out, r]."""
        reduce = self.reduce_over_inputs if axis == 1 else self.reduce_over_outputs
        size = reduce(paddle.full([], float(matrix.shape[axis])))
        return reduce(matrix.sum(axis=axis)) / size

    @paddle.no_grad()
    def prune(self, mask: np.ndarray) -> None:
        """Set singular values to zero where `mask` (bool [r]) is False."""
        self.lora_E.set_value(np.where(mask[:, None], self.lora_E.numpy(), np.float32(0)))
