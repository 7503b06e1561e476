"""Limit of the wall time of a block."""

from __future__ import annotations

import re
import signal
import sys
import time

import pytest

from paddlenlp_ext.utils.time_limit import TimeLimitError, time_limit

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no interval timers")


def sleep_and_catch() -> None:
    try:
        time.sleep(60)
    except BaseException:
        time.sleep(60)


@pytest.mark.parametrize(
    "hang", [lambda: time.sleep(60), lambda: re.fullmatch("(a|aa)+", "a" * 60 + "b"), sleep_and_catch]
)
def test_time_limit_interrupts_a_hanging_block(hang, monkeypatch):
    monkeypatch.setattr("paddlenlp_ext.utils.time_limit._SECONDS_TO_REPEAT", 0.05)
    before, started = signal.getsignal(signal.SIGALRM), time.perf_counter()
    with pytest.raises(TimeLimitError), time_limit(0.05):
        hang()
    assert time.perf_counter() - started < 30
    assert signal.getsignal(signal.SIGALRM) is before


def test_time_limit_of_a_fast_block_leaves_no_timer():
    with time_limit(60):
        pass
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
