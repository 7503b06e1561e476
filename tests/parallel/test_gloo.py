"""Connections and barriers over the launcher's key-value store."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from paddle.base import core

from paddlenlp_ext.parallel import gloo
from tests.common.scripts import script_environment
from tests.stress.forked_processes import ranks_of


class Store:
    """Key-value store that sends this process a signal while it counts."""

    def __init__(self):
        self.count, self.received_inside, self.received = 0, [], []
        signal.signal(signal.SIGTERM, lambda number, _: self.received.append(number))

    def add(self, name, amount):
        self.count += max(amount, self.count)  # the second process arrives at the second query
        if not amount:
            signal.raise_signal(signal.SIGTERM)
            self.received_inside += self.received
        return self.count


def test_gloo_barrier_blocks_signals_until_the_store_has_answered(monkeypatch):
    """Check that signals are blocked during a receive of Paddle's store, which would raise an error."""
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(gloo, "world_size", lambda: 2)
    monkeypatch.setenv("PADDLE_DISTRI_BACKEND", "gloo")
    try:
        store = Store()
        monkeypatch.setattr(core, "create_or_get_global_tcp_store", lambda: store)
        masked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        gloo.gloo_barrier()
        assert (store.received_inside, store.received) == ([], [signal.SIGTERM])
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == masked
    finally:
        signal.signal(signal.SIGTERM, before)


WAIT = """
import signal, sys
from paddlenlp_ext.parallel import gloo
from paddlenlp_ext.utils.distributed_env import rank
from paddlenlp_ext.utils.run_command import run_command

def connect_processes():
    gloo.connect_processes("cpu")

def create_group():
    gloo.create_group(gloo._store_at(gloo._free_address(), serves=True), rank(), 2)

def wait(argv):
    print("ready", flush=True)
    globals()[sys.argv[1]]()

signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a job in the background inherits ignored signals
run_command(wait, [])
"""


@pytest.mark.parametrize(
    ("device", "backend", "message"),
    [
        ("npu", "gloo", "device npu: the processes were started with gloo"),
        ("cpu", "xccl", "device cpu: the processes were started for accelerators"),
        ("cpu", "", "device cpu: the processes were started for accelerators"),
    ],
)
def test_processes_started_for_another_device_raise(monkeypatch, device, backend, message):
    monkeypatch.setattr(gloo, "world_size", lambda: 2)
    monkeypatch.setenv("PADDLE_DISTRI_BACKEND", backend)
    with pytest.raises(ValueError, match=message):
        gloo.connect_processes(device)


@pytest.mark.parametrize("wait", ["connect_processes", "create_group"])
@pytest.mark.parametrize("rank", [0, 1])
def test_process_that_waits_for_a_late_rank_ends_at_a_signal(wait, rank):
    environment = script_environment(**ranks_of(2)[rank])
    command = [sys.executable, "-W", "ignore", "-c", WAIT, wait]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        ends = time.monotonic() + 30
        while handles(process.pid) and time.monotonic() < ends:
            time.sleep(0.01)
        process.terminate()
        assert process.wait(30) == -signal.SIGTERM
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def handles(process):
    """Return whether a process has a handler for SIGTERM."""
    (caught,) = (line for line in Path(f"/proc/{process}/status").read_text().splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)
