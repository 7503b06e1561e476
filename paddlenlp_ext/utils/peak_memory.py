"""Peak memory of this process, as reported by the operating system."""

from __future__ import annotations

import ctypes
import sys

if sys.platform == "win32":
    from ctypes import wintypes

    class _MemoryCounters(ctypes.Structure):
        """PROCESS_MEMORY_COUNTERS of psapi.h."""

        _fields_ = [
            ("size", wintypes.DWORD),
            ("page_faults", wintypes.DWORD),
            ("peak_working_set", ctypes.c_size_t),
            ("others", ctypes.c_size_t * 7),
        ]

    def peak_memory_bytes() -> int:
        """Return the peak working set of this process so far, in bytes."""
        counters = _MemoryCounters(size=ctypes.sizeof(_MemoryCounters))
        this_process = wintypes.HANDLE(-1)  # the value of GetCurrentProcess()
        ctypes.windll.kernel32.K32GetProcessMemoryInfo(this_process, ctypes.byref(counters), counters.size)
        return counters.peak_working_set

else:
    import resource

    def peak_memory_bytes() -> int:
        """Return the peak resident set size of this process so far, in bytes."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
