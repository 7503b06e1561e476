"""Evaluation on the eval split: loss, and metrics of generated answers.

In supervised fine-tuning, loss, accuracy and perplexity are computed from sums over all target tokens, so they do not
depend on row order or batch size. ROUGE, BLEU and exact match compare generated answers with reference answers.
Precision, recall and F1 compare class labels (`eval_labels`).
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from paddlenlp_ext.data.collate import Collate
from paddlenlp_ext.data.packing import Pack, PackingPlan
from paddlenlp_ext.trainer.forward_backward import ForwardBackward, SequentialSchedule
from paddlenlp_ext.trainer.metrics.classification_metrics import label_report
from paddlenlp_ext.trainer.metrics.custom_metrics import ComputeMetrics, custom_metrics
from paddlenlp_ext.trainer.metrics.rouge_bleu import text_metrics
from paddlenlp_ext.trainer.objectives.objective import Objective
from paddlenlp_ext.trainer.objectives.sft_objective import CrossEntropy
from paddlenlp_ext.trainer.single_process import ProcessGroup, SingleProcess
from paddlenlp_ext.utils.files import write_text


@contextmanager
def evaluation_mode(model: Any) -> Iterator[None]:
    """Disable dropout, noise and gradients inside the block; restore the previous mode after the block."""
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
    process_group: ProcessGroup | None = None,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    forward_backward: ForwardBackward | None = None,
    objective: Objective | None = None,
) -> dict[str, float]:
    """Compute the loss and metrics of the objective on dataset rows.

    Each replica evaluates a share of the batches. All replicas return the same result.

    Args:
        model: model to evaluate.
        rows: a TokenizedDataset.
        collate_rows: function that collates a micro-batch.
        batch_size: number of rows in a batch.
        max_batches: number of batches to evaluate; 0 or below: all batches.
        process_group: processes of the run; None: a single process.
        autocast: function that returns the mixed-precision context of a forward pass.
        forward_backward: schedule of the forward passes; None: sequential.
        objective: objective of the run; None: cross entropy.

    Returns:
        | key | value |
        |---|---|
        | eval_loss | mean loss over the units of the objective: target tokens, pairs or rated answers |
        | eval_accuracy | fraction of target tokens predicted correctly by argmax |
        | eval_perplexity | exp of the loss |
        | eval_rewards/chosen, ... | metrics of preferences or a reward model; they replace accuracy and perplexity |
        | eval_num_rows, eval_num_target_tokens | rows and target tokens |
        | eval_runtime, eval_samples_per_second, eval_tokens_per_second | seconds and rates |

    Raises:
        ValueError: all labels of the rows are masked.
    """
    batches = PackingPlan(rows.lengths, batch_size=batch_size, shuffle=False).epoch(0)
    if max_batches > 0:
        batches = batches[:max_batches]
    process_group = process_group or SingleProcess()
    forward_backward = forward_backward or SequentialSchedule(model)
    objective = objective or CrossEntropy()
    started = time.perf_counter()
    sums = _LossSums(objective)
    with evaluation_mode(model):
        for packs, counts in _local_batches(batches, process_group):
            batch = collate_rows(packs)
            with autocast():
                measured = forward_backward.forward(objective.prepare([batch]), objective.measure)[0]
            if counts:
                sums.add(batch, measured)
    process_group.barrier()
    # Release the parameters that ZeRO-3 gathered, because their owners may update them before the next forward pass.
    process_group.after_micro_batch()
    sums.add_other_processes(process_group)
    return sums.metrics(time.perf_counter() - started)


def _local_batches(batches: Sequence[list[Pack]], process_group: ProcessGroup) -> Iterator[tuple[list[Pack], bool]]:
    """Yield (batch, True) for each batch of this replica, then (dummy batch, False) if the collectives require it.

    If the forward pass is collective (ZeRO-3, expert parallelism), all replicas must run the same number of passes.
    """
    local = batches[process_group.index :: process_group.size]
    yield from ((batch, True) for batch in local)
    if process_group.forward_is_collective and len(local) < math.ceil(len(batches) / process_group.size):
        yield batches[0], False


class _LossSums:
    """Sums of loss, metrics and counts over the batches of an evaluation."""

    def __init__(self, objective: Objective) -> None:
        self._objective = objective
        self._losses: list[float] = []
        self._metric_sums = np.zeros(objective.num_sums)
        self._counts = np.zeros(4, np.int64)  # units of the loss, target tokens, tokens, rows

    def add(self, batch: Any, measured: tuple[paddle.Tensor, np.ndarray] | None) -> None:
        """Add a batch; `measured` is None on a pipeline stage without lm_head."""
        if measured is not None:
            self._losses.append(float(measured[0]))
            self._metric_sums += measured[1]
        num_units = self._objective.num_units(batch)
        self._counts += [num_units, batch.num_target_tokens, batch.num_tokens, len(batch.row_indices)]

    def add_other_processes(self, process_group: ProcessGroup) -> None:
        """Replace each sum with the sum over all stages and replicas."""
        own = [math.fsum(self._losses), *self._metric_sums.tolist()]
        total, *metric_sums = process_group.sum_numbers(process_group.sum_stages(own))
        self._losses, self._metric_sums = [total], np.array(metric_sums)
        self._counts = np.array(process_group.sum_numbers(self._counts.tolist()), np.int64)

    def metrics(self, seconds: float) -> dict[str, float]:
        """Return the result of `evaluate_loss`; `seconds` is the duration of the evaluation.

        Raises:
            ValueError: all labels are masked.
        """
        num_units, num_target_tokens, num_tokens, num_rows = self._counts.tolist()
        if num_units == 0:
            raise ValueError(f"the eval rows have no {self._objective.unit}; add rows with answers")
        mean = math.fsum(self._losses) / num_units
        own = self._objective.eval_metrics(mean, self._metric_sums, num_units)
        return {
            "eval_loss": mean,
            **{f"eval_{name}": value for name, value in own.items()},
            "eval_num_rows": num_rows,
            "eval_num_target_tokens": num_target_tokens,
            "eval_runtime": seconds,
            "eval_samples_per_second": num_rows / seconds,
            "eval_tokens_per_second": num_tokens / seconds,
        }


def evaluate_generation(
    model: Any,
    rows: Any,
    tokenizer: Any,
    config: Any,
    output_file: Path | None,
    process_group: ProcessGroup | None = None,
    labels_file: Path | None = None,
    compute_metrics: ComputeMetrics | None = None,
) -> dict[str, float]:
    """Compute ROUGE, BLEU-4 and exact match of generated answers; with `eval_labels`, also precision, recall and F1.

    Each replica generates answers for a share of the prompts. All replicas return the same result.

    Args:
        model: model to evaluate; an answer ends at a token of `model.eos_token_ids`.
        rows: a TokenizedDataset; `rows.prompts()` yields (prompt ids, reference, src).
        tokenizer: tokenizer that decodes the answers.
        config: the run's configuration; `config.generation` holds the sampling options (`top_k` 1: greedy).
        output_file: JSON Lines file to write, with the keys src, tgt and output; None: no file.
        process_group: processes of the run; None: a single process.
        labels_file: JSON file to write, with the scores of each label; None: no file.
        compute_metrics: function that computes custom metrics on the main process (metrics/custom_metrics.py).

    Raises:
        ValueError: the result of `compute_metrics` is not a mapping from metric names to numbers.
    """
    process_group = process_group or SingleProcess()
    options, train = config.generation, config.train
    limit = train.max_evaluate_steps * train.per_device_eval_batch_size if train.max_evaluate_steps > 0 else None
    prompts = list(itertools.islice(rows.prompts(), limit))
    # Rows are numbered over all replicas, because the random numbers of a prompt depend on the row number.
    rank, size = process_group.index, process_group.size
    local = slice(len(prompts) * rank // size, len(prompts) * (rank + 1) // size)
    started = time.perf_counter()
    generated = model.generate(
        [tokens for tokens, _, _ in prompts[local]],
        max_new_tokens=config.max_answer_tokens,
        decode_strategy="greedy_search" if options.top_k == 1 else "sampling",
        top_k=options.top_k,
        top_p=options.top_p,
        temperature=options.temperature,
        seed=train.seed,
        batch_size=train.per_device_eval_batch_size,
        first_row=local.start,
    )
    answers = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in generated]
    outputs = list(itertools.chain.from_iterable(process_group.gather_objects(answers)))
    answered = [
        {"src": src, "tgt": reference, "output": output}
        for (_, reference, src), output in zip(prompts, outputs, strict=True)
    ]
    if output_file is not None:
        write_text(output_file, "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in answered))
    references = [reference for _, reference, _ in prompts]
    metrics = text_metrics(outputs, references)
    if options.eval_labels:
        report = label_report(outputs, references)
        metrics |= report.metrics()
        if labels_file is not None:
            write_text(labels_file, json.dumps(report.scores(), indent=2, ensure_ascii=False) + "\n")
    if compute_metrics is not None:
        own = custom_metrics(compute_metrics, answered) if process_group.is_main else None
        metrics |= process_group.from_main(own)
    seconds = time.perf_counter() - started
    return {**{f"eval_{name}": value for name, value in metrics.items()}, "eval_generation_runtime": seconds}
