"""Server in a process of its own, on a free port of this computer."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def server_process(model: str, *words: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Start a server and wait until it accepts connections; yield the process and its port; kill it at the end."""
    command = [sys.executable, "-m", "paddlenlp_ext.serve", "--model_name_or_path", model, "--port", "0"]
    command += ["--device", "cpu", *words]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ})
    try:
        assert process.stderr is not None
        found = (re.search(r"http://127.0.0.1:(\d+)/v1", line) for line in process.stderr)
        port = next(int(match[1]) for match in found if match)
        threading.Thread(target=process.stderr.read, daemon=True).start()  # a full pipe would block the server
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        yield process, port
    finally:
        process.kill()
        process.wait()
