r"""Load balance of pipeline stages: seconds of each process's own forward and backward passes, without waiting.

    PYTHONPATH=. python -m paddle.distributed.launch --nproc_per_node 2 --backend gloo benchmarks/stage_balance.py \
        CONFIG.json --pipeline_parallel_degree 2 --max_steps 5 [--key value ...]

Runs llm/run_finetune.py with a timer. The first process prints a JSON line at the end: for every stage its layers, and
its load relative to an even split, as estimated (parallel/pipeline/cost_model.py) and as measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from paddlenlp_ext import configure_runtime

configure_runtime()  # before Paddle is imported

import paddle.distributed as dist

from benchmarks.measure import report
from llm import run_finetune
from paddlenlp_ext.parallel.pipeline import runtime
from paddlenlp_ext.parallel.pipeline.stages import StagePlan
from paddlenlp_ext.utils.distributed_env import is_main_rank
from paddlenlp_ext.utils.run_command import run_command


class Busy:
    """Seconds spent in passes, without the first global batch, which includes one-time work."""

    def __init__(self) -> None:
        self.seconds, self.plan = 0.0, None
        self._num_steps = 0

    def watch(self) -> None:
        """Time every pass of every pipeline from now on."""
        pipeline_class = runtime.Pipeline
        pipeline_class._forward = self._timed(pipeline_class._forward)
        runtime._backward = self._timed(runtime._backward)
        run = pipeline_class.run

        def counted(own: Any, *arguments: Any, **options: Any) -> None:
            self.plan, self._num_steps = own.plan, self._num_steps + 1
            run(own, *arguments, **options)

        pipeline_class.run = counted

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            start = time.perf_counter()
            result = function(*arguments)
            if self._num_steps > 1:
                self.seconds += time.perf_counter() - start
            return result

        return timed


def stages(plan: StagePlan, seconds: list[float]) -> list[dict[str, Any]]:
    """Return a line for each stage: layers, estimated and measured load relative to an even split."""
    lines, degree = [], plan.degree
    for stage in range(degree):
        own = range(stage, plan.num_chunks, degree)
        lines.append(
            {
                "layers": sum(plan.bounds[chunk + 1] - plan.bounds[chunk] for chunk in own),
                "counted": round(sum(plan.loads[chunk] for chunk in own) * degree / sum(plan.loads), 3),
                "measured": round(seconds[stage] * degree / sum(seconds), 3),
            }
        )
    return lines


def main(arguments: list[str]) -> None:
    busy = Busy()
    busy.watch()
    run_finetune.main(arguments)
    everyone: list[float] = []
    dist.all_gather_object(everyone, busy.seconds)
    if is_main_rank():
        report("stage_balance", {"arguments": arguments, "stages": stages(busy.plan, everyone)}, "paddlepaddle")


if __name__ == "__main__":
    run_command(main)
