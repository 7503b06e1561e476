r"""Load balance of pipeline stages: seconds of each process's own forward and backward passes, without waiting.

    PYTHONPATH=. python -m paddle.distributed.launch --nproc_per_node 2 --backend gloo benchmarks/stage_balance.py \
        CONFIG.json --pipeline_parallel_degree 2 --max_steps 5 [--key value ...]

llm/run_finetune.py with a clock in it. The first process prints a JSON line at the end: for every stage its layers, its
counted share of an even one (parallel/pipeline/cost_model.py), and its measured one.
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
from paddlenlp_ext.utils.process import run_command


class Busy:
    """Seconds spent in passes, those of the first window left out: it makes what is made once."""

    def __init__(self) -> None:
        self.seconds, self.plan = 0.0, None
        self._windows = 0

    def watch(self) -> None:
        """Put a clock around every pass of every pipeline from now on."""
        of_class = runtime.Pipeline
        of_class._forward = self._timed(of_class._forward)
        runtime._backward = self._timed(runtime._backward)
        run = of_class.run

        def counted(own: Any, *arguments: Any, **options: Any) -> None:
            self.plan, self._windows = own.plan, self._windows + 1
            run(own, *arguments, **options)

        of_class.run = counted

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            start = time.perf_counter()
            result = function(*arguments)
            if self._windows > 1:
                self.seconds += time.perf_counter() - start
            return result

        return timed


def stages(plan: StagePlan, seconds: list[float]) -> list[dict[str, Any]]:
    """A line for each stage: layers, counted and measured share of an even one."""
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
