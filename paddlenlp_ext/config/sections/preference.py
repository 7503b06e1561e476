"""Configuration sections for preference training (`llm/run_dpo.py`): options of the loss and of the data.

Names and defaults follow PaddleNLP's `DPOConfig` and `DPODataArgument` (llm/docs/dpo.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paddlenlp_ext.config.dataclass_options import OptionGroup, option
from paddlenlp_ext.config.sections.data import DataConfig

LOSS_TYPES = (
    "sigmoid",
    "hinge",
    "ipo",
    "simpo",
    "orpo",
    "kto",
    "kto_pair",
    "dpop",
    "sppo_hard",
    "nca_pair",
    "apo_zero",
    "robust",
)
WITHOUT_REFERENCE = ("simpo", "orpo")
"""Losses that are defined without a reference model."""


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig(OptionGroup):
    """`config.preference`: the loss of preference training."""

    loss_type: str = option("sigmoid", choices=LOSS_TYPES, synonyms={"or": "orpo"}, help="loss (docs/preference.md)")
    beta: float = option(
        0.1, above=0, help="weight of the KL divergence from the reference model, and scale of rewards"
    )
    label_smoothing: float = option(
        0.0, minimum=0, below=0.5, help="assumed probability that a pair is mislabeled (sigmoid, simpo, robust)"
    )
    simpo_gamma: float = option(0.5, minimum=0, help="simpo: target margin between the rewards of a pair")
    dpop_lambda: float = option(
        50.0, minimum=0, help="dpop: weight of the penalty if a chosen answer becomes less likely than before training"
    )
    desirable_weight: float = option(1.0, minimum=0, help="kto: weight of the loss on desirable answers")
    undesirable_weight: float = option(1.0, minimum=0, help="kto: weight of the loss on undesirable answers")
    pref_loss_ratio: float = option(1.0, minimum=0, help="weight of the preference loss (orpo: lambda of the paper)")
    sft_loss_ratio: float = option(
        0.0, minimum=0, help="weight of the SFT loss (mean per token) on the chosen answer; orpo: 0 means 1"
    )
    reference_free: bool = option(
        False, help="train without a reference model; simpo and orpo never use a reference model"
    )
    ref_model_update_steps: int = option(
        -1,
        minimum=-1,
        help="number of steps between copies of the trained weights to the reference model; -1 or 0: no copies",
    )
    share_prompt: bool = option(
        True, help="compute the prompt of a pair once for both answers; false: once for each answer"
    )

    @property
    def has_reference(self) -> bool:
        """Return whether the loss uses a reference model."""
        return not self.reference_free and self.loss_type not in WITHOUT_REFERENCE

    @property
    def follows_model(self) -> bool:
        """Return whether the run updates the reference model (`ref_model_update_steps`)."""
        return self.has_reference and self.ref_model_update_steps > 0

    @property
    def keeps_reference(self) -> bool:
        """Return whether the run stores a second copy of the trained parameters, for the reference model."""
        return self.follows_model or (self.has_reference and self.loss_type == "kto")

    @property
    def sft_weight(self) -> float:
        """Return the weight of the SFT loss on the chosen answer, which ORPO includes by default."""
        return self.sft_loss_ratio or (1.0 if self.loss_type == "orpo" else 0.0)


@dataclass(frozen=True, kw_only=True)
class PreferenceDataConfig(DataConfig):
    """`config.data` of a preference run: files with rows of preference data."""

    train_dataset_path: str | None = option(
        None, help="file or folder with training rows; set either this key or dataset_name_or_path"
    )
    eval_dataset_path: tuple[str, ...] | Mapping[str, Any] | None = option(
        None,
        aliases=("eval_dataset", "dev_dataset_path"),
        help="datasets for evaluation: a path, a list of paths, or an object {name: path}; unset: dev split of "
        "dataset_name_or_path",
    )
    src_length: int = option(2048, minimum=1, aliases=("max_prompt_len",), help="maximum tokens of a prompt")
    max_length: int = option(
        4096,
        minimum=2,
        aliases=("max_seq_len",),
        help="maximum number of tokens in a prompt with all its answers, or in a pack",
    )

    @property
    def is_stream(self) -> bool:
        """Return False, because preference data is tokenized once and memory-mapped."""
        return False

    def paths(self, train: bool, evaluate: bool) -> dict[str, Any]:
        """Return the keys that name the data files of a run, with their values."""
        keys = {"train_dataset_path": self.train_dataset_path, "dev_dataset_path": self.eval_dataset_path}
        needed = [key for key, is_needed in zip(keys, (train, evaluate), strict=True) if is_needed]
        held_out = self.train_dataset_path if self.dev_ratio else None
        return {key: keys[key] or held_out or self.dataset_name_or_path for key in needed}
