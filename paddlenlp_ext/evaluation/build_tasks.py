"""Create the tasks of an evaluation from their options."""

from __future__ import annotations

from collections.abc import Sequence

from paddlenlp_ext.evaluation.generation_task import Generation
from paddlenlp_ext.evaluation.multiple_choice_task import MultipleChoice
from paddlenlp_ext.evaluation.perplexity_task import Perplexity
from paddlenlp_ext.evaluation.task import Task
from paddlenlp_ext.evaluation.task_options import GENERATION, MULTIPLE_CHOICE, PERPLEXITY, TaskOptions

KINDS: dict[str, type[Task]] = {MULTIPLE_CHOICE: MultipleChoice, GENERATION: Generation, PERPLEXITY: Perplexity}
"""Class of each kind of task (`TaskOptions.task`)."""


def build_tasks(options: Sequence[TaskOptions]) -> list[Task]:
    """Create all tasks; each task reads and checks its rows.

    Raises:
        ValueError: two tasks have the same name, a data file is missing or has invalid rows, or a library that a metric
            requires is not installed.
    """
    titles = [each.title for each in options]
    twice = next((title for title in titles if titles.count(title) > 1), None)
    if twice is not None:
        raise ValueError(f"two tasks have the name {twice!r}; set name in one of them")
    return [KINDS[each.task or ""](each) for each in options]
