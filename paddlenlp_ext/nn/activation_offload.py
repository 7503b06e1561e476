"""Activation offloading: from a GPU to pinned host memory (untested), or from the CPU to a temporary file."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Protocol

import numpy as np
import paddle

from paddlenlp_ext.devices import capabilities
from paddlenlp_ext.utils.logging import get_logger

logger = get_logger(__name__)
_IN_MEMORY = ("tmpfs", "ramfs")
"""File system types that keep files in main memory."""


class OffloadedTensor(Protocol):
    """Tensor whose values were moved off the device."""

    def load(self) -> paddle.Tensor:
        """Copy the tensor back to its device, and return it with the same bits and the same `stop_gradient`."""
        ...


def offload(x: paddle.Tensor) -> OffloadedTensor:
    """Copy a tensor off its device. Deleting the returned object frees the copy.

    Raises:
        ValueError: the tensor cannot be written to the temporary folder.
    """
    return _PinnedTensor(x) if capabilities(x.place).pinned_memory else _FileTensor(x)


class _PinnedTensor:
    def __init__(self, x: paddle.Tensor) -> None:
        self._pinned, self._place, self._stop_gradient = x.detach().pin_memory(), x.place, x.stop_gradient

    def load(self) -> paddle.Tensor:
        x = self._pinned.to(self._place, blocking=True)  # the host memory may be freed right after the call
        x.stop_gradient = self._stop_gradient
        return x


class _FileTensor:
    """Tensor in an unnamed temporary file. The operating system deletes the file on close, even after a crash."""

    def __init__(self, x: paddle.Tensor) -> None:
        _describe_folder()
        self._shape, self._dtype, self._stop_gradient = list(x.shape), x.dtype, x.stop_gradient
        values = x.detach().numpy()
        self._values_dtype = values.dtype
        try:
            self._file = tempfile.TemporaryFile(prefix="paddlenlp_ext-")  # noqa: SIM115 (open until the tensor is deleted)
            # On a full disk, `write` raises OSError. Writing to a memory mapping would kill the process with SIGBUS.
            self._file.write(np.ascontiguousarray(values).data)
            self._file.flush()
        except OSError as error:
            raise ValueError(
                f"offload_recompute_inputs: cannot write {values.nbytes / 1e6:,.1f} MB to {tempfile.gettempdir()} "
                f"({error.strerror}); set TMPDIR to a folder with more space, or set offload_recompute_inputs: false"
            ) from error

    def load(self) -> paddle.Tensor:
        x = paddle.empty(self._shape, self._dtype)
        x.set_value(np.memmap(self._file, self._values_dtype, "r", shape=tuple(self._shape)))
        x.stop_gradient = self._stop_gradient
        return x


@functools.cache
def _describe_folder() -> None:
    """Log the temporary folder once, and warn if its files are in main memory."""
    folder = tempfile.gettempdir()
    system = file_system(folder)
    if system in _IN_MEMORY:
        logger.warning(
            "offload_recompute_inputs does not save memory: %s is on a %s file system, which keeps files in main "
            "memory. Set TMPDIR to a folder on a disk",
            folder,
            system,
        )
    else:
        logger.info("offload_recompute_inputs writes temporary files to %s; set TMPDIR to change the folder", folder)


def file_system(folder: str) -> str | None:
    """Return the type of a folder's file system from /proc/mounts, or None if it is unknown."""
    mounts, resolved = Path("/proc/mounts"), Path(folder).resolve()
    lines = mounts.read_text(encoding="utf-8").splitlines() if mounts.exists() else []
    types = {Path(place): kind for _, place, kind, *_ in (line.split() for line in lines)}
    return next((types[place] for place in (resolved, *resolved.parents) if place in types), None)
