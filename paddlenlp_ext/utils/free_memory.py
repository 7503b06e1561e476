"""Memory that a new process can allocate on this machine."""

from __future__ import annotations

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def free_memory() -> int | None:
    """Return the available bytes of memory, or None if the system does not tell (only Linux does).

    Source: `MemAvailable` of proc(5), and the limit of the container (cgroup v2), if it is lower.
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
