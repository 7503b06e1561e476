"""Memory that a new process can allocate on this machine."""

from __future__ import annotations

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def free_memory() -> int | None:
    """Return the available memory in bytes, or None if /proc/meminfo does not report it (systems other than Linux).

    The result is `MemAvailable` of proc(5), or the unused memory of the container (cgroup v2) if that is less.
    """
    if not _MEMINFO.is_file():
        return None
    lines = dict(line.split(":", 1) for line in _MEMINFO.read_text(encoding="ascii").splitlines() if ":" in line)
    if "MemAvailable" not in lines:
        return None
    free = int(lines["MemAvailable"].split()[0]) * 1024
    limit, used = (_cgroup_value(name) for name in ("memory.max", "memory.current"))
    return free if limit is None or used is None else min(free, max(0, limit - used))


def _cgroup_value(name: str) -> int | None:
    path = _CGROUP / name
    text = path.read_text(encoding="ascii").strip() if path.is_file() else ""
    return int(text) if text.isdigit() else None
