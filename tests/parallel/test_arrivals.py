"""Waiting for slow processes over shared memory, with threads and a child process as the other ranks."""

from __future__ import annotations

import logging
import os
import threading
import time

import pytest

from paddlenlp_ext.parallel import arrivals as module
from paddlenlp_ext.parallel.arrivals import Arrivals, create_file


@pytest.fixture
def path(monkeypatch):
    monkeypatch.setattr(module, "_FIRST_MESSAGE_SECONDS", 0.02)
    path = create_file()
    yield path
    os.unlink(path)


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        ("wait_for_all", "wait_for_all"),
        ("wait_for_receiver", "wait_for_sender"),
        ("wait_for_sender", "wait_for_receiver"),
    ],
)
def test_arrivals_wait_ends_when_the_slow_rank_comes_and_is_logged(path, mine, theirs, caplog):
    first, second = Arrivals(path, 0, 3), Arrivals(path, 1, 3)
    assert not first.all_present()
    third = Arrivals(path, 2, 3)
    assert first.all_present() and second.all_present()
    came = []

    def come(arrivals, others, seconds):
        for _ in range(2):
            time.sleep(seconds)
            if arrivals is second:
                came.append(time.monotonic())
            getattr(arrivals, theirs)(*others)

    others = [] if mine == "wait_for_all" else [0]
    threads = [threading.Thread(target=come, args=(second, others, 0.05))]
    if not others:
        threads.append(threading.Thread(target=come, args=(third, others, 0.01)))
    for thread in threads:
        thread.start()
    with caplog.at_level(logging.WARNING, "paddlenlp_ext"):
        for number in range(2):  # one operation, then the next: none is counted twice
            getattr(first, mine)(*([1] if others else []))
            assert time.monotonic() >= came[-1] and len(came) >= number + 1
    for thread in threads:
        thread.join()
    assert "waiting for rank" in caplog.text and "waiting on while it lives" in caplog.text


def test_arrivals_wait_for_a_dead_process_ends(path, monkeypatch):
    monkeypatch.setattr(module, "_CHECK_SECONDS", 0.02)
    child = os.fork()
    if not child:
        _second = Arrivals(path, 1, 2)  # its lock is released with it
        time.sleep(0.2)
        os._exit(0)
    first = Arrivals(path, 0, 2)
    while not first.all_present():
        time.sleep(0.01)
    started = time.monotonic()
    first.wait_for_all()
    assert 0.05 < time.monotonic() - started < 5.0
    os.waitpid(child, 0)
