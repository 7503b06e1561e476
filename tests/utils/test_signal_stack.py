"""Signals during matrix products, which end in a corrupted heap without an alternate stack on AVX2 processors."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.common.marks import needs_cpp
from tests.common.scripts import script_environment

pytestmark = [
    needs_cpp,
    pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="Windows has no interval timer"),
]

PROGRAM = """
import signal, time
from paddlenlp_ext.utils.stop_signals import handle_stop_signals
handle_stop_signals(signal.SIG_DFL)
import numpy as np, paddle
from paddlenlp_ext.ops.linear import linear

seen = []
signal.signal(signal.SIGALRM, lambda *_: seen.append(0))
x, weight = (paddle.to_tensor(np.ones(shape, "float32")) for shape in ((256, 1024), (512, 1024)))
linear(x, weight)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
end = time.monotonic() + 2
while time.monotonic() < end:
    blocks = [bytearray(size) for size in range(1, 4000, 37)]  # errors of the heap are found when blocks are allocated
    product = linear(x, weight)
signal.setitimer(signal.ITIMER_REAL, 0)
assert len(seen) > 20, len(seen)
assert (product == 1024).all()
print("done")
"""


def test_signals_during_products_leave_the_heap_intact():
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=script_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr[-2000:]
