"""Evaluate a model on the dev sets or test rows of a run: loss, and metrics of generated answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from paddlenlp_ext.config import RunConfig
from paddlenlp_ext.data.collate import Collate
from paddlenlp_ext.data.dataset import TokenizedDataset
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.trainer.evaluate import evaluate_generation, evaluate_loss
from paddlenlp_ext.trainer.forward_backward import ForwardBackward
from paddlenlp_ext.trainer.metrics.custom_metrics import ComputeMetrics
from paddlenlp_ext.trainer.objectives.objective import Objective
from paddlenlp_ext.trainer.single_process import ProcessGroup
from paddlenlp_ext.trainer.train_step import autocast

TEST = "test"
"""Prefix of the metric names of test rows, and part of the names of result files."""


class Evaluator:
    """Evaluator of a run's dev sets and test rows.

    Args:
        model, config, tokenizer, process_group, forward_backward, objective: see `Trainer`.
        eval_rows: rows of a dev set, or a mapping from names to the rows of several dev sets; None: no dev set.
        output_dir: folder for generated answers and label scores.
        collate_for: function that returns the collate function of a dataset.
        compute_metrics: function that computes custom metrics; None: no custom metrics.

    Attributes:
        dev_sets: rows of each dev set by name. The name of a single dev set is "".

    Raises:
        ValueError: the configuration requests an evaluation without eval rows.
    """

    def __init__(
        self,
        model: TrainableModel,
        config: RunConfig,
        eval_rows: TokenizedDataset | Mapping[str, TokenizedDataset] | None,
        tokenizer: Any,
        output_dir: Path,
        *,
        collate_for: Callable[[Any], Collate],
        compute_metrics: ComputeMetrics | None,
        process_group: ProcessGroup,
        forward_backward: ForwardBackward,
        objective: Objective,
    ) -> None:
        dev_sets = eval_rows if isinstance(eval_rows, Mapping) else {"": eval_rows}
        self.dev_sets = {name: rows for name, rows in dev_sets.items() if rows is not None}
        if not self.dev_sets and (config.train.evaluates_before_end or config.train.load_best_model_at_end):
            raise ValueError(
                "evaluation_strategy, eval_on_start or load_best_model_at_end needs eval rows; set do_eval: true and "
                "provide a dev split"
            )
        self.model, self.config, self.tokenizer, self.output_dir = model, config, tokenizer, output_dir
        self.collate_for, self.compute_metrics = collate_for, compute_metrics
        self.process_group, self.forward_backward, self.objective = process_group, forward_backward, objective

    def metrics(self) -> dict[str, float]:
        """Return the metrics of all dev sets. All processes return the values of the main process."""
        assert self.dev_sets, "evaluation requires eval_rows"
        metrics: dict[str, float] = {}
        for name, rows in self.dev_sets.items():
            metrics |= with_dev_set(self._metrics_of(name, rows), name)
        return self.process_group.from_main(metrics)

    def test_metrics(self, rows: TokenizedDataset) -> dict[str, float]:
        """Return the metrics of test rows, such as test_loss.

        `eval_with_do_generation` adds metrics of generated answers. With `save_generation_output`, the answers are
        written to generated_output_test.json.
        """
        metrics = self._metrics_of(TEST, rows)
        named = {f"{TEST}_{key.removeprefix('eval_')}": value for key, value in metrics.items()}
        return self.process_group.from_main(named)

    def _metrics_of(self, name: str, rows: TokenizedDataset) -> dict[str, float]:
        metrics = self._loss_metrics(rows)
        if self.config.generation.eval_with_do_generation:
            metrics |= self._generation_metrics(name, rows)
        return metrics

    def _loss_metrics(self, rows: TokenizedDataset) -> dict[str, float]:
        return evaluate_loss(
            self.model,
            rows,
            self.collate_for(rows),
            batch_size=self.config.train.per_device_eval_batch_size,
            max_batches=self.config.train.max_evaluate_steps,
            process_group=self.process_group,
            autocast=partial(autocast, self.config.precision),
            forward_backward=self.forward_backward,
            objective=self.objective,
        )

    def _generation_metrics(self, name: str, rows: TokenizedDataset) -> dict[str, float]:
        options, is_main, suffix = self.config.generation, self.process_group.is_main, f"_{name}" if name else ""
        answers_file = self.output_dir / f"generated_output{suffix}.json"
        labels_file = self.output_dir / f"label_scores{suffix}.json"
        with self.process_group.gathered_parameters():
            return evaluate_generation(
                self.model,
                rows,
                self.tokenizer,
                self.config,
                answers_file if is_main and options.save_generation_output else None,
                self.process_group,
                labels_file if is_main and options.eval_labels else None,
                self.compute_metrics,
            )


def with_dev_set(metrics: dict[str, float], name: str) -> dict[str, float]:
    """Insert the name of a dev set into metric names, as in eval_math_loss. The name "" changes nothing."""
    return {f"eval_{name}_{key.removeprefix('eval_')}": value for key, value in metrics.items()} if name else metrics
