"""Barrier over the launcher's key-value store."""

from __future__ import annotations

import signal

from paddle.base import core

from paddlenlp_ext.parallel import gloo


class Store:
    """Store that counts, and sends this process a signal meanwhile."""

    def __init__(self):
        self.counted, self.got_inside, self.got = 0, [], []
        signal.signal(signal.SIGTERM, lambda number, _: self.got.append(number))

    def add(self, name, amount):
        self.counted += max(amount, self.counted)  # the second process comes at the second look
        if not amount:
            signal.raise_signal(signal.SIGTERM)
            self.got_inside += self.got
        return self.counted


def test_gloo_barrier_blocks_signals_until_the_store_has_answered(monkeypatch):
    """A signal during a receive of Paddle's store would raise an error."""
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(gloo, "world_size", lambda: 2)
    monkeypatch.setenv("PADDLE_DISTRI_BACKEND", "gloo")
    try:
        store = Store()
        monkeypatch.setattr(core, "create_or_get_global_tcp_store", lambda: store)
        masked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        gloo.gloo_barrier()
        assert (store.got_inside, store.got) == ([], [signal.SIGTERM])
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == masked
    finally:
        signal.signal(signal.SIGTERM, before)
