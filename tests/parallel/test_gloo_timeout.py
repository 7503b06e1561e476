"""Waiting for slow processes over TCP, with threads and a child process as the other ranks."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from paddlenlp_ext.parallel import gloo_timeout as module
from paddlenlp_ext.parallel.gloo_timeout import Arrivals, connect_arrivals

HOST = "127.0.0.1"


class Store:
    """Key-value store of the ranks, which are threads."""

    def __init__(self):
        self.values, self.changed = {}, threading.Condition()

    def set(self, key, value):
        with self.changed:
            self.values[key] = value.encode()
            self.changed.notify_all()

    def get(self, key):
        with self.changed:
            assert self.changed.wait_for(lambda: key in self.values, timeout=10)
            return self.values[key]


def connected(size, store=None):
    store = store or Store()
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: connect_arrivals(store, rank, size, HOST), range(size)))


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        ("wait_for_all", "wait_for_all"),
        ("wait_for_receiver", "wait_for_sender"),
        ("wait_for_sender", "wait_for_receiver"),
    ],
)
def test_arrivals_wait_ends_when_the_slow_rank_comes_and_is_logged(mine, theirs, caplog, monkeypatch):
    monkeypatch.setattr(module, "_FIRST_MESSAGE_SECONDS", 0.0)
    first, second, third = connected(3)
    others = [] if mine == "wait_for_all" else [0]
    came = []

    def come(arrivals, seconds):
        for _ in range(2):
            time.sleep(seconds)
            came.append(time.monotonic())
            getattr(arrivals, theirs)(*others)

    with ThreadPoolExecutor(2) as pool, caplog.at_level(logging.WARNING, "paddlenlp_ext"):
        pool.submit(come, second, 0.05)
        if not others:
            pool.submit(come, third, 0.01)
        for number in range(2):  # one operation, then the next: none is counted twice
            getattr(first, mine)(*([1] if others else []))
            assert len(came) >= (number + 1) * (1 if others else 2) and time.monotonic() >= came[-1]
    assert "still waiting for rank 0 after" in caplog.text  # all threads have this process's global rank
    for arrivals in (first, second, third):
        arrivals.close()


def test_arrivals_of_different_kinds_do_not_count_for_each_other():
    first, second = connected(2)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(first.wait_for_all)
        second_sends = threading.Thread(target=second.wait_for_receiver, args=(0,))
        second_sends.start()
        time.sleep(0.05)
        assert not waits.done()
        second._peers[0].shutdown(socket.SHUT_RDWR)  # ends both waits
        waits.result(timeout=10)
    second_sends.join()
    first.close()
    second.close()


@pytest.mark.parametrize("before", [True, False])
def test_arrivals_wait_for_a_killed_process_ends_while_its_worker_lives(before):
    """A forked worker must not keep the connection open, nor the process itself that of a killed one."""
    ours, theirs = socket.socketpair()
    ready, writes = os.pipe()
    child = os.fork()
    if not child:
        ours.close()
        _second = Arrivals({0: theirs}, {0: 0})
        worker = os.fork()
        if worker:
            os.write(writes, b"%d" % worker)
            time.sleep(0.0 if before else 0.2)
            os._exit(0)
        time.sleep(30)
        os._exit(0)
    theirs.close()
    worker = int(os.read(ready, 20))
    if before:
        os.waitpid(child, 0)
    first, started = Arrivals({1: ours}, {1: 1}), time.monotonic()
    try:
        first.wait_for_all()
        first.wait_for_all()
        assert time.monotonic() - started < 5.0
    finally:
        os.kill(worker, 9)
        if not before:
            os.waitpid(child, 0)
        first.close()


def test_connect_arrivals_ignores_strangers():
    store = Store()

    class Disturbed(Store):
        def set(self, key, value):
            store.set(key, value)
            host, port, *_ = value.split(" ")
            for content in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(20)):
                with socket.create_connection((host, int(port))) as stranger:
                    stranger.sendall(content)

        def get(self, key):
            return store.get(key)

    first, second = connected(2, Disturbed())
    with ThreadPoolExecutor(1) as pool:
        pool.submit(second.wait_for_all)
        first.wait_for_all()
    first.close()
    second.close()


def test_connect_arrivals_to_an_unreachable_process_names_it():
    store = Store()
    with socket.socket() as probe:
        probe.bind((HOST, 0))  # not listening
        port = probe.getsockname()[1]
        store.set("paddlenlp_ext/arrivals/0", f"{HOST} {port} {'00' * 16} 0")
        with pytest.raises(ValueError, match=f"{HOST}:{port}: cannot connect .* allow TCP connections"):
            connect_arrivals(store, 1, 2, HOST)
