"""Command line of llm/run_evaluation.py. This module does not import Paddle, so that a wrong argument fails fast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from paddlenlp_ext.config.command_line import parse_arguments as parse_command_line
from paddlenlp_ext.config.dataclass_options import option, options_of
from paddlenlp_ext.evaluation.task_options import TaskOptions, read_task
from paddlenlp_ext.inference.arguments import ModelArguments
from paddlenlp_ext.utils.distributed_env import require_single_process

USAGE = (
    "run_evaluation.py --model_name_or_path MODEL [--lora_path ADAPTER] --tasks TASK.json,... [--key value ...]\n"
    "run_evaluation.py --model_name_or_path MODEL --task KIND --data_file ROWS [--key value ...]\n\n"
    "Score a model, or compare it with its adapter, the merged model and other models."
)
BASE, ADAPTER, MERGED = "base", "adapter", "merged"


@dataclass(frozen=True, kw_only=True)
class EvaluationArguments(ModelArguments):
    """Arguments of run_evaluation.py, without the options of a task (`TaskOptions`)."""

    tasks: tuple[str, ...] = option((), help="task files, or general for the built-in questions")
    compare: tuple[str, ...] = option(
        (),
        help="models to compare: base, adapter, merged, or the name or folder of another model; default: base, and the "
        "adapter if given",
    )
    output_dir: str = option(
        "evaluation", aliases=("out",), help="folder for report.md, scores.png, results.json and rows.jsonl"
    )
    max_length: int = option(
        4096,
        minimum=2,
        aliases=("max_total_length",),
        help="maximum number of tokens of prompt plus answer; at most the context length of the model",
    )
    batch_size: int = option(8, minimum=1, help="number of rows per batch")
    num_examples: int = option(3, minimum=0, help="number of example rows in the report")
    seed: int = option(0, minimum=0, help="random seed of the bootstrap")


def parse_arguments(argv: Sequence[str], usage: str = USAGE) -> tuple[EvaluationArguments, list[TaskOptions]]:
    """Parse the command line and read the task files; `usage` is the beginning of the help text.

    Raises:
        ConfigError: an argument or a key of a task file is unknown or invalid; the message lists all problems.
        ValueError: no task is given, arguments contradict each other, or a launcher started several processes.
    """
    require_single_process("evaluation")
    options = [*options_of(EvaluationArguments, "arguments"), *options_of(TaskOptions, "task")]
    values, _ = parse_command_line(argv, options, usage)
    own: dict[str, Any] = {
        entry.name: values.pop(entry.name) for entry in fields(EvaluationArguments) if entry.name in values
    }
    arguments = EvaluationArguments(**own)
    if arguments.tasks and values:
        raise ValueError(f"--{next(iter(values))} cannot be combined with --tasks; set it in the task files")
    if not arguments.tasks and not values:
        raise ValueError("nothing to evaluate; pass --tasks FILE.json, or --task KIND --data_file ROWS")
    return arguments, [read_task(path) for path in arguments.tasks] or [TaskOptions(**values)]
