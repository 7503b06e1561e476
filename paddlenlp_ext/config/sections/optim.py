"""Configuration section for the optimizer and its learning rate schedule."""

from __future__ import annotations

from dataclasses import dataclass

from paddlenlp_ext.config.dataclass_options import OptionGroup, option

SCHEDULES = (
    *("linear", "cosine", "constant", "constant_with_warmup", "cosine_with_restarts", "polynomial"),
    *("inverse_sqrt", "warmup_stable_decay"),
)
OPTIMIZERS = {
    **dict.fromkeys(
        (
            *("adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_torch_npu_fused", "adamw_hf"),
            *("adamw_apex_fused", "paged_adamw", "paged_adamw_32bit"),
        ),
        "adamw",
    ),
    **dict.fromkeys(("adamw_bnb_8bit", "paged_adamw_8bit"), "adamw_8bit"),
}
"""Name of an optimizer in transformers -> value of `optim` with the same updates."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig(OptionGroup):
    """`config.optim`: the optimizer and its learning rate schedule."""

    learning_rate: float = option(5e-5, minimum=0, help="peak learning rate")
    lr_scheduler_type: str = option(
        "linear",
        choices=SCHEDULES,
        synonyms={"cosine_with_min_lr": "cosine"},
        help="learning rate schedule after warmup; cosine_with_min_lr means cosine with min_learning_rate",
    )
    warmup_steps: int = option(
        0, minimum=0, help="number of linear warmup steps; a value above 0 overrides warmup_ratio"
    )
    warmup_ratio: float = option(0.0, minimum=0, maximum=1, help="fraction of total steps used for warmup")
    min_learning_rate: float = option(
        0.0,
        minimum=0,
        help="learning rate at the end of the decay; inverse_sqrt only approaches this value, and constant schedules "
        "ignore this key",
    )
    decay_steps: int = option(
        0,
        minimum=0,
        help="step at which the decay ends; 0: the last step; constant schedules and inverse_sqrt ignore this key",
    )
    num_cycles: float | None = option(
        None,
        above=0,
        help="cosine: number of periods (unset: 0.5); cosine_with_restarts: number of decays (unset: 1)",
    )
    power: float = option(1.0, above=0, help="polynomial: exponent of the decay")
    lr_end: float = option(
        1e-7, minimum=0, help="polynomial: learning rate at the end of the decay, if min_learning_rate is 0"
    )
    num_decay_steps: int | None = option(
        None,
        minimum=1,
        help="warmup_stable_decay: steps of the cosine decay at the end; unset: a tenth of the steps after warmup",
    )
    optim: str = option(
        "adamw",
        choices=("adamw", "adamw_mini", "adamw_8bit", "muon", "adafactor", "adamw_custom", "adamw_16bit_moment"),
        synonyms=OPTIMIZERS,
        help="optimizer; adamw_mini stores one second moment per row or head, adamw_8bit stores both moments in 8 "
        "bits, muon stores one moment per weight of a matrix",
    )
    muon_momentum: float = option(0.95, minimum=0, below=1, help="with muon: decay rate of the momentum")
    muon_scale: str = option(
        "match_rms_adamw",
        choices=("match_rms_adamw", "original"),
        help="with muon: scale of updates; match_rms_adamw suits the learning rates of AdamW, original suits learning "
        "rates around 0.02",
    )
    offload_optim: bool = option(
        False, help="keep optimizer state in host memory between steps (GPUs only; experimental, not yet run on a GPU)"
    )
    weight_decay: float = option(0.0, minimum=0, help="decoupled weight decay")
    adam_beta1: float = option(0.9, minimum=0, below=1, help="decay rate of the first moment")
    adam_beta2: float = option(0.999, minimum=0, below=1, help="decay rate of the second moment")
    adam_epsilon: float = option(1e-8, above=0, help="constant added to the square root of the second moment")
    max_grad_norm: float = option(1.0, minimum=0, help="maximum global norm of the gradients; 0: no clipping")

    @property
    def final_learning_rate(self) -> float:
        """Return `min_learning_rate`; if it is 0 and the schedule is polynomial, return `lr_end`."""
        return self.min_learning_rate or (self.lr_end if self.lr_scheduler_type == "polynomial" else 0.0)
