"""Stack for signal handlers.

oneDNN's kernels for matrix products on AVX2 processors use the stack pointer as a data pointer. The kernel pushes the
frame of a signal below the stack pointer, and would overwrite the memory of tensors and the heap. Handlers that Python
installs run on the alternate stack of the thread, if there is one (sigaltstack(2)).
"""

from __future__ import annotations

import ctypes
import sys
import threading

_SIZE = 1 << 16
"""Bytes of the stack; a frame with AVX-512 and AMX registers takes 11 KB."""
_SS_DISABLE = 2


class _Stack(ctypes.Structure):
    """`stack_t` of Linux."""

    _fields_ = [("address", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]


_memory: ctypes.Array[ctypes.c_char] | None = None


def use_signal_stack() -> None:
    """Give the main thread an alternate stack for signal handlers, unless it has one.

    The kernel delivers signals of a process to the main thread. In other threads, and on systems other than Linux, this
    function has no effect.
    """
    global _memory
    if sys.platform != "linux" or threading.current_thread() is not threading.main_thread():
        return
    set_stack, present = ctypes.CDLL(None, use_errno=True).sigaltstack, _Stack()
    if set_stack(None, ctypes.byref(present)) == 0 and present.flags & _SS_DISABLE:
        _memory = ctypes.create_string_buffer(_SIZE)
        stack = _Stack(ctypes.cast(_memory, ctypes.c_void_p), 0, _SIZE)
        set_stack(ctypes.byref(stack), None)
