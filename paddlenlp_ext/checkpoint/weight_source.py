"""Common interface of all weight formats for reading named tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

import numpy as np

from paddlenlp_ext.sharding_spec import Shard


class WeightSource(ABC):
    """Stored tensors under their Hugging Face names, read one at a time."""

    path: Path
    """Path of the file or folder, for error messages."""

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names of all tensors in file order."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading it."""

    @abstractmethod
    def dtype(self, name: str) -> str:
        """Return the dtype of a tensor (a NumPy name or `bfloat16`); for a quantized tensor, the dequantized dtype."""

    @abstractmethod
    def read(self, name: str, dtype: str | None = None, shard: Shard | None = None) -> np.ndarray:
        """Read a full tensor, or one shard of the tensor.

        Args:
            name: one of `names()`.
            dtype: dtype of the result; None: the dtype that `dtype(name)` returns. bfloat16 is returned as its bits in
                uint16 (dtypes.py).
            shard: shard to read; None: the full tensor.

        Returns:
            A writable array. Copy the array if the file can change, because the array may be a view of the file.

        Raises:
            ValueError: the file is truncated, or the stored dtype cannot be converted to `dtype`.
        """
