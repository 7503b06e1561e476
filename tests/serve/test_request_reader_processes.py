"""Processes that read requests, with requests that never end, wait for a file, or belong to clients that have left."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paddlenlp_ext.serve.errors import ApiError
from paddlenlp_ext.serve.request_reader_processes import ReaderProcesses

LARGE = b" " * (1 << 15)


def echo(reader: Any, body: bytes) -> Any:
    return reader, len(body)


def endless(reader: Any, body: bytes) -> Any:
    while True:
        pass


def allocate(reader: Any, body: bytes) -> Any:
    return len(bytearray(5 << 30))


def invalid(reader: Any, body: bytes) -> Any:
    raise ApiError(404, "no such model", "model_not_found", "model")


def wait_for_file(reader: Any, body: bytes) -> Any:
    """Write a file that says that the body is read, and wait for a second file."""
    folder = Path(body.decode().strip())
    (folder / "started").touch()
    while not (folder / "go").exists():
        time.sleep(0.01)
    return "done"


@pytest.fixture(scope="module")
def readers() -> Iterator[ReaderProcesses]:
    reader: Any = "reader"
    processes = ReaderProcesses(reader, max_seconds=0.3)
    yield processes
    processes.close()


def test_body_is_read_in_another_process_and_errors_of_the_request_arrive_unchanged(readers):
    assert asyncio.run(readers.read("a", echo, b"xyz")) == ("reader", 3)
    with pytest.raises(ApiError, match=r"^no such model$") as caught:
        asyncio.run(readers.read("a", invalid, b""))
    assert caught.value.body()["error"]["param"] == "model" and caught.value.status == 404


@pytest.mark.parametrize("size", [1, len(LARGE)])
def test_request_beyond_the_budget_is_an_error_and_the_next_one_is_read(readers, size):
    async def use():
        with pytest.raises(
            ApiError, match=r"took more than 0\.3 seconds, or too much memory; send a shorter request"
        ) as caught:
            await readers.read("a", endless, b" " * size)
        return caught.value, await readers.read("a", echo, b" " * size)

    error, after = asyncio.run(use())
    assert (error.status, error.code) == (400, "request_too_expensive") and after == ("reader", size)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the limit is set on Linux")
def test_request_beyond_the_memory_limit_is_an_error_and_the_next_one_is_read(readers):
    with pytest.raises(ApiError, match=r"took more than 4 GiB of memory; send a shorter request") as caught:
        asyncio.run(readers.read("a", allocate, b"x"))
    assert (caught.value.status, caught.value.code) == (400, "request_too_expensive")
    assert asyncio.run(readers.read("a", echo, b"x")) == ("reader", 1)


def test_small_body_is_read_while_a_large_one_is_read_and_the_waiting_one_of_a_client_that_left_is_not(
    readers, tmp_path
):
    folders = [tmp_path / name for name in ("first", "left")]
    bodies = [str(folder).encode() + LARGE for folder in folders]
    for folder in folders:
        folder.mkdir()

    async def use():
        first, left = (asyncio.ensure_future(readers.read("a", wait_for_file, body)) for body in bodies)
        while not (folders[0] / "started").exists():
            await asyncio.sleep(0.01)
        small = await readers.read("a", echo, b"x")
        left.cancel()
        (folders[0] / "go").touch()
        return small, await first, await readers.read("a", echo, LARGE)

    assert asyncio.run(use()) == (("reader", 1), "done", ("reader", len(LARGE)))
    assert not (folders[1] / "started").exists()
