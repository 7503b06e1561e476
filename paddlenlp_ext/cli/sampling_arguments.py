"""Parse the command line of llm/run_sampling.py, without the delay of importing Paddle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields

from paddlenlp_ext.config.command_line import parse_arguments as parse_command_line
from paddlenlp_ext.config.dataclass_options import option, options_of
from paddlenlp_ext.config.sections.rewards import RewardsConfig
from paddlenlp_ext.inference.arguments import ModelArguments
from paddlenlp_ext.utils.distributed_env import require_single_process

USAGE = (
    "run_sampling.py --model_name_or_path MODEL --data_file PROMPTS --reward_funcs NAME,... [--key value ...]\n\n"
    "Sample answers, score them with reward functions, and write training rows."
)
SFT, PREFERENCE, ROLLOUTS = "sft", "preference", "rollouts"
BEST, ALL = "best", "all"


@dataclass(frozen=True, kw_only=True)
class SamplingArguments(ModelArguments):
    """Arguments of run_sampling.py, without the keys of the reward functions (`RewardsConfig`)."""

    data_file: str = option(
        MISSING,
        aliases=("data",),
        help="prompts, one JSON object per line in a fine-tuning format; answers are optional",
    )
    output_file: str = option("samples.jsonl", aliases=("out",), help="file for the rows")
    output_format: str = option(
        SFT,
        choices=(SFT, PREFERENCE, ROLLOUTS),
        help="sft: rows with good answers; preference: pairs of the best and the worst answer; rollouts: all answers, "
        "for rollouts_path of pnx grpo",
    )
    keep: str = option(
        BEST, choices=(BEST, ALL), help="sft: keep the best answer of a prompt, or all answers with min_reward or more"
    )
    min_reward: float | None = option(None, help="sft: minimum total reward of an answer; unset: no minimum")
    min_margin: float = option(
        0.0,
        minimum=0,
        help="preference: minimum difference between the total rewards of a pair; answers with equal rewards are never "
        "a pair",
    )
    num_generations: int = option(8, minimum=1, aliases=("num_return_sequences",), help="number of answers per prompt")
    src_length: int = option(
        1024,
        minimum=1,
        aliases=("max_prompt_length",),
        help="maximum number of tokens in a prompt; longer prompts are truncated",
    )
    max_length: int = option(
        512, minimum=1, aliases=("max_new_tokens",), help="maximum number of new tokens in an answer"
    )
    temperature: float = option(1.0, above=0, help="softmax temperature")
    top_k: int = option(0, minimum=0, help="number of most likely tokens to sample from; 0: all tokens")
    top_p: float = option(
        1.0,
        above=0,
        maximum=1,
        help="nucleus sampling: sample from the fewest tokens whose total probability reaches this value",
    )
    seed: int = option(0, minimum=0, help="random seed")
    batch_size: int = option(64, minimum=1, help="maximum number of answers that are sampled at the same time")


def parse_arguments(argv: Sequence[str], usage: str = USAGE) -> tuple[SamplingArguments, RewardsConfig]:
    """Parse the command line; `usage` is the beginning of the help text.

    Raises:
        ConfigError: an argument is unknown or invalid; the message lists all problems.
        ValueError: no reward function is named, arguments contradict each other, or a launcher started several
            processes.
    """
    options = [*options_of(SamplingArguments, "arguments"), *options_of(RewardsConfig, "rewards")]
    values, _ = parse_command_line(argv, options, usage)
    require_single_process("sampling")
    of_rewards = {field.name: values.pop(field.name) for field in fields(RewardsConfig) if field.name in values}
    arguments, rewards = SamplingArguments(**values), RewardsConfig(**of_rewards)
    if not rewards.reward_funcs:
        raise ValueError("--reward_funcs is not set; name functions that score answers (docs/reference/rewards.md)")
    if arguments.output_format == SFT and arguments.keep == ALL and arguments.min_reward is None:
        raise ValueError("--keep all needs --min_reward, or bad answers are kept too; set it")
    if arguments.output_format == PREFERENCE and arguments.num_generations < 2:
        raise ValueError("--output_format preference compares answers; set --num_generations to 2 or more")
    return arguments, rewards
