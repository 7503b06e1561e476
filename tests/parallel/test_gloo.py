"""Barrier over the launcher's key-value store."""

from __future__ import annotations

import signal

from paddle.base import core

from paddlenlp_ext.parallel import gloo


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
