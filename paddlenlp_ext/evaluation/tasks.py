"""Kinds of tasks by name."""

from __future__ import annotations

from collections.abc import Sequence

from paddlenlp_ext.evaluation.generation import Generation
from paddlenlp_ext.evaluation.multiple_choice import MultipleChoice
from paddlenlp_ext.evaluation.options import GENERATION, MULTIPLE_CHOICE, PERPLEXITY, TaskOptions
from paddlenlp_ext.evaluation.perplexity import Perplexity
from paddlenlp_ext.evaluation.task import Task

KINDS: dict[str, type[Task]] = {
    MULTIPLE_CHOICE: MultipleChoice,
    GENERATION: Generation,
    PERPLEXITY: Perplexity,
}


def open_tasks(options: Sequence[TaskOptions]) -> list[Task]:
    """Read the rows of tasks.

    Raises:
        ValueError: two tasks have the same name, or rows are invalid; the message lists the first ones of a file.
    """
    titles = [each.title for each in options]
    twice = next((title for title in titles if titles.count(title) > 1), None)
    if twice is not None:
        raise ValueError(f"two tasks have the name {twice!r}; set name in one of them")
    return [KINDS[each.task or ""](each) for each in options]
