"""Reference model of preference training, without a second model in memory.

The reference model is the model before training. Before the first step, the log-probabilities of all answers under the
reference model are computed. The log-probabilities are stored in the folder of the token cache; the file name contains
a hash of weights and compute dtype.

Log-probabilities cannot be computed in advance if the reference model follows the trained model
(`ref_model_update_steps`), or if KTO pairs prompts with the answers of other rows in the micro-batch. In these
cases, the run holds a copy of the reference model's trained parameters, and swaps the copy with the current parameters
for each forward pass of the reference model.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from rich.progress import track

from paddlenlp_ext.data.collate import Collate
from paddlenlp_ext.data.packing import PackingPlan
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.paddle_compat import has_storage
from paddlenlp_ext.sharding_spec import is_materialized, placement_of, set_placement, shard_of
from paddlenlp_ext.trainer.optimizers.parameter_groups import trainable_parameters
from paddlenlp_ext.trainer.single_process import ProcessGroup
from paddlenlp_ext.utils.logging import get_logger

logger = get_logger(__name__)
_PREFIX = "reference/"


def fingerprint(model: TrainableModel, settings: Iterable[str], process_group: ProcessGroup) -> str:
    """Return a hash of the model and settings that determine the log-probabilities of the reference model.

    Args:
        model: the model before training. The hash covers the model's config, and the parameters and buffers of all
            processes.
        settings: other settings, such as the compute dtype.
        process_group: processes of the run.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_materialized(tensor) and has_storage(tensor):
            digest.update(f"{name} {tensor.shape} {tensor.dtype}".encode())
            digest.update(tensor.detach().numpy().tobytes())
    config = json.dumps(model.config.source, sort_keys=True)
    parts = [*sorted(process_group.union({digest.hexdigest()})), config, *settings]
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()


def reference_logps(
    rows: Any,
    collate_rows: Collate,
    answer_logps: Callable[[Any], np.ndarray | None],
    batch_size: int,
    process_group: ProcessGroup,
    file: Path,
) -> np.ndarray:
    """Return the log-probabilities of each row's answers, float32 [rows, 2]; read `file`, or compute and write it.

    Args:
        rows: the dataset.
        collate_rows: function that collates a micro-batch.
        answer_logps: function that returns the log-probabilities of a batch's answers; None on stages without lm_head.
        batch_size: number of rows in a batch.
        process_group: processes of the run; each replica computes a share of the batches.
        file: file of the stored log-probabilities.
    """
    if process_group.max_over_processes(float(not file.is_file())) == 0:
        logger.info("log-probabilities of the reference model found in %s", file)
        return np.load(file)
    started, values = time.perf_counter(), np.zeros([len(rows), 2], np.float64)
    batches = PackingPlan(rows.lengths, batch_size=batch_size, shuffle=False).epoch(0)
    rounds = range(0, len(batches), process_group.size)
    shows_bar = process_group.is_main and sys.stderr.isatty()
    for first in track(rounds, "reference model", disable=not shows_bar):
        # With ZeRO-3, all replicas must run the same number of forward passes. A replica without a batch repeats the
        # last batch.
        number = first + process_group.index
        batch = collate_rows(batches[min(number, len(batches) - 1)])
        logps_A = answer_logps(batch)
        if logps_A is not None and number < len(batches):
            ends = np.cumsum([len(rows[index].answer_starts) for index in batch.row_indices])
            for index, logps in zip(batch.row_indices, np.split(logps_A, ends[:-1]), strict=True):
                values[index, : len(logps)] = logps
    summed = process_group.sum_numbers(process_group.sum_stages(values.ravel().tolist()))
    result = np.array(summed, np.float64).reshape(values.shape).astype(np.float32)
    logger.info("log-probabilities of the reference model: %d rows in %.1f s", len(rows), time.perf_counter() - started)
    if process_group.is_main:
        _store(file, result)
    process_group.barrier()
    return result


def _store(file: Path, logps: np.ndarray) -> None:
    """Write the log-probabilities; log a warning if the folder is not writable."""
    draft = file.with_suffix(f".{os.getpid()}.npy")
    try:
        np.save(draft, logps, allow_pickle=False)
        draft.replace(file)
    except OSError as error:
        logger.warning(
            "the log-probabilities of the reference model are not stored (%s), and the next run computes them again; "
            "set data_cache_dir to a writable folder",
            error,
        )


class ReferenceWeights:
    """Copy of the reference model's trained parameters, sharded like the model."""

    def __init__(self, model: TrainableModel) -> None:
        self._model = model
        self._values: dict[str, paddle.Tensor] = {}
        self.copy_model()

    @paddle.no_grad()
    def copy_model(self) -> None:
        """Copy the current parameters of the model to the reference model."""
        for name, parameter in self._parameters():
            self._values[name] = parameter.detach().clone()
            set_placement(
                self._values[name],
                **{field: getattr(placement_of(parameter), field) for field in ("shard", "stages", "is_on_stage")},
            )

    @contextmanager
    def active(self) -> Iterator[None]:
        """Swap the parameters of the reference model into the model inside the block."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def training_state(self) -> dict[str, paddle.Tensor]:
        """Return the tensors to save in a checkpoint, by name."""
        return {f"{_PREFIX}{name}": value for name, value in self._values.items()}

    def restore(self, tensors: Mapping[str, np.ndarray]) -> None:
        """Load the unsharded result of `training_state`.

        Raises:
            ValueError: a tensor is missing, because the run that wrote the checkpoint did not copy the reference model.
        """
        for name, value in self._values.items():
            full = tensors.get(f"{_PREFIX}{name}")
            if full is None:
                raise ValueError(
                    f"the checkpoint has no weights of the reference model ({name}); set loss_type and "
                    "ref_model_update_steps as in the run of the checkpoint, or start a new run with another output_dir"
                )
            shard = shard_of(value)
            value.set_value(np.ascontiguousarray(full if shard is None else full[shard.index]))

    @paddle.no_grad()
    def _exchange(self) -> None:
        for name, parameter in self._parameters():
            current = parameter.detach().clone()
            parameter.set_value(self._values[name])
            self._values[name].set_value(current)

    def _parameters(self) -> list[tuple[str, paddle.Tensor]]:
        """Return the trained parameters whose values this process holds."""
        return [(name, p) for name, p in trainable_parameters(self._model).items() if is_materialized(p)]
