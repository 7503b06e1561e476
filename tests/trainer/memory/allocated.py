"""Bytes of the tensors on the CPU."""

from __future__ import annotations

import ctypes
import gc

import paddle

from paddlenlp_ext.ops.cpp import library


def allocated_bytes() -> int:
    """Return the bytes of all tensors, including those without a Python object, and release unused pooled blocks.

    A pooled tensor counts as its whole block. If earlier tests had left a block that is up to a quarter larger than a
    tensor, the pool would reuse it, and the measured size of this tensor would depend on the order of the tests.
    """
    gc.collect()
    account = (ctypes.c_int64 * 3)()
    if (loaded := library.library()) is not None:
        loaded.buffers_release()
        loaded.buffers_account(account)
    return paddle.base.core.host_memory_stat_current_value("Allocated", 0) + account[1]
