"""Save checkpoints; with `use_async_save`, a background thread completes the checkpoints.

    training                                            background thread of the main process
    gather all tensors and write all files  -------->   hash and flush the files, rename the folder,
    next steps                                          remove old checkpoints
    next checkpoint, or end of training: wait  <-----

All files are written before training continues, so that all tensors of a checkpoint are from the same step and no
copies are needed in memory. Only the work of the background thread overlaps with training.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from paddlenlp_ext.config import RunConfig
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.trainer.checkpoints.output_dir import checkpoint_folder, prune_checkpoints
from paddlenlp_ext.trainer.checkpoints.save_and_restore import write_checkpoint
from paddlenlp_ext.trainer.objectives.objective import Objective
from paddlenlp_ext.trainer.optimizers.optimizer_state import Optimizer
from paddlenlp_ext.trainer.single_process import ProcessGroup
from paddlenlp_ext.trainer.stopping.max_train_time import TimeLimit
from paddlenlp_ext.trainer.trainer_state import TrainerState
from paddlenlp_ext.utils.logging import get_logger

logger = get_logger(__name__)


class CheckpointSaver:
    """Saver of a run's checkpoints; at most one checkpoint is incomplete at a time.

    Args:
        config: the run's configuration.
        process_group: processes of the run. Every method is collective: all processes call it.
        time_limit: the run's `TimeLimit`, which also records how long checkpoints take.
        on_save: function called with the folder of each complete checkpoint.
    """

    def __init__(
        self, config: RunConfig, process_group: ProcessGroup, time_limit: TimeLimit, on_save: Callable[[Path], None]
    ) -> None:
        self.config, self.process_group, self.on_save = config, process_group, on_save
        self.time_limit = time_limit
        self._thread = ThreadPoolExecutor(1)
        self._incomplete: tuple[Future[None], Path] | None = None

    def save(
        self, state: TrainerState, model: TrainableModel, tokenizer: Any, optimizer: Optimizer, objective: Objective
    ) -> None:
        """Write a checkpoint. The checkpoint is complete after `save`, or with `use_async_save`, after `wait`.

        Raises:
            StorageError: this checkpoint or the previous checkpoint cannot be written. Earlier checkpoints are
                unchanged.
        """
        train = self.config.train
        assert train.output_dir is not None, "check_output_dir requires output_dir"
        output_dir, step, keep = train.output_dir, state.step, (state.best_step, state.healthy_step)
        folder = checkpoint_folder(output_dir, step)
        with self.time_limit.measured("write"):
            self.wait()
            complete = write_checkpoint(
                folder, model, tokenizer, optimizer, objective, state, self.config, self.process_group
            )

        def complete_and_prune() -> None:
            with self.time_limit.measured("complete"):
                complete()
                if self.process_group.is_main:
                    prune_checkpoints(output_dir, train.save_total_limit, step, keep)

        self._incomplete = self._thread.submit(complete_and_prune), folder
        if not train.use_async_save:
            self.wait()

    def wait(self) -> None:
        """Wait until the last checkpoint is complete on all processes.

        Raises:
            StorageError: the checkpoint cannot be written.
        """
        if self._incomplete is None:
            return
        (future, folder), self._incomplete = self._incomplete, None
        future.result()
        self.process_group.barrier()
        self.on_save(folder)

    def close(self) -> None:
        """Wait for the background thread at the end of a run; log an error if the last checkpoint was not saved."""
        self._thread.shutdown()
        if self._incomplete is not None and (error := self._incomplete[0].exception()) is not None:
            logger.error("checkpoint %s was not saved: %s", self._incomplete[1], error)
