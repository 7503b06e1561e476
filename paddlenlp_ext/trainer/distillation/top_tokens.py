"""Stored log-probabilities of a teacher: of its K most likely tokens at each target position of a dataset.

    teacher_logps_path/
      HASH OF THE ROWS' TOKENS/      the rows of a split; other data, template or tokenizer: another folder
        ids.npy                      int32 [N, K], N target positions of all rows, in the order of the rows
        logps.npy                    float16 [N, K], sorted from the most likely token
        settings.json                teacher, temperature and sizes; written last

A position takes 6 K bytes, 384 bytes for K = 64.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import paddle
from rich.progress import track

from paddlenlp_ext.data.collate import Collate, PackedBatch
from paddlenlp_ext.data.packing import PackingPlan
from paddlenlp_ext.ops.linear_divergence.divergences import log_softmax_
from paddlenlp_ext.trainer.single_process import ProcessGroup
from paddlenlp_ext.utils.files import check_writable, read_json_object, write_json
from paddlenlp_ext.utils.logging import get_logger
from paddlenlp_ext.utils.storage_errors import explained_errors

logger = get_logger("paddlenlp_ext.trainer")
_SETTINGS_FILE = "settings.json"
_FILES: dict[str, type] = {"ids.npy": np.int32, "logps.npy": np.float16}
_ROWS_PER_CHUNK = 128
_SMALLEST_LOGP = np.finfo(np.float16).min
"""Minimum stored log-probability; in float16, a smaller one would be -inf, and the divergence not finite."""


@dataclass(frozen=True)
class StoreSettings:
    """Settings of stored log-probabilities.

    Attributes:
        teacher: fingerprint of the teacher; None: unknown, because the run names no teacher.
        temperature: divisor of the logits.
        top_k: number of tokens per position.
        vocab_size: number of the teacher's logits that are compared.
        num_positions: number of target positions.
    """

    teacher: str | None
    temperature: float
    top_k: int
    vocab_size: int | None
    num_positions: int


@dataclass(frozen=True)
class TopTokens:
    """Most likely tokens of the teacher at the target positions of a dataset, memory-mapped.

    Attributes:
        ids: int32 [N, K].
        logps: float16 [N, K].
        starts: int64 [rows + 1], first target position of each row.
    """

    ids: np.memmap
    logps: np.memmap
    starts: np.ndarray

    def of_rows(self, indices: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids, int64 [R, K], and the log-probabilities, float32 [R, K], of rows in the given order."""
        positions = self.positions(indices)
        return self.ids[positions].astype(np.int64), self.logps[positions].astype(np.float32)

    def positions(self, indices: Sequence[int]) -> np.ndarray:
        """Return the indices of the target positions of rows, in the given order of the rows."""
        return np.concatenate([np.arange(self.starts[index], self.starts[index + 1]) for index in indices])


class TopTokenStore:
    """Folder with the stored log-probabilities for the rows of one split.

    Args:
        path: `teacher_logps_path` of the run.
        rows: the dataset.
        teacher: fingerprint of the teacher; None: the run names no teacher.
        temperature: divisor of the logits.
        top_k: number of tokens per position.
        process_group: processes of the run, which share the folder.
    """

    def __init__(
        self, path: Path, rows: Any, teacher: str | None, temperature: float, top_k: int, process_group: ProcessGroup
    ) -> None:
        self._rows, self._process_group = rows, process_group
        tokens, self._starts = _hash_of_tokens(rows)
        self.folder = path.expanduser() / tokens
        self._wanted = StoreSettings(teacher, temperature, top_k, None, int(self._starts[-1]))

    @property
    def is_complete(self) -> bool:
        """Return whether the log-probabilities of all rows are stored."""
        is_missing = not (self.folder / _SETTINGS_FILE).is_file()
        return self._process_group.max_over_processes(float(is_missing)) == 0

    def read(self, vocab_size: int) -> TopTokens:
        """Map the stored log-probabilities.

        Args:
            vocab_size: vocabulary size of the trained model.

        Raises:
            ValueError: the stored settings differ from the settings of the run, or the files are damaged.
        """
        stored = read_json_object(self.folder / _SETTINGS_FILE)
        wanted, compared = asdict(self._wanted), stored.get("vocab_size")
        # The teacher may have fewer tokens, because the vocabularies are padded to different sizes.
        wanted["vocab_size"] = min(vocab_size, compared) if isinstance(compared, int) else vocab_size
        if self._wanted.teacher is None:
            wanted["teacher"] = stored.get("teacher")
        keys = {
            "teacher": "the hash of the teacher's files, quantization and dtype",
            "temperature": "distillation_temperature",
            "top_k": "teacher_top_k",
        }
        changes = [
            f"{keys.get(name, name)} was {stored.get(name)}, now {value}"
            for name, value in wanted.items()
            if stored.get(name) != value
        ]
        if changes:
            raise ValueError(
                f"teacher_logps_path: {self.folder} has log-probabilities with other settings: {'; '.join(changes)}; "
                "restore the settings, choose another teacher_logps_path, or delete the folder"
            )
        logger.info("log-probabilities of the teacher found in %s", self.folder)
        return self._map("r")

    def write(
        self,
        vocab_size: int,
        collate_rows: Collate,
        batch_size: int,
        teacher_logits: Callable[[PackedBatch], Callable[[slice], paddle.Tensor]],
    ) -> None:
        """Compute and store the log-probabilities of all rows; each replica computes a share of the batches.

        Args:
            vocab_size: number of the teacher's logits that are compared.
            collate_rows: function that collates a micro-batch.
            batch_size: number of rows in a batch.
            teacher_logits: function that runs the teacher on a batch, and returns the function from a range of the
                batch's target positions to their logits [R, V].

        Raises:
            ValueError: the teacher's log-probabilities are not finite, `top_k` exceeds `vocab_size`, the disk is full,
                or the folder is not writable.
        """
        started = time.perf_counter()
        settings = replace(self._wanted, vocab_size=vocab_size)
        if settings.top_k > vocab_size:
            raise ValueError(
                f"teacher_top_k: {settings.top_k:,} is more than the {vocab_size:,} tokens of both models; lower it"
            )
        group = self._process_group
        if group.is_main:
            self._create_files()
        group.barrier()
        tops = self._map("r+")
        batches = PackingPlan(self._rows.lengths, batch_size=batch_size, shuffle=False).epoch(0)
        shows_bar = group.is_main and sys.stderr.isatty()
        for packs in track(batches[group.index :: group.size], "teacher", disable=not shows_bar):
            batch = collate_rows(packs)
            logits, positions = teacher_logits(batch), tops.positions(batch.row_indices)
            for first in range(0, len(positions), _ROWS_PER_CHUNK):
                chunk = slice(first, first + _ROWS_PER_CHUNK)
                ids, logps = self._most_likely(logits(chunk)[:, :vocab_size])
                tops.ids[positions[chunk]], tops.logps[positions[chunk]] = ids, logps
        tops.ids.flush()
        tops.logps.flush()
        group.barrier()
        if group.is_main:
            write_json(self.folder / _SETTINGS_FILE, asdict(settings))
        group.barrier()
        seconds, count = time.perf_counter() - started, settings.num_positions
        logger.info("log-probabilities of the teacher: %d target tokens in %.1f s", count, seconds)

    def _map(self, mode: Literal["r", "r+"]) -> TopTokens:
        """Map the files.

        Raises:
            ValueError: a file is missing or damaged.
        """
        shape, arrays = (self._wanted.num_positions, self._wanted.top_k), []
        for file in _FILES:
            try:
                arrays.append(np.lib.format.open_memmap(self.folder / file, mode))
            except (OSError, ValueError) as error:
                raise ValueError(
                    f"teacher_logps_path: {self.folder / file} cannot be read ({error}); delete the folder"
                ) from error
        if any(array.shape != shape for array in arrays) or [array.dtype for array in arrays] != [*_FILES.values()]:
            raise ValueError(
                f"teacher_logps_path: the files in {self.folder} have a wrong shape or dtype; delete the folder"
            )
        return TopTokens(arrays[0], arrays[1], self._starts)

    def _create_files(self) -> None:
        """Create files of the final size.

        Disk space is allocated for the whole files, because a write to a memory map of a full disk kills the process.
        """
        shape = (self._wanted.num_positions, self._wanted.top_k)
        check_writable(self.folder, "teacher_logps_path")
        with explained_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            for file, dtype in _FILES.items():
                np.lib.format.open_memmap(self.folder / file, "w+", dtype, shape).flush()
                with (self.folder / file).open("r+b") as stream:
                    os.posix_fallocate(stream.fileno(), 0, os.fstat(stream.fileno()).st_size)

    def _most_likely(self, logits_RV: paddle.Tensor) -> tuple[np.ndarray, np.ndarray]:
        logps_RV = log_softmax_(logits_RV.astype("float32") / self._wanted.temperature)
        logps_RK, ids_RK = paddle.topk(logps_RV, self._wanted.top_k, axis=1)
        logps = logps_RK.numpy()
        if not np.isfinite(logps).all():
            raise ValueError("the log-probabilities of the teacher are not finite; check its weights, or set bf16")
        return ids_RK.numpy().astype(np.int32), np.maximum(logps, _SMALLEST_LOGP).astype(np.float16)


def _hash_of_tokens(rows: Any) -> tuple[str, np.ndarray]:
    """Return a hash of the tokens and loss masks of all rows, and the first target position of each row."""
    digest, counts = hashlib.blake2b(digest_size=16), [0]
    for index in range(len(rows)):
        row = rows[index]
        digest.update(np.int64(len(row.tokens)).tobytes())
        digest.update(np.ascontiguousarray(row.tokens, np.int32).tobytes())
        digest.update(np.ascontiguousarray(row.loss_mask, bool).tobytes())
        counts.append(int(np.count_nonzero(row.loss_mask[1:])))
    return digest.hexdigest(), np.cumsum(counts)
