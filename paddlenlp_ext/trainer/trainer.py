"""Training loop: optimizer steps, evaluations, log entries and checkpoints."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

from paddlenlp_ext.config import RunConfig
from paddlenlp_ext.config.validation import check_trainer_config
from paddlenlp_ext.data.data_order import DataOrder
from paddlenlp_ext.data.dataset import TokenizedDataset
from paddlenlp_ext.data.sampler import build_data_order, data_order_settings
from paddlenlp_ext.data.step_batch import StepBatch
from paddlenlp_ext.data.streaming.step_order import StreamOrder
from paddlenlp_ext.data.training_rows import TrainingRows
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.quantization.int8_training import keep_activations
from paddlenlp_ext.trainer.callbacks.callback import Callback, CallbackList
from paddlenlp_ext.trainer.callbacks.default_callbacks import build_reports
from paddlenlp_ext.trainer.callbacks.load_callbacks import load_callbacks
from paddlenlp_ext.trainer.callbacks.metrics_files import num_trainable, save_results, train_results
from paddlenlp_ext.trainer.callbacks.progress import describe_metrics, describe_results
from paddlenlp_ext.trainer.callbacks.transformers_callback import TrainerControl, TransformersCallbackAdapter
from paddlenlp_ext.trainer.checkpoints.async_save import CheckpointSaver
from paddlenlp_ext.trainer.checkpoints.output_dir import (
    begin_output_dir,
    check_output_dir,
    checkpoint_folder,
    locked_output_dir,
)
from paddlenlp_ext.trainer.checkpoints.resume import begin_or_resume, load_best_checkpoint
from paddlenlp_ext.trainer.checkpoints.save_and_restore import restore_checkpoint, save_finished
from paddlenlp_ext.trainer.evaluate_dev_sets import TEST, Evaluator
from paddlenlp_ext.trainer.forward_backward import ForwardBackward, SequentialSchedule
from paddlenlp_ext.trainer.hub import check_push, push_run
from paddlenlp_ext.trainer.lr_scheduler import build_schedule, warn_of_full_warmup
from paddlenlp_ext.trainer.metrics.custom_metrics import ComputeMetrics, load_compute_metrics
from paddlenlp_ext.trainer.objectives.build_objective import build_objective
from paddlenlp_ext.trainer.objectives.objective import Objective
from paddlenlp_ext.trainer.optimizers.build_optimizer import build_optimizer, build_rounding, offload_state
from paddlenlp_ext.trainer.single_process import ProcessGroup, SingleProcess
from paddlenlp_ext.trainer.stability.nan_and_loss_spikes import RollbackRequest, StepGuard
from paddlenlp_ext.trainer.stability.rollback import roll_back
from paddlenlp_ext.trainer.stopping.early_stopping import BestMetricTracker
from paddlenlp_ext.trainer.stopping.max_train_time import TimeLimit
from paddlenlp_ext.trainer.stopping.signals import StopSignals, stopped_after
from paddlenlp_ext.trainer.train_step import OptimizerStep, StepOptions
from paddlenlp_ext.trainer.trainer_state import TrainerState
from paddlenlp_ext.utils.locks import check_no_active_run
from paddlenlp_ext.utils.logging import get_logger

logger = get_logger(__name__)


class Trainer:
    """Trainer of a `CausalLM` or `PeftModel` on tokenized rows.

    Args:
        model: model to train; parameters with `stop_gradient=True` are frozen.
        config: the run's configuration.
        train_rows: tokenized rows of the train split; None if the trainer only evaluates.
        eval_rows: tokenized rows of the eval split (dev.json); or a mapping from names to the rows of several dev sets,
            with metrics such as `eval_<name>_loss`; None without evaluation.
        tokenizer: tokenizer that decodes generated text and is saved with the weights.
        compute_metrics: function that computes custom metrics of generated answers (metrics/custom_metrics.py); None:
            the function that the key `compute_metrics` names.
        callbacks: callbacks in addition to the default callbacks (callbacks/default_callbacks.py) and the callbacks
            that the key `callbacks` names; see `add_callback`.
        process_group: processes of the run; None: a single process.
        forward_backward: schedule of micro-batches; None: in sequence.
        objective: loss and metrics of the run; None: preference training if the configuration has the section
            `preference`, a reward model if it has the section `reward`, distillation if it names a teacher, else
            supervised fine-tuning.

    Attributes:
        state: progress of the run.
        started: `time.monotonic()` at the start of the run; `max_train_time` is measured from this time.

    Raises:
        ValueError: the configuration requests an evaluation without eval rows, or an unavailable feature.
    """

    def __init__(
        self,
        model: TrainableModel,
        config: RunConfig,
        train_rows: TrainingRows | None,
        eval_rows: TokenizedDataset | Mapping[str, TokenizedDataset] | None,
        tokenizer: Any,
        *,
        compute_metrics: ComputeMetrics | None = None,
        callbacks: Iterable[Any] = (),
        process_group: ProcessGroup | None = None,
        forward_backward: ForwardBackward | None = None,
        objective: Objective | None = None,
    ) -> None:
        check_trainer_config(config)
        check_push(config.train)
        self.model, self.config, self.train_rows, self.tokenizer = model, config, train_rows, tokenizer
        self.process_group = process_group or SingleProcess()
        self.forward_backward = forward_backward or SequentialSchedule(model)
        self.objective = objective or build_objective(
            config, model, self.forward_backward, self.process_group, tokenizer
        )
        assert config.train.output_dir is not None, "check_output_dir requires output_dir"
        self.output_dir = Path(config.train.output_dir)
        self.state = TrainerState()
        self.started = time.monotonic()
        self._last_saved: tuple[int, bool] | None = None
        self._last_metrics: tuple[int, dict[str, float]] | None = None
        pad, vocab_size = getattr(tokenizer, "pad_token_id", None) or 0, model.config.vocab_size
        self._collate = cache(partial(self.objective.build_collate, pad_token_id=pad, vocab_size=vocab_size))
        self.evaluator = Evaluator(
            model,
            config,
            eval_rows,
            tokenizer,
            self.output_dir,
            collate_for=self._collate,
            compute_metrics=compute_metrics or load_compute_metrics(config.generation.compute_metrics),
            process_group=self.process_group,
            forward_backward=self.forward_backward,
            objective=self.objective,
        )
        has_custom_metrics = self.evaluator.compute_metrics is not None
        self.best = BestMetricTracker(config.train, tuple(self.evaluator.dev_sets) or ("",), has_custom_metrics)
        self.control = TrainerControl()
        self._added_callbacks: list[Callback] = []
        self._has_requests = False
        for callback in (*load_callbacks(config.train.callbacks), *callbacks):
            self.add_callback(callback)

    # -- public methods -----------------------------------------------------------------------------------------------
    def add_callback(self, callback: Any) -> None:
        """Add a callback. Call this method before `train`, on all processes of a run.

        Args:
            callback: an instance or class of `Callback`, or of a `TrainerCallback` with the signatures of transformers.
        """
        added = callback() if isinstance(callback, type) else callback
        if not isinstance(added, Callback):
            added = TransformersCallbackAdapter(added, self.config, self.control, self.model, self.tokenizer)
            self._has_requests = True
        self._added_callbacks.append(added)

    def train(self) -> dict[str, float]:
        """Start or resume training. If `push_to_hub` is set, upload the model afterwards.

        Returns:
            The contents of train_results.json.

        Raises:
            UploadError: the upload failed; the trained model is saved.
            ValueError: see `train_without_upload`.
        """
        results = self.train_without_upload()
        if self.config.train.push_to_hub:
            self.push_to_hub()
        return results

    def train_without_upload(self) -> dict[str, float]:
        """Start or resume training. The model is not uploaded, even with `push_to_hub`.

        Returns:
            The contents of train_results.json.

        Raises:
            NonFiniteError: the loss or gradient norm is not finite, and `nan_policy` or `max_nan_steps` ends the run.
            TrainingStopped: a signal or `max_train_time` requested a stop; the run can be resumed.
            ValueError: output_dir, checkpoint or configuration is invalid.
        """
        with locked_output_dir(self.config):
            return self._train()

    def _train(self) -> dict[str, float]:
        order, step = self._prepare()
        is_alone = isinstance(self.process_group, SingleProcess)
        with StopSignals(None if is_alone else self.process_group.max_over_processes, self.time_limit) as signals:
            self.callbacks.call("on_train_begin", self.state)
            try:
                self._run(order, step, signals)
                self.saver.wait()
            except BaseException as error:
                self.callbacks.call("on_error", self.state, error)
                raise
            finally:
                self.saver.close()
                self.callbacks.call("on_train_end", self.state)
                step.remove_hooks()
        loads_best = self.config.train.load_best_model_at_end
        if loads_best and load_best_checkpoint(self.output_dir, self.state, self.model, self.process_group):
            self._last_metrics = None
        results = train_results(self.state, self.model)
        if self.process_group.is_main:
            save_results(self.output_dir, "train", results)
        logger.info("trained: %s", describe_results(results))
        return results

    def evaluate(self) -> dict[str, float]:
        """Evaluate on the eval rows, or reuse the last step's metrics; write eval_results.json; return the metrics."""
        step, metrics = self._last_metrics or (-1, {})
        return self._results("eval", lambda: metrics if step == self.state.step else self.evaluator.metrics())

    def predict(self, test_rows: TokenizedDataset) -> dict[str, float]:
        """Evaluate on test rows, write test_results.json and return the metrics, such as test_loss."""
        return self._results(TEST, lambda: self.evaluator.test_metrics(test_rows))

    def _results(self, split: str, compute: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Compute metrics, write them to `<split>_results.json` and log them."""
        if self.process_group.is_main:
            check_no_active_run(self.output_dir)
            self.output_dir.mkdir(parents=True, exist_ok=True)
        metrics = compute()
        if self.process_group.is_main:
            save_results(self.output_dir, split, metrics)
        logger.info("%s: %s", "tested" if split == TEST else "evaluated", describe_metrics(metrics))
        return metrics

    def save_model(self, folder: str | Path | None = None) -> None:
        """Write the finished model or adapter and the tokenizer to `folder`, by default `output_dir`."""
        save_finished(Path(folder or self.output_dir), self.model, self.tokenizer, self.process_group)

    def push_to_hub(self) -> str | None:
        """Write the model or adapter to `output_dir`, and upload it with its results to the Hugging Face hub.

        The keys `hub_model_id` and `hub_private_repo` select the repository.

        Returns:
            The address of the repository; None in the other processes of a run.

        Raises:
            UploadError: the upload failed; the model is saved.
        """
        self.save_model()
        return push_run(self.config.train) if self.process_group.is_main else None

    # -- before the first step ----------------------------------------------------------------------------------------
    def _prepare(self) -> tuple[DataOrder | StreamOrder, OptimizerStep]:
        """Build data order, schedule, optimizer and callbacks of a run; restore the checkpoint of a resumed run."""
        config, train, rows, is_main = self.config, self.config.train, self.train_rows, self.process_group.is_main
        assert rows is not None, "training requires train_rows"
        if is_main:
            check_output_dir(config)
        order = build_data_order(config, rows, self.process_group.size)
        self.schedule = build_schedule(config.optim, order.total_steps)
        warn_of_full_warmup(config.optim, order.total_steps)
        facts = data_order_settings(config, rows, self.process_group.size)
        begun = begin_or_resume(config, facts, order.total_steps, self.best.name) if is_main else None
        checkpoint, self.state = self.process_group.from_main(begun)
        if is_main:
            begin_output_dir(self.output_dir, checkpoint, train.overwrite_output_dir, config.to_flat_dict())

        self.model.train()
        rounding = build_rounding(self.model, config.precision, train.seed)
        self.optimizer = build_optimizer(self.model, config.optim, rounding, self.process_group.gather_shards)
        if config.optim.offload_optim or "offload" in config.parallel.sharding.split():
            self.optimizer = offload_state(self.model, self.optimizer)
        options = StepOptions.from_config(config, self.model, order.total_steps, rounding)
        collate_rows, *_ = map(self._collate, (rows, *self.evaluator.dev_sets.values()))
        step = OptimizerStep(
            self.model, self.optimizer, collate_rows, self.process_group, options, self.forward_backward, self.objective
        )
        if checkpoint is None:
            step.prepare_adapter(order.step_batches())
        self.objective.begin()
        if checkpoint is not None:
            restore_checkpoint(checkpoint, self.model, self.optimizer, self.objective, self.process_group)
        if config.model.int8_training:
            if self.state.float_layers is None:
                self.state.float_layers = step.choose_int8_layers(order.step_batches())
            keep_activations(self.model, self.state.float_layers)
        reports = build_reports(config, self.output_dir, rows) if is_main else []
        self.callbacks = CallbackList([*reports, *self._added_callbacks])
        self.time_limit = TimeLimit(config.safety.max_train_seconds, num_trainable(self.model), self.started)
        self.saver = CheckpointSaver(
            config, self.process_group, self.time_limit, lambda path: self.callbacks.call("on_save", self.state, path)
        )
        return order, step

    # -- training loop ------------------------------------------------------------------------------------------------
    def _run(self, order: DataOrder | StreamOrder, step: OptimizerStep, signals: StopSignals) -> None:
        guard = StepGuard(self.config.safety, self.train_rows, self.output_dir if self.process_group.is_main else None)
        training = (self.model, self.optimizer, self.objective, self.process_group)
        while True:
            remaining = order.step_batches(self.state.epoch_index, self.state.batch_index, self.state.data_cursor)
            try:
                return self._run_steps(remaining, step, guard, signals)
            except RollbackRequest as request:
                self.saver.wait()
                self.state = roll_back(request.error, self.output_dir, self.state, *training)
            self._last_saved = self._last_metrics = None
            self.callbacks.call("on_rollback", self.state)

    def _run_steps(
        self, step_batches: Iterable[StepBatch], step: OptimizerStep, guard: StepGuard, signals: StopSignals
    ) -> None:
        state = self.state
        if state.evaluation_due and self.config.train.evaluates_before_end:
            self._evaluate_and_save_best(signals)
            if signals.received is not None:
                self._stop(signals.received)
        for step_batch in itertools.islice(step_batches, max(0, state.total_steps - state.step)):
            if self.best.stops_early(state):
                return self._log_steps()
            with self.time_limit.measured("step"):
                report = guard.run(step, step_batch, state, self.schedule(state.schedule_step))
            state.move_to(step_batch)
            if report is None:
                state.skip()
                self.callbacks.call("on_skip", state)
            else:
                state.add(report)
                self.callbacks.call("on_step_end", state, report)
            next_part = "step" if state.step < state.total_steps else None
            signals.synchronize(next_part)
            if self._after_step(step_batch, signals):
                signals.synchronize(next_part)
            if signals.received is not None:
                self._stop(signals.received)
            if self._is_requested("should_training_stop"):
                logger.info("step %d: a callback requested the end of training", state.step)
                return self._log_steps()

    def _is_requested(self, request: str) -> bool:
        """Return whether a callback of the main process set the field `request` of `control`, and reset the field."""
        is_requested = self.control.take(request)
        return self.process_group.from_main(is_requested) if self._has_requests else is_requested

    def _after_step(self, step_batch: StepBatch, signals: StopSignals) -> bool:
        """Log, evaluate and save if due; return whether the run evaluated or saved.

        After a stop signal, an evaluation that is due is postponed to the resumed run.
        """
        train, state = self.config.train, self.state
        if self._is_requested("should_log") or state.step % train.logging_steps == 0 or state.step == state.total_steps:
            self._log_steps()
        evaluates = self._is_due(train.evaluation_strategy, train.eval_steps or train.logging_steps, step_batch)
        evaluates = self._is_requested("should_evaluate") or evaluates
        if evaluates:
            state.evaluation_due = True
            signals.synchronize("evaluation")
            if signals.received is None:
                self._evaluate_and_save_best(signals)
        saves = self._is_requested("should_save") or self._is_due(train.save_strategy, train.save_steps, step_batch)
        saves = saves or signals.received is not None
        if saves:
            self._save()
        return evaluates or saves

    def _is_due(self, strategy: str, every: int, step_batch: StepBatch) -> bool:
        if strategy == "epoch":
            return step_batch.is_last or self.state.step == self.state.total_steps
        return strategy == "steps" and self.state.step % every == 0

    def _stop(self, reason: int) -> None:
        state = self.state
        self._save()
        self.saver.wait()
        raise stopped_after(state.step, state.total_steps, reason, checkpoint_folder(self.output_dir, state.step))

    # -- evaluation, log entries, checkpoints -------------------------------------------------------------------------
    def _evaluate_and_save_best(self, signals: StopSignals) -> None:
        """Evaluate, log and save a new best model. In a single process, a signal interrupts the evaluation."""
        state, metrics = self.state, None
        with self.callbacks.phase("evaluating", state), signals.interruptible(), self.time_limit.measured("evaluation"):
            metrics = self.evaluator.metrics()
        signals.synchronize()
        if metrics is None:
            return
        self._last_metrics = (state.step, metrics)
        state.evaluation_due = False
        self._log({"step": state.step, "epoch": state.epoch, **metrics})
        self.callbacks.call("on_evaluate", state, metrics)
        if self.best.update(state, metrics) and self.config.train.load_best_model_at_end:
            self._save()

    def _log_steps(self) -> None:
        """Log the steps since the last log entry, if any."""
        if self.state.interval.num_steps:
            self._log(self.state.next_log_entry(self.schedule(self.state.schedule_step - 1)))

    def _log(self, entry: dict[str, Any]) -> None:
        self.state.log_history.append(entry)
        self.callbacks.call("on_log", self.state, entry)

    def _save(self) -> None:
        state = self.state
        if self._last_saved == (state.step, state.evaluation_due):  # already saved
            return
        state.note_checkpoint()
        with self.callbacks.phase("saving", state):
            self.saver.save(state, self.model, self.tokenizer, self.optimizer, self.objective)
        self._last_saved = (state.step, state.evaluation_due)
