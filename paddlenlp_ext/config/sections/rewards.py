"""Configuration section for the reward functions of sampled completions."""

from __future__ import annotations

from dataclasses import dataclass

from paddlenlp_ext.config.dataclass_options import OptionGroup, option


@dataclass(frozen=True, kw_only=True)
class RewardsConfig(OptionGroup):
    """`config.rewards`: functions that score completions; the first two keys have the names of TRL."""

    reward_funcs: tuple[str, ...] = option(
        (),
        help="functions that score completions: built-in names, module.function or file.py:function "
        "(docs/reference/rewards.md)",
    )
    reward_weights: object = option(
        None, help="list with the weight of each reward function in the total reward; unset: 1 for each"
    )
    reward_time_limit: float = option(
        300.0, above=0, help="maximum time in seconds of a call of a reward function; a longer call ends the run"
    )
    reward_answer_column: str = option("answer", help="exact_answer: field of the rows with the correct answer")
    reward_pattern: str | None = option(
        None, help="regex_format: regular expression that a completion matches from start to end"
    )
    reward_json_schema: str | None = option(
        None, help="json_format: file with the JSON schema to which a completion conforms"
    )
    reward_target_length: int | None = option(
        None, minimum=1, help="target_length: number of tokens that a completion should have"
    )
    overlong_max_length: int | None = option(
        None, minimum=1, help="soft_overlong: number of tokens of a completion at which the penalty is -1"
    )
    overlong_buffer: int = option(
        256,
        minimum=1,
        aliases=("overlong_reward_buffer",),
        help="soft_overlong: number of tokens below overlong_max_length over which the penalty grows from 0 to -1",
    )
    reward_model_name_or_path: str | None = option(
        None, help="reward_model: folder of a reward model, or of its adapter, that pnx reward trained"
    )
    reward_run_code: bool = option(
        False, help="run_code: run the code in completions in limited processes on this machine"
    )
    reward_code_column: str = option("tests", help="run_code: field of the rows with the tests of the code")
    reward_code_seconds: int = option(
        5, minimum=1, help="run_code: CPU time in seconds of a test; its wall time may be twice as long"
    )
    reward_code_memory: int = option(1024, minimum=64, help="run_code: memory of a test in MiB")

    @property
    def reward_names(self) -> tuple[str, ...]:
        """Names of the reward functions in metrics: their paths without module or file."""
        return tuple(path.replace(":", ".").rpartition(".")[2] for path in self.reward_funcs)
