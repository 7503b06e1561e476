"""Profile of a step: Paddle's profiler and an event around every C++ op, in one trace.

Import this module before the ops: it wraps `library.function`.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paddle

from paddlenlp_ext.ops.cpp import library

_LAUNCH = " kernel launch"
_native_function = library.function


def _recorded_function(name: str) -> Callable[..., Any]:
    call = _native_function(name)

    def recorded(*arguments: Any) -> Any:
        with paddle.profiler.RecordEvent(f"native {name}"):
            return call(*arguments)

    return recorded


library.function = _recorded_function


def profile_step(step: Callable[[], object]) -> dict[str, float]:
    """Return the seconds of one step by kernel, the largest first; `step` must have run before.

    `Python and autograd` is the time of the step outside of kernels.
    """
    with tempfile.TemporaryDirectory() as folder:
        profiler = paddle.profiler.Profiler(
            targets=[paddle.profiler.ProfilerTarget.CPU],
            scheduler=(0, 1),
            on_trace_ready=paddle.profiler.export_chrome_tracing(folder),
        )
        profiler.start()
        step()
        profiler.step()
        profiler.stop()
        trace = json.loads(next(Path(folder).glob("*.json")).read_text(encoding="utf-8"))
    return seconds_by_kernel(trace["traceEvents"])


def seconds_by_kernel(events: list[dict[str, Any]]) -> dict[str, float]:
    """Return the seconds of each kernel in a trace; the time of nested kernels counts for the outermost one."""
    spans = [event for event in events if event.get("ph") == "X"]
    step_time = next(event["dur"] for event in spans if event["cat"] == "ProfileStep")
    kernels = [event for event in spans if _kernel(event) is not None]
    seconds: Counter[str] = Counter()
    free_from = 0.0
    for event in sorted(kernels, key=lambda event: (event["ts"], -event["dur"])):
        if event["ts"] >= free_from:
            seconds[_kernel(event)] += event["dur"] / 1e6
            free_from = event["ts"] + event["dur"]
    seconds["Python and autograd"] = step_time / 1e6 - sum(seconds.values())
    return dict(seconds.most_common())


def _kernel(event: dict[str, Any]) -> str | None:
    """Return the kernel of an event, or None if the event is not of a kernel."""
    name = event["name"].rpartition("[")[0]
    if event["cat"] == "DygraphKernelLaunch":
        return name.removesuffix(_LAUNCH)
    return name if name.startswith("native ") else None
