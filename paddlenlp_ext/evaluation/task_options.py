"""Options of an evaluation task, from a task file or the command line. This module does not import Paddle."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from paddlenlp_ext.config.config_files import read_file
from paddlenlp_ext.config.dataclass_options import OptionGroup, option, options_of
from paddlenlp_ext.config.errors import ConfigError
from paddlenlp_ext.config.known_keys import program_options
from paddlenlp_ext.config.merge_settings import ParseState
from paddlenlp_ext.evaluation.prompt_template import fields_of
from paddlenlp_ext.utils.json_reader import Location

MULTIPLE_CHOICE, GENERATION, PERPLEXITY = "multiple_choice", "generation", "perplexity"
METRICS: Mapping[str, tuple[str, ...]] = {
    MULTIPLE_CHOICE: ("acc", "acc_norm"),
    GENERATION: ("exact_match", "contains", "number", "f1", "rouge1", "rouge2", "rougel", "bleu4"),
    PERPLEXITY: ("perplexity", "bits_per_byte"),
}
"""Metrics that each kind of task supports."""
DEFAULT_METRICS: Mapping[str, tuple[str, ...]] = {
    MULTIPLE_CHOICE: ("acc", "acc_norm"),
    GENERATION: ("exact_match",),
    PERPLEXITY: ("perplexity",),
}
GENERAL_TASK = "general"
"""Name of the built-in task with questions of general knowledge."""
_BUILTIN = {GENERAL_TASK: Path(__file__).with_name("general_task.json")}


@dataclass(frozen=True, kw_only=True)
class TaskOptions(OptionGroup):
    """Options of one task.

    Raises:
        ValueError: an option is missing or invalid, has no effect in a task of this kind, or contradicts another
            option.
    """

    task: str | None = option(None, choices=tuple(METRICS), help="kind of task")
    name: str | None = option(None, help="name in the report; default: the name of the task file or data file")
    data_file: str | None = option(
        None, aliases=("data",), help="data file with the rows; a perplexity task also reads a .txt file"
    )
    limit: int | None = option(None, minimum=1, help="evaluate only the first LIMIT rows")
    prompt: str | None = option(
        None,
        help="prompt template, in which {field} stands for a field of the row; default: the rows have a fine-tuning "
        "format",
    )
    chat: bool = option(True, help="use the chat template; false: continue the prompt as plain text")
    answer: str = option(
        "answer", help="field with the reference answer: a text, a list of texts, or the index of a choice"
    )
    choices: str | list[str] = option(  # noqa: RUF009 (the default is a string)
        "choices", help="field with the choices, or a list of templates, in which {field} stands for a field of the row"
    )
    delimiter: str = option(" ", help="text between prompt and choice; requires chat: false")
    metrics: tuple[str, ...] | None = option(
        None, choices=[name for names in METRICS.values() for name in names], help="metrics to compute"
    )
    pattern: str | None = option(
        None,
        help="regular expression that extracts the answer from a generated text: the last match, or the first group of "
        "the last match if the expression has groups",
    )
    max_new_tokens: int = option(256, minimum=1, help="maximum number of tokens of a generated answer")
    stop: tuple[str, ...] = option((), help="stop strings")
    text: str | None = option(None, help="field with the plain text of a perplexity task")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.task is None or self.data_file is None:
            missing = "task" if self.task is None else "data_file"
            raise ValueError(f"{missing} is missing; set task (the kind of task) and data_file")
        self._check_used()
        if not self.chat and self.prompt is None:
            raise ValueError('chat: false requires prompt; set prompt to a template, such as "Question: {question}"')
        if self.chat and self.delimiter != type(self).delimiter:
            raise ValueError("delimiter has no effect unless chat is false; remove delimiter or set chat: false")
        if self.task == GENERATION and self.prompt is None and self.answer != type(self).answer:
            raise ValueError(
                "without `prompt`, the reference is the last answer of the row, and `answer` has no effect; remove "
                "`answer`"
            )
        if any(not text for text in self.stop):
            raise ValueError("stop contains an empty string, so all answers would be empty; remove the empty string")
        if self.prompt is not None and not fields_of(self.prompt):
            raise ValueError('prompt contains no {field}; write a field of the row in braces, such as "Q: {question}"')
        for name in self.metrics or ():
            if name not in METRICS[self.task]:
                raise ValueError(f"metrics: {name} is not a metric of {self.task}; use {', '.join(METRICS[self.task])}")
        try:
            re.compile(self.pattern or "")
        except re.error as error:
            raise ValueError(f"pattern: {self.pattern!r} is not a regular expression: {error}") from None

    def _check_used(self) -> None:
        used = {
            MULTIPLE_CHOICE: ("prompt", "chat", "answer", "choices", "delimiter"),
            GENERATION: ("prompt", "chat", "answer", "pattern", "max_new_tokens", "stop"),
            PERPLEXITY: ("text",),
        }
        assert self.task is not None, "checked by the caller"
        for entry in options_of(TaskOptions, "task"):
            kinds = [kind for kind, names in used.items() if entry.attribute in names]
            if kinds and self.task not in kinds and getattr(self, entry.attribute) != entry.default:
                raise ValueError(f"{entry.key} has no effect in a task of kind {self.task}; remove it")

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Metrics to compute: the option `metrics`, or the default metrics of the kind."""
        assert self.task is not None, "checked when the options were created"
        return self.metrics or DEFAULT_METRICS[self.task]

    @property
    def title(self) -> str:
        """Name of the task in the report."""
        return self.name or Path(self.data_file or "").stem


def read_task(path: str | os.PathLike[str]) -> TaskOptions:
    """Return the options of a task file, or of a built-in task if `path` is the name of the task.

    A relative data_file is resolved against the folder of the task file.

    Raises:
        ConfigError: keys are unknown or have invalid values; the message lists all problems with their locations.
        ValueError: a required option is missing, or options contradict each other.
    """
    name, file = os.fspath(path), _BUILTIN.get(os.fspath(path), Path(path).expanduser())
    settings, problems = read_file(str(file))
    state = ParseState(program_options(options_of(TaskOptions, "task")))
    state.report.default_location = Location(str(file))
    state.report.problems += problems
    state.merge(settings)
    if state.report.problems:
        raise ConfigError(state.report.problems, [str(file)], subject="the task")
    try:
        options = TaskOptions(**{state.table.options[key].attribute: value for key, value in state.values.items()})
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    data_file = file.parent / Path(options.data_file or "").expanduser()
    return replace(options, name=options.name or Path(name).stem, data_file=str(data_file))
