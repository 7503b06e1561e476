"""CPU arrays with the part of PyTorch's tensor interface that Triton's interpreter needs."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle


class HostArray:
    """Contiguous array or Paddle tensor on the CPU; `dtype` is its dtype in Triton's notation.

    A bfloat16 array holds its bits as uint16.
    """

    def __init__(self, array: np.ndarray | paddle.Tensor, dtype: str | None = None) -> None:
        self.array, self.dtype = array, dtype or str(array.dtype)

    def data_ptr(self) -> int:
        return self.array.ctypes.data if isinstance(self.array, np.ndarray) else self.array.data_ptr()

    # The interpreter calls these methods to copy an argument to the CPU and back; it is already on the CPU.
    def untyped_storage(self) -> HostArray:
        return self

    def cpu(self) -> HostArray:
        return self

    def new_empty(self, *shape: int, device: str) -> HostArray:
        return HostArray(self.array, self.dtype)

    def set_(self, storage: HostArray, *place: Any) -> None:
        assert storage.array is self.array

    def copy_(self, other: HostArray) -> None:
        assert other.array is self.array

    def storage_offset(self) -> None:
        return None

    def size(self) -> None:
        return None

    def stride(self) -> None:
        return None
