"""Huge pages for weights.

Decoding reads all weights for each token, and is up to a third slower with 4 KB pages than with 2 MB pages.
"""

from __future__ import annotations

import ctypes
import errno
import sys
from collections.abc import Iterable

import paddle

from paddlenlp_ext.ops.dispatch import is_on_cpu
from paddlenlp_ext.paddle_compat import has_storage

HUGE_PAGE = 1 << 21
"""Size of a huge page on x86 in bytes."""

_SMALLEST = 1 << 16  # bytes; smaller tensors, such as norms and biases, would waste most of a huge page
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25  # constants of Linux's madvise
_MAX_TRIES = 4  # MADV_COLLAPSE fails with EAGAIN while the kernel moves a page for another reason


def use_huge_pages(tensors: Iterable[paddle.Tensor]) -> None:
    """Back the weight matrices on the CPU with huge pages; addresses and values do not change.

    Linux before 6.1 lacks MADV_COLLAPSE and may merge pages in the background. Errors are ignored, because some systems
    lack transparent huge pages. MADV_COLLAPSE works with any setting of transparent huge pages in sysfs (madvise(2)).
    """
    if sys.platform != "linux":
        return
    advise = ctypes.CDLL(None, use_errno=True).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    # One call per page: a call for several pages stops at the first page that also belongs to an unsuitable mapping.
    for page in sorted(_pages(tensors)):
        advise(page * HUGE_PAGE, HUGE_PAGE, _MADV_HUGEPAGE)
        for _ in range(_MAX_TRIES):
            if advise(page * HUGE_PAGE, HUGE_PAGE, _MADV_COLLAPSE) == 0 or ctypes.get_errno() != errno.EAGAIN:
                break


def _pages(tensors: Iterable[paddle.Tensor]) -> set[int]:
    """Return the indices of the huge pages that contain parts of the large tensors on the CPU."""
    pages: set[int] = set()
    for tensor in tensors:
        if not (has_storage(tensor) and is_on_cpu(tensor)):
            continue
        size = tensor.size * tensor.element_size()
        if size >= _SMALLEST:
            start = tensor.data_ptr()
            pages.update(range(start // HUGE_PAGE, -(-(start + size) // HUGE_PAGE)))
    return pages
