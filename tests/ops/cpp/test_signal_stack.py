"""Signals during matrix products, which end in a corrupted heap without alternate stacks on AVX2 processors."""

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
from paddlenlp_ext import configure_runtime
configure_runtime()
import signal, sys, time
import numpy as np, paddle
from paddlenlp_ext.ops.linear import linear

seen = []
signal.signal(signal.SIGALRM, lambda *_: seen.append(0))
x, weight = (paddle.to_tensor(np.ones(shape, "float32")) for shape in ((256, 1024), (512, 1024)))
linear(x, weight)
if sys.argv[1] == "other threads":
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
end = time.monotonic() + 2
while time.monotonic() < end:
    blocks = [bytearray(size) for size in range(1, 4000, 37)]  # errors of the heap are found when blocks are allocated
    product = linear(x, weight)
signal.setitimer(signal.ITIMER_REAL, 0)
assert seen
assert (product == 1024).all()
print("done")
"""


@pytest.mark.parametrize("receiver", ["main thread", "other threads"])
def test_signals_during_products_leave_the_heap_intact(receiver):
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, receiver],
        env=script_environment(OMP_NUM_THREADS="2"),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr[-2000:]
