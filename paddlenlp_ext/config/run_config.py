"""`RunConfig`: the configuration of a run as a tree of sections."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from paddlenlp_ext.config.dataclass_options import Option, options_of
from paddlenlp_ext.config.sections.command import CommandConfig
from paddlenlp_ext.config.sections.data import DataConfig
from paddlenlp_ext.config.sections.distillation import DistillationConfig
from paddlenlp_ext.config.sections.generation import GenerationConfig
from paddlenlp_ext.config.sections.grpo import GRPOConfig, PromptDataConfig, SamplingConfig
from paddlenlp_ext.config.sections.model import ModelConfig
from paddlenlp_ext.config.sections.optim import OptimConfig
from paddlenlp_ext.config.sections.parallel import ParallelConfig
from paddlenlp_ext.config.sections.precision import PrecisionConfig
from paddlenlp_ext.config.sections.preference import PreferenceConfig, PreferenceDataConfig
from paddlenlp_ext.config.sections.ptq import PTQConfig
from paddlenlp_ext.config.sections.reward import RewardConfig
from paddlenlp_ext.config.sections.rewards import RewardsConfig
from paddlenlp_ext.config.sections.safety import SafetyConfig
from paddlenlp_ext.config.sections.train import TrainConfig

SHARED_SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "data": DataConfig,
    "train": TrainConfig,
    "safety": SafetyConfig,
    "optim": OptimConfig,
    "generation": GenerationConfig,
    "precision": PrecisionConfig,
    "parallel": ParallelConfig,
    "command": CommandConfig,
}
"""Sections of all programs."""
SECTIONS: dict[str, type] = {**SHARED_SECTIONS, "distillation": DistillationConfig}
"""Sections of `llm/run_finetune.py`."""
PREFERENCE_SECTIONS: dict[str, type] = {**SHARED_SECTIONS, "data": PreferenceDataConfig, "preference": PreferenceConfig}
"""Sections of `llm/run_dpo.py`."""
REWARD_SECTIONS: dict[str, type] = {**SHARED_SECTIONS, "data": PreferenceDataConfig, "reward": RewardConfig}
"""Sections of `llm/run_reward.py`."""
GRPO_SECTIONS: dict[str, type] = {
    **SHARED_SECTIONS,
    "data": PromptDataConfig,
    "generation": SamplingConfig,
    "grpo": GRPOConfig,
    "rewards": RewardsConfig,
}
"""Sections of `llm/run_grpo.py`."""
QUANTIZATION_SECTIONS: dict[str, type] = {**SHARED_SECTIONS, "ptq": PTQConfig}
"""Sections of `llm/run_quantization.py`."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Checked configuration of a run; sections and fields are read-only."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    safety: SafetyConfig = field(default_factory=SafetyConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    command: CommandConfig = field(default_factory=CommandConfig)
    distillation: DistillationConfig | None = None
    """Options of distillation; None for programs other than fine-tuning."""
    preference: PreferenceConfig | None = None
    """Options of preference training; None for other programs."""
    reward: RewardConfig | None = None
    """Options of a reward model; None for other programs."""
    grpo: GRPOConfig | None = None
    """Options of GRPO; None for other programs."""
    rewards: RewardsConfig | None = None
    """Reward functions of sampled completions; None for programs without rewards."""
    ptq: PTQConfig | None = None
    """Options of post-training quantization; None for other programs."""
    peft: Any = None
    """Config of the chosen adapter method; None: train all weights."""
    peft_switch: str | None = None
    """Switch of the chosen adapter method, such as "lora"."""
    notes: list[str] = field(default_factory=list)
    """Messages for the user, for example about keys without effect."""

    @property
    def distills(self) -> bool:
        """Return whether the run is a distillation."""
        return self.distillation is not None and self.distillation.is_on

    @property
    def max_answer_tokens(self) -> int:
        """Return the maximum number of tokens of a generated answer."""
        return self.generation.max_new_tokens or max(1, self.data.max_length - self.data.src_length)

    @property
    def sections(self) -> dict[str, Any]:
        """Return the sections of the run by name."""
        programs = (SECTIONS, PREFERENCE_SECTIONS, REWARD_SECTIONS, GRPO_SECTIONS, QUANTIZATION_SECTIONS)
        sections = {name: getattr(self, name) for program in programs for name in program}
        return {name: section for name, section in sections.items() if section is not None}

    def to_flat_dict(self) -> dict[str, Any]:
        """Return the configuration as a flat JSON object, without the section `command`.

        The section `distillation` is included if the run distills, so that all training programs can read the
        configuration of another fine-tuning run.
        """
        flat: dict[str, Any] = {}
        skipped = ("command",) if self.distills else ("command", "distillation")
        for section, values in self.sections.items():
            if section not in skipped:
                flat |= _flatten(values, options_of(type(values), section))
        if self.peft is not None:
            assert self.peft_switch is not None
            flat |= dict.fromkeys(switches_of(self.peft_switch, type(self.peft)), True)
            flat |= _flatten(self.peft, method_options(self.peft_switch, type(self.peft)))
        return flat


def method_options(switch: str, method: type) -> list[Option]:
    """Return the options of a method's config class, with keys such as `lora_rank`."""
    return options_of(method, switch, prefix=f"{switches_of(switch, method)[0]}_")


def switches_of(switch: str, method: type) -> list[str]:
    """Return the switches that select a method; a variant has two, the base method first: `lora`, `pissa`."""
    refined = getattr(method, "refines", None)
    return [switch] if refined is None else [refined, switch]


def _flatten(section: Any, options: list[Option]) -> dict[str, Any]:
    values = {option.key: getattr(section, option.attribute) for option in options}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
