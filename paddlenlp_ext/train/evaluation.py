"""Loss, accuracy and perplexity over the dev rows: sums over all learned tokens, so that order and batching don't
matter.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import paddle

from paddlenlp_ext.data.collate import Collate
from paddlenlp_ext.data.packing import BatchPlan
from paddlenlp_ext.train.passes import Passes, WholeModel
from paddlenlp_ext.train.ranks import Ranks, SingleRank


@contextmanager
def evaluation_mode(model: Any) -> Iterator[None]:
    """No dropout, no noise, no gradients inside; the mode of before comes back."""
    was_training = model.training
    model.eval()
    try:
        with paddle.no_grad():
            yield
    finally:
        if was_training:
            model.train()


def evaluate_loss(
    model: Any,
    rows: Any,
    collate_rows: Collate,
    *,
    batch_size: int,
    max_batches: int = -1,
    ranks: Ranks | None = None,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    passes: Passes | None = None,
) -> dict[str, float]:
    """Metrics over `rows` (a TokenizedDataset), or over its first `max_batches` batches where that is positive.

    Several ranks share the batches, and each comes to the same result.

    Returns:
        eval_loss (mean over learned tokens), eval_accuracy (share of learned tokens that argmax gets right),
        eval_perplexity (exp of the loss), eval_num_learned, eval_num_rows, eval_runtime and rates.

    Raises:
        ValueError: there is nothing to evaluate.
    """
    batches = BatchPlan(rows.lengths, batch_size=batch_size, shuffle=False).epoch(0)
    if max_batches > 0:
        batches = batches[:max_batches]
    ranks, passes = ranks or SingleRank(), passes or WholeModel(model)
    started = time.perf_counter()
    losses: list[float] = []
    num_correct = num_learned = num_rows = num_tokens = 0
    with evaluation_mode(model):
        own = batches[ranks.index :: ranks.size]
        for number in range(math.ceil(len(batches) / ranks.size) if ranks.moves_together else len(own)):
            batch = collate_rows(own[number] if number < len(own) else batches[0])
            with autocast():
                loss, correct = passes.evaluate(batch)
            if number >= len(own):
                break  # this was to keep the others company
            losses.append(loss)
            num_correct += correct
            num_learned += batch.num_learned
            num_tokens += batch.num_tokens
            num_rows += len(batch.row_indices)
    ranks.wait()
    ranks.end_pass()  # what was lent for these passes goes: its owner may take other values before the next
    measured = ranks.sum_stages([math.fsum(losses), num_correct])
    total, *counts = ranks.sum_numbers([*measured, num_learned, num_tokens, num_rows])
    num_correct, num_learned, num_tokens, num_rows = (int(count) for count in counts)
    if num_learned == 0:
        raise ValueError("the dev rows hold no learned token: there is nothing to evaluate")
    mean, seconds = total / num_learned, time.perf_counter() - started
    return {
        "eval_loss": mean,
        "eval_accuracy": num_correct / num_learned,
        "eval_perplexity": math.exp(mean) if mean < 700 else math.inf,
        "eval_num_rows": num_rows,
        "eval_num_learned": num_learned,
        "eval_runtime": seconds,
        "eval_samples_per_second": num_rows / seconds,
        "eval_tokens_per_second": num_tokens / seconds,
    }
