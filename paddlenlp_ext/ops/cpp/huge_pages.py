"""Huge pages for weights: decoding reads all weights for each token, which is up to a third slower with 4 KB pages."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Iterator

import paddle

from paddlenlp_ext.ops.dispatch import is_on_cpu
from paddlenlp_ext.paddle_compat import has_storage

HUGE_PAGE = 1 << 21
"""Size of a huge page on x86 in bytes."""

_SMALLEST = 1 << 16  # bytes of a tensor: scattered norms and biases are not worth a huge page each
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25  # of Linux's madvise


def use_huge_pages(tensors: Iterable[paddle.Tensor]) -> None:
    """Back the weight matrices on the CPU with huge pages; addresses and values do not change.

    Before 6.1, Linux merges pages in the background instead. Errors from kernels without transparent huge
    pages are ignored. MADV_COLLAPSE works regardless of the sysfs setting (madvise(2)).
    """
    if sys.platform != "linux":
        return
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for first, end in _runs(tensors):
        for advice in (_MADV_HUGEPAGE, _MADV_COLLAPSE):
            advise(first * HUGE_PAGE, (end - first) * HUGE_PAGE, advice)  # errors leave the pages as they are


def _runs(tensors: Iterable[paddle.Tensor]) -> Iterator[tuple[int, int]]:
    """Yield (first page, end page) of each contiguous run of huge pages that the tensors touch."""
    pages: set[int] = set()
    for tensor in tensors:
        if not (has_storage(tensor) and is_on_cpu(tensor)):
            continue
        size = tensor.size * tensor.element_size()
        if size >= _SMALLEST:
            start = tensor.data_ptr()
            pages.update(range(start // HUGE_PAGE, -(-(start + size) // HUGE_PAGE)))
    for first in sorted(page for page in pages if page - 1 not in pages):
        end = first + 1
        while end in pages:
            end += 1
        yield first, end
