"""Phases of the time to the first optimizer step of llm/run_finetune.py, for startup.py.

    python -m benchmarks.startup_phases STARTED CONFIG.json [--key value ...]

STARTED is `time.monotonic()` at the start of the command. The last line printed is JSON: for each phase, wall-clock
seconds and CPU seconds of all threads.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


class Clock:
    """Clock of phases; each phase starts at the end of the previous phase."""

    def __init__(self, started: float) -> None:
        self.phases: dict[str, dict[str, float]] = {}
        self._seen, self._seen_processor = started, 0.0

    def end(self, phase: str) -> None:
        """End a phase: add the time since the end of the previous phase to `phase`."""
        now, processor = time.monotonic(), sum(os.times()[:2])
        seconds, processor_seconds = now - self._seen, processor - self._seen_processor
        self.phases[phase] = {"seconds": round(seconds, 3), "processor_seconds": round(processor_seconds, 3)}
        self._seen, self._seen_processor = now, processor


def main(started: float, arguments: list[str]) -> None:
    clock = Clock(started)
    from paddlenlp_ext._runtime import configure_runtime

    configure_runtime()
    clock.end("import paddlenlp_ext")
    import paddle  # noqa: F401

    clock.end("import paddle")
    from llm import run_finetune
    from paddlenlp_ext.trainer import build_trainer as build
    from paddlenlp_ext.trainer import load_data as loading
    from paddlenlp_ext.trainer.callbacks.callback import Callback

    class Report(Callback):
        def on_train_begin(self, state: Any) -> None:
            clock.end("order, optimizer, C++ library")

        def on_step_end(self, state: Any, report: Any) -> None:
            clock.end("first step")
            print(json.dumps(clock.phases), flush=True)
            os._exit(0)

    real_load_data, real_build_trainer = loading.load_data, build.build_trainer

    def load_data(config: Any, *rows: Any) -> Any:
        clock.end("import the rest, read the configuration")
        data = real_load_data(config, *rows)
        clock.end("data")
        return data

    def build_trainer(config: Any, data: Any) -> Any:
        trainer = real_build_trainer(config, data, [Report()])
        clock.end("model")
        return trainer

    loading.load_data, build.build_trainer = load_data, build_trainer
    run_finetune.main(arguments)


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
