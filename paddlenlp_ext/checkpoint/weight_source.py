"""A set of named tensors on disk, whatever the file format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

import numpy as np

from paddlenlp_ext.sharding_spec import Shard


class WeightSource(ABC):
    """Named tensors on disk, with Hugging Face names, read one at a time."""

    path: Path
    """The file or folder, for messages."""

    @abstractmethod
    def names(self) -> list[str]:
        """All tensor names, in the file's order."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape, without reading it."""

    @abstractmethod
    def dtype(self, name: str) -> str:
        """The stored format by NumPy's name or `bfloat16`; for a quantized tensor, the format it is read in."""

    @abstractmethod
    def read(self, name: str, dtype: str | None = None, cut: Shard | None = None) -> np.ndarray:
        """Read one tensor, or a part of it.

        Args:
            name: one of `names()`.
            dtype: format to return, None for the stored one. `bfloat16` comes as its bits in uint16 (see dtypes.py).
            cut: which part; None for the whole.

        Returns:
            An array to read or write at will. It may be a view of the file: copy what is to stay when that changes.

        Raises:
            ValueError: the file ends early, or the stored format can't become the asked one.
        """
