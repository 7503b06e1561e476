"""Load the models that an evaluation compares, such as base, adapter and merged model, and score them on all tasks."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from paddlenlp_ext.evaluation.arguments import ADAPTER, BASE, MERGED, EvaluationArguments
from paddlenlp_ext.evaluation.prompt_encoder import PromptEncoder
from paddlenlp_ext.evaluation.task import Measured, Task
from paddlenlp_ext.inference.choose_chat_template import choose_template
from paddlenlp_ext.inference.load_model import (
    can_merge,
    context_length,
    find_model_and_adapter,
    find_source,
    load_tokenizer,
    load_unmerged,
)
from paddlenlp_ext.utils.logging import get_logger

logger = get_logger("paddlenlp_ext.evaluation")


@dataclass(frozen=True)
class Candidate:
    """Model to evaluate.

    Attributes:
        label: name in the report.
        base: name or folder of the base model.
        adapter: folder of the adapter; None: the base model alone.
        is_merged: True if the adapter is merged into the base model.
    """

    label: str
    base: str
    adapter: str | None = None
    is_merged: bool = False


def find_candidates(arguments: EvaluationArguments, base: str, adapter: str | None) -> list[Candidate]:
    """Return the models to compare, in the order of `--compare`.

    Args:
        arguments: the command line.
        base: name or folder of the base model.
        adapter: folder of the adapter, or None.

    Raises:
        ValueError: `--compare` lists adapter or merged without an adapter, the adapter's method does not support
            merging, a model cannot be used (see `find_model_and_adapter`), or two models have the same name.
    """
    found = []
    for name in arguments.compare or ((BASE, ADAPTER) if adapter else (BASE,)):
        if name in (ADAPTER, MERGED) and adapter is None:
            raise ValueError(f"--compare {name} needs an adapter; pass --lora_path ADAPTER")
        if name == MERGED and not _has_mergeable_method(base, adapter):
            raise ValueError(_unmergeable(adapter, "its method does not support merging"))
        if name in (BASE, ADAPTER, MERGED):
            found.append(Candidate(name, base, None if name == BASE else adapter, name == MERGED))
        else:
            other = find_model_and_adapter(replace(arguments, model_name_or_path=name, lora_path=None))
            found.append(Candidate(Path(name).name, *other))
    labels = [each.label for each in found]
    if len(set(labels)) < len(labels):
        raise ValueError(
            f"--compare {','.join(labels)} lists two models with the same name; remove one, or rename its folder"
        )
    return found


def _has_mergeable_method(base: str, adapter: str | None) -> bool:
    _, stored, _ = find_source(base, adapter)
    return stored is not None and stored.config.mergeable


def _unmergeable(adapter: str | None, reason: str) -> str:
    return f"--compare {MERGED}: {adapter} cannot be merged, because {reason}; remove {MERGED} from --compare"


def measure(
    candidate: Candidate, tasks: Sequence[Task], arguments: EvaluationArguments, folders: Sequence[str | None]
) -> list[Measured]:
    """Load a model, score it on all tasks, release it and return the results.

    The rows are encoded before the model is loaded, so that an invalid row is reported early.

    Args:
        candidate: the model to score.
        tasks: tasks with their rows.
        arguments: the command line.
        folders: folders to search for the run_config.json of the training run. All compared models use the chat
            template of this run, so their prompts are equal.
    """
    base, adapter = candidate.base, candidate.adapter
    tokenizer = load_tokenizer(base, adapter)
    template = choose_template(arguments, folders, tokenizer)
    encoder = PromptEncoder(tokenizer, template, context_of(base, adapter, arguments.max_length))
    encoded = [task.encode(encoder) for task in tasks]
    model = load_candidate(candidate, arguments)
    model.add_eos_token_ids({*template.stop_token_ids, tokenizer.eos_token_id} - {None})
    results = []
    for task, rows in zip(tasks, encoded, strict=True):
        with progress(f"{candidate.label}: {task.options.title}", task.num_units(rows)) as advance:
            results.append(task.measure(model, rows, encoder, arguments.batch_size, advance))
    del model
    gc.collect()
    return results


def context_of(base: str, adapter: str | None, max_length: int | None) -> int:
    """Return the smaller of `max_length` and the model's context length.

    Raises:
        ValueError: `max_length` is None, and config.json does not give a context length.
    """
    source, _, _ = find_source(base, adapter)
    known = [length for length in (max_length, context_length(source.config)) if length is not None]
    if not known:
        raise ValueError(f"{base}: config.json has no max_position_embeddings; set max_length")
    return min(known)


def load_candidate(candidate: Candidate, arguments: EvaluationArguments) -> Any:
    """Load a model to evaluate, and merge its adapter if `candidate.is_merged`.

    Raises:
        ValueError: the model cannot be loaded (see `load_unmerged`), or its quantized weights do not allow merging.
    """
    model = load_unmerged(arguments, candidate.base, candidate.adapter)
    if not candidate.is_merged:
        return model
    if not can_merge(model):
        raise ValueError(_unmergeable(candidate.adapter, "the base model is quantized"))
    return model.merge_and_unload()


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[int], object]]:
    """Show a progress bar on a terminal, and log the duration at the end.

    The context manager yields a function that advances the bar by a number of units.
    """
    started = time.perf_counter()
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as bar:
        task = bar.add_task(escape(title), total=total)
        yield lambda count: bar.advance(task, count)
    logger.info("%s: %d items in %.1f s", title, total, time.perf_counter() - started)
