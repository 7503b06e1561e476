"""The optimizer and its learning rate."""

from __future__ import annotations

from dataclasses import dataclass

from paddlenlp_ext.config.schema import option


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """`config.optim`."""

    learning_rate: float = option(5e-5, minimum=0, help="peak learning rate")
    lr_scheduler_type: str = option(
        "linear",
        choices=("linear", "cosine", "constant", "constant_with_warmup"),
        help="shape of the learning rate after the warm-up",
    )
    warmup_steps: int = option(0, minimum=0, help="steps of linear warm-up; above 0 it wins over warmup_ratio")
    warmup_ratio: float = option(0.0, minimum=0, maximum=1, help="part of all steps that is warm-up")
    min_learning_rate: float = option(0.0, minimum=0, help="where the decay ends")
    decay_steps: int = option(0, minimum=0, help="step at which the decay ends; 0: the last one")
    optim: str = option(
        "adamw",
        choices=("adamw", "adamw_mini", "adamw_8bit", "adafactor", "adamw_custom", "adamw_16bit_moment"),
        help="optimizer; adamw_mini keeps one second moment a row, adamw_8bit both moments in 8 bits",
    )
    offload_optim: bool = option(False, help="keep optimizer state in the host's memory between steps (GPUs)")
    weight_decay: float = option(0.0, minimum=0, help="decoupled weight decay")
    adam_beta1: float = option(0.9, minimum=0, below=1, help="decay of the first moment")
    adam_beta2: float = option(0.999, minimum=0, below=1, help="decay of the second moment")
    adam_epsilon: float = option(1e-8, above=0, help="added to the root of the second moment")
    max_grad_norm: float = option(1.0, minimum=0, help="clip the norm of all gradients to this; 0: no clipping")
