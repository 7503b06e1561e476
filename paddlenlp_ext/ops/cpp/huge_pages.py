"""Huge pages for weights: decoding reads all weights for a token, and pages of 4 KB cost up to a third of the rate."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Iterator

import paddle

from paddlenlp_ext.ops.dispatch import is_on_cpu
from paddlenlp_ext.paddle_compat import has_storage

HUGE_PAGE = 1 << 21
"""Bytes of a huge page on x86."""

_SMALLEST = 1 << 16  # bytes of a tensor: norms and biases are scattered, and are not worth a page each
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25  # of Linux's madvise


def use_huge_pages(tensors: Iterable[paddle.Tensor]) -> None:
    """Move the memory of matrices on the CPU into huge pages; addresses and values stay.

    Neighbours in the same huge pages move too. Linux before 6.1 moves pages in the background instead. A kernel without
    transparent huge pages refuses; MADV_COLLAPSE does not depend on their setting in sysfs (madvise(2)).
    """
    if sys.platform != "linux":
        return
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for first, end in _runs(tensors):
        for advice in (_MADV_HUGEPAGE, _MADV_COLLAPSE):
            advise(first * HUGE_PAGE, (end - first) * HUGE_PAGE, advice)  # a refusal leaves the pages as they are


def _runs(tensors: Iterable[paddle.Tensor]) -> Iterator[tuple[int, int]]:
    """Yield the first page, and the one after the last, of each run of huge pages that the tensors touch."""
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
