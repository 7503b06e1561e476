"""Configuration sections of GRPO (`llm/run_grpo.py`): groups, loss and sampling.

Names and defaults follow TRL's `GRPOConfig`; other names of the keys are from PaddleNLP, verl, ms-swift and NeMo RL.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paddlenlp_ext.config.dataclass_options import OptionGroup, option
from paddlenlp_ext.config.sections.generation import GenerationConfig
from paddlenlp_ext.config.sections.preference import PreferenceDataConfig

LOSS_TYPES = ("grpo", "dr_grpo", "dapo", "bnpo")


@dataclass(frozen=True, kw_only=True)
class GRPOConfig(OptionGroup):
    """`config.grpo`: groups of completions, and the loss."""

    num_generations: int = option(
        8, minimum=2, aliases=("num_return_sequences", "rollout_n"), help="number of completions of a prompt (a group)"
    )
    num_generations_eval: int | None = option(
        None, minimum=1, help="number of completions of a prompt in evaluation; unset: num_generations"
    )
    loss_type: str = option(
        "dapo",
        choices=LOSS_TYPES,
        help="weight of a token: grpo 1 / length of its completion; dapo and bnpo 1 / tokens of the sampled batch or "
        "of the micro-batch; dr_grpo a constant",
    )
    importance_sampling_level: str = option(
        "token", choices=("token", "sequence"), help="probability ratios of tokens, or of sequences (GSPO)"
    )
    beta: float = option(
        0.0,
        minimum=0,
        aliases=("kl_loss_coeff",),
        help="weight of the KL divergence from the reference model",
    )
    use_bias_correction_kl: bool = option(True, help="multiply the KL divergence by the probability ratio")
    epsilon: float = option(
        0.2,
        minimum=0,
        aliases=("epsilon_low", "clip_range_ratio", "clip_range_ratio_low"),
        help="lower clip range: the ratio is clipped at 1 - epsilon",
    )
    epsilon_high: float | None = option(
        None,
        minimum=0,
        aliases=("clip_range_ratio_high",),
        help="upper clip range: the ratio is clipped at 1 + epsilon_high; unset: epsilon",
    )
    delta: float | None = option(
        None,
        above=0,
        aliases=("clip_range_ratio_c",),
        help="upper bound of the ratio for negative advantages (two-sided clipping); unset: no bound",
    )
    num_iterations: int = option(
        1, minimum=1, aliases=("update_iters",), help="number of passes over each sampled batch"
    )
    steps_per_generation: int | None = option(
        None,
        minimum=1,
        help="number of micro-batches per process that are sampled together; unset: gradient_accumulation_steps",
    )
    scale_rewards: str | bool = option(
        "group",
        choices=("group", "batch", "none"),
        help="divide advantages by the standard deviation of the rewards of the group or of the sampled batch; none: "
        "do not divide",
    )
    advantage_estimator: str = option(
        "grpo",
        choices=("grpo", "rloo"),
        help="baseline of a reward: grpo the mean reward of the group; rloo the mean of the other rewards of the group",
    )
    dynamic_sampling: bool = option(
        False,
        aliases=("dynamic_sample", "use_dynamic_sampling"),
        help="replace groups whose rewards are all equal by groups of other prompts (DAPO)",
    )
    max_gen_batches: int = option(
        10,
        minimum=1,
        aliases=("max_num_gen_batches", "dynamic_sampling_max_gen_batches"),
        help="dynamic_sampling: maximum number of rounds of sampling for a batch, including the first",
    )
    mask_truncated_completions: bool = option(False, help="exclude completions without an end token from the loss")
    importance_sampling_correction: bool | None = option(
        None,
        aliases=("vllm_importance_sampling_correction",),
        help="weight the loss by the ratio of the probabilities in training and in sampling; unset: true unless the "
        "compute dtype is float32",
    )
    importance_sampling_mode: str = option(
        "sequence_mask",
        aliases=("vllm_importance_sampling_mode",),
        choices=("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
        help="weights of tokens or of sequences; weights outside the bounds are clipped (truncate) or set to 0 (mask)",
    )
    importance_sampling_clip_max: float | None = option(
        3.0, above=0, aliases=("vllm_importance_sampling_clip_max",), help="upper bound of the weights"
    )
    importance_sampling_clip_min: float | None = option(
        None, minimum=0, aliases=("vllm_importance_sampling_clip_min",), help="lower bound of the weights"
    )
    share_prompt: bool = option(
        True, help="compute a prompt once for all its completions; false: once for each completion"
    )
    sampling_batch_size: int = option(
        64, minimum=1, help="maximum number of completions that are sampled at the same time in each process"
    )

    def __post_init__(self) -> None:
        if isinstance(self.scale_rewards, bool):
            object.__setattr__(self, "scale_rewards", "group" if self.scale_rewards else "none")
        super().__post_init__()

    @property
    def upper_epsilon(self) -> float:
        """Return the upper clip range."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def has_reference(self) -> bool:
        """Return whether the loss uses a reference model."""
        return self.beta > 0


@dataclass(frozen=True, kw_only=True)
class PromptDataConfig(PreferenceDataConfig):
    """`config.data` of GRPO: files with rows of prompts, or stored rollouts."""

    rollouts_path: str | None = option(
        None, help="file with stored rollouts to train on instead of sampled completions (docs/grpo.md)"
    )

    def paths(self, train: bool, evaluate: bool) -> dict[str, Any]:
        """Return the keys that name the data files of a run, with their values."""
        return super().paths(train and self.rollouts_path is None, evaluate)


@dataclass(frozen=True, kw_only=True)
class SamplingConfig(GenerationConfig):
    """`config.generation` of GRPO: sampling of completions."""

    max_new_tokens: int | None = option(
        512,
        minimum=1,
        aliases=("max_completion_length", "max_dec_len"),
        help="maximum number of tokens in a completion",
    )
    top_k: int = option(0, minimum=0, help="number of most likely tokens to sample from; 0: all tokens")
