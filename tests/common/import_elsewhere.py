"""Import modules of the package as on another system: python -m tests.common.import_elsewhere win32 utils config.

First, the modules are imported on this system, for their third-party packages. Then they are imported again without the
Python modules and names that the other system lacks, and without access to /proc and /sys.
"""

from __future__ import annotations

import importlib
import os
import select
import signal
import sys
import types
from pathlib import Path
from typing import Any

import paddlenlp_ext

MISSING = {
    "win32": {
        "modules": ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "posix", "multiprocessing.forkserver"),
        os: (
            *("fork", "register_at_fork", "sched_getaffinity", "sched_setaffinity", "getuid", "geteuid", "getpgid"),
            *("killpg", "setsid", "nice", "uname", "statvfs", "sysconf", "mkfifo", "getloadavg", "O_CLOEXEC"),
            *("O_DIRECTORY", "posix_fadvise", "pread", "pwrite", "sendfile", "wait4", "WNOHANG", "fchmod", "chown"),
        ),
        signal: (
            *("SIGHUP", "SIGUSR1", "SIGUSR2", "SIGKILL", "SIGPIPE", "SIGALRM", "SIGCHLD", "SIGQUIT", "ITIMER_PROF"),
            *("setitimer", "alarm", "pthread_kill", "pthread_sigmask", "sigwait", "siginterrupt"),
        ),
        select: ("poll", "epoll"),
    },
    "darwin": {
        "modules": ("msvcrt",),
        os: ("sched_getaffinity", "sched_setaffinity", "posix_fadvise"),
        select: ("epoll",),
    },
}
"""System -> modules that it lacks, and names that it lacks in other modules."""


def modules_of(packages: tuple[str, ...]) -> list[str]:
    """Return the names of the modules in packages of `paddlenlp_ext`; without packages, of all modules."""
    root = Path(paddlenlp_ext.__file__).parent
    names = [path.relative_to(root).with_suffix("").parts for path in sorted(root.rglob("*.py"))]
    wanted = [name for name in names if name[-1] not in ("__init__", "__main__")]
    return [f"paddlenlp_ext.{'.'.join(name)}" for name in wanted if not packages or name[0] in packages]


def deny_system_files(event: str, arguments: tuple[Any, ...]) -> None:
    """Fail when a file below /proc or /sys is opened: an audit hook."""
    if event == "open" and isinstance(arguments[0], str) and arguments[0].startswith(("/proc/", "/sys/")):
        raise RuntimeError(f"{arguments[0]} is read during an import")


def import_elsewhere(platform: str, names: list[str]) -> None:
    """Import modules as on another system."""
    for name in names:
        importlib.import_module(name)
    for name in [name for name in sys.modules if name == "paddlenlp_ext" or name.startswith("paddlenlp_ext.")]:
        del sys.modules[name]
    for module, missing in MISSING[platform].items():
        if module == "modules":
            sys.modules.update(dict.fromkeys(missing))
        else:
            for name in missing:
                if hasattr(module, name):
                    delattr(module, name)
    if platform == "win32":
        sys.modules["msvcrt"] = types.ModuleType("msvcrt")
    sys.platform = platform
    sys.addaudithook(deny_system_files)
    for name in names:
        importlib.import_module(name)
    print(f"{len(names)} modules")


if __name__ == "__main__":
    import_elsewhere(sys.argv[1], modules_of(tuple(sys.argv[2:])))
