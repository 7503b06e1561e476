"""The server in a process of its own, on a real port: start, cut-off and slow connections, and SIGTERM."""

from __future__ import annotations

import contextlib
import http.client
import json
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.common.server_process import server_process


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[tuple[subprocess.Popen, int]]:
    """Start the server; yield the process and its port."""
    with server_process(str(folder / "base"), "--transfer_timeout", "1") as started:
        yield started


def ask(port: int, **options) -> dict:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = json.dumps({"model": "base", "prompt": "a", "max_tokens": 2, **options})
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    reply = connection.getresponse()
    assert reply.status == 200
    return json.loads(reply.read())


def read_to_the_end(connection: socket.socket) -> None:
    """Wait until the server closes a connection; a `TimeoutError` if it does not."""
    with connection, contextlib.suppress(ConnectionError):
        while connection.recv(65536):
            pass


BROKEN = (
    b"",
    b"\x16\x03\x01\x02\x00\x01\x00",
    b"GET\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: x\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 200_000,
    b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n",
)


def test_server_resets_the_connection_of_a_client_that_does_not_read_its_stream(server):
    """Ask for megabytes of events, never read one, and wait for the reset, which an ordinary close does not send."""
    _, port = server
    options = {"max_tokens": 200, "logit_bias": {"256": -100}, "n": 32, "logprobs": 20, "stream": True}
    body = json.dumps({"model": "base", "prompt": "a", **options}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    with socket.create_connection(("127.0.0.1", port), 5) as connection:
        connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
        events = select.poll()
        events.register(connection, 0)
        assert events.poll(60_000), "the connection is still open"
    assert ask(port)["usage"]["completion_tokens"] <= 2


def test_server_outlives_broken_and_slow_connections_and_finishes_answers_after_sigterm(server):
    """Send nothing, half a request or none until the server closes the connection, then stop it in an answer."""
    process, port = server
    expected = ask(port, temperature=0, max_tokens=9)["choices"]
    held = []
    for data in BROKEN:
        connection = socket.create_connection(("127.0.0.1", port), 5)
        with contextlib.suppress(OSError):  # already refused
            connection.sendall(data)
        held.append(connection)
    again = socket.create_connection(("127.0.0.1", port), 5)
    again.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert again.recv(65536).startswith(b"HTTP/1.1 200")
    again.sendall(b"GET /hea")
    for connection in (*held, again):
        read_to_the_end(connection)
    assert ask(port, temperature=0, max_tokens=9)["choices"] == expected
    idle = socket.create_connection(("127.0.0.1", port), 5)
    answers = []
    options = {"max_tokens": 200, "logit_bias": {"256": -100}, "n": 4}
    asking = threading.Thread(target=lambda: answers.append(ask(port, **options)))
    asking.start()
    time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    asking.join(60)
    assert answers[0]["usage"]["completion_tokens"] == 800
    read_to_the_end(idle)
    assert process.wait(30) == 0
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), 1)
