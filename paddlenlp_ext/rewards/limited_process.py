"""Run Python code in a process with limits on time, memory, files and further processes, on Linux.

The limits protect against code that hangs, grows or leaves processes behind. They are not a security boundary: the code
can read the files of the user and use the network. Code that searches its process for the mark of success can report
success without reaching its last line.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

_MAX_FILE_BYTES = 1 << 20
_PROGRAM = """
import os, resource, sys, types
seconds, memory, file_size = map(int, sys.argv[1:4])
limits = {"CPU": seconds, "AS": memory, "FSIZE": file_size, "CORE": 0, "NPROC": 0, "NOFILE": 64}
for name, value in limits.items():
    number = getattr(resource, "RLIMIT_" + name)
    hard = resource.getrlimit(number)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(number, (value, value))
mark = sys.argv[4]
del sys.argv[1:]
module = sys.modules["completion"] = types.ModuleType("completion")
exec(compile(sys.stdin.read(), "completion.py", "exec"), module.__dict__)
os.write(1, mark.encode())
"""
"""Program of the process: limits itself, runs the code that it reads from standard input, and writes a mark."""


def runs_to_end(code: str, *, seconds: int, memory: int) -> bool:
    """Return whether Python code runs to its last line, without an error and within the limits.

    The code runs in an empty folder, and in the module `completion`, so that a block `if __name__ == "__main__"` does
    not run.

    Args:
        code: the code.
        seconds: maximum CPU time; the maximum wall time is twice as long.
        memory: maximum memory in bytes.

    Raises:
        TimeoutError: the code exceeded its time.
    """
    mark = secrets.token_hex(16)  # code that exits early, even with code 0, does not write the mark
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as output:
        command = [sys.executable, "-s", "-c", _PROGRAM, *map(str, (seconds, memory, _MAX_FILE_BYTES, mark))]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env=_environment(folder),
            start_new_session=True,
        )
        try:
            process.communicate(code.encode("utf-8", "replace"), timeout=2.0 * seconds)
        except subprocess.TimeoutExpired:
            raise TimeoutError from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the process, or processes that it started
            process.wait()
        if process.returncode in (-signal.SIGXCPU, -signal.SIGKILL):  # the system ends a process without CPU time left
            raise TimeoutError
        output.seek(0)
        return process.returncode == 0 and mark.encode() in output.read(_MAX_FILE_BYTES)


def _environment(folder: str | Path) -> dict[str, str]:
    """Return variables without the user's: threads would exceed the limit of processes, and hashes would vary."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {"PATH": os.defpath, "HOME": str(folder), "TMPDIR": str(folder), "PYTHONHASHSEED": "0", **threads}
