"""Configuration section for distillation (`llm/run_finetune.py`): the teacher and the loss.

`teacher_model_name_or_path`, `distillation_beta` (TRL: `beta`) and `distillation_lmbda` (TRL: `lmbda`) follow TRL's
`GKDConfig`.
"""

from __future__ import annotations

from dataclasses import dataclass

from paddlenlp_ext.config.dataclass_options import OptionGroup, option
from paddlenlp_ext.config.sections.model import BLOCKWISE_ALGORITHMS


@dataclass(frozen=True, kw_only=True)
class DistillationConfig(OptionGroup):
    """`config.distillation`: distillation from a teacher; off unless the run names a teacher or its stored results."""

    teacher_model_name_or_path: str | None = option(
        None,
        help="model (folder, .gguf file, built-in name or hub id) or adapter folder of the teacher, whose tokenizer "
        "must have the vocabulary of the trained model (docs/distillation.md); unset: no distillation",
    )
    teacher_weight_quantize_algo: str | None = option(
        None,
        choices=(*BLOCKWISE_ALGORITHMS, "weight_only_int8", "weight_only_int4"),
        help="quantize the weights of the teacher",
    )
    teacher_logps_path: str | None = option(
        None,
        help="folder with log-probabilities of the teacher's most likely tokens; computed by the first run, later runs "
        "do not load the teacher",
    )
    teacher_top_k: int = option(
        64, minimum=1, help="number of tokens per position whose log-probabilities are stored in teacher_logps_path"
    )
    distillation_beta: float = option(
        0.5,
        minimum=0,
        maximum=1,
        help="divergence: 0 forward KL, 1 reverse KL, between: generalized Jensen-Shannon divergence",
    )
    distillation_temperature: float = option(
        1.0, above=0, help="divisor of the logits of both models in the divergence"
    )
    distillation_sft_ratio: float = option(
        0.0, minimum=0, help="weight of the cross entropy of the targets, which is added to the divergence"
    )

    distillation_lmbda: float = option(
        0.0,
        minimum=0,
        maximum=1,
        aliases=("lmbda",),
        help="fraction of the micro-batches whose answers the student samples (max_new_tokens, temperature)",
    )

    @property
    def is_on(self) -> bool:
        """Return whether the run distills."""
        return self.teacher_model_name_or_path is not None or self.teacher_logps_path is not None

    @property
    def samples_answers(self) -> bool:
        """Return whether the student samples answers."""
        return self.is_on and self.distillation_lmbda > 0
