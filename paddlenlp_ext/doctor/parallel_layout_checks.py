"""Checks of parallel training: compare each layout on two processes with training in one process.

Layouts run on two GPUs over NCCL, on two devices of a plug-in over the plug-in's collectives, or on the CPU over gloo
if the machine has fewer than two devices of the type. The processes are launched once and train in all layouts.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from paddlenlp_ext.devices import AUTO, device_count, device_type
from paddlenlp_ext.doctor.check import Check, Difference
from paddlenlp_ext.doctor.devices_and_dtypes import Target
from paddlenlp_ext.doctor.tiny_run import precision_keys, run_training
from paddlenlp_ext.doctor.training_checks import LIMITS, difference_of_steps

AREA = "layouts"
PROCESSES = 2
TIMEOUT_SECONDS = 300.0
_PACKAGE = Path(__file__).parents[1]


class Layout(NamedTuple):
    """Parallel layout of two processes.

    Attributes:
        keys: configuration keys of the layout.
        replicas: number of model replicas, which train on different micro-batches.
    """

    keys: dict[str, Any]
    replicas: int


LAYOUTS = {
    "data parallel": Layout({}, 2),
    **{f"ZeRO {stage}": Layout({"sharding": f"stage{stage}", "sharding_parallel_degree": 2}, 2) for stage in (1, 2, 3)},
    "tensor parallel": Layout({"tensor_parallel_degree": 2}, 1),
    "tensor and sequence parallel": Layout({"tensor_parallel_degree": 2, "sequence_parallel": True}, 1),
    "pipeline": Layout({"pipeline_parallel_degree": 2}, 1),
}


def layout_target(device: str | None = None) -> Target:
    """Return the target of the layout checks: devices of a type if there are at least two, otherwise the CPU.

    Args:
        device: a device; only its type counts. None: a GPU if there is one, else the CPU.
    """
    kind = device_type(device or AUTO)
    return Target(kind if kind != "cpu" and device_count(kind) >= PROCESSES else "cpu", "float32")


def layout_checks(target: Target) -> list[Check]:
    """Return one check per parallel layout."""
    limit = LIMITS[target.dtype]
    return [Check(AREA, name, target, limit, functools.partial(_measure, name, target)) for name in LAYOUTS]


def _measure(name: str, target: Target) -> Difference:
    # The reference process trains on the micro-batches of all replicas one after another.
    alone = run_training({"gradient_accumulation_steps": LAYOUTS[name].replicas, **precision_keys(target)})
    return difference_of_steps(launch(target)[name], alone)


@functools.cache
def launch(target: Target) -> dict[str, list[float]]:
    """Train in all layouts on two processes; return a dict from layout names to losses and gradient norms.

    Raises:
        RuntimeError: a process failed; the message quotes the last line with "Error" in the log of a process.
        subprocess.TimeoutExpired: the processes ran for more than `TIMEOUT_SECONDS`.
    """
    devices = ["--devices", ",".join(map(str, range(PROCESSES)))]
    where = devices if target.device != "cpu" else ["--nproc_per_node", str(PROCESSES), "--backend", "gloo"]
    paths = os.pathsep.join(filter(None, [str(_PACKAGE.parent), os.environ.get("PYTHONPATH")]))
    threads = {} if target.device != "cpu" else {"MKL_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        worker = [str(Path(__file__).with_name("parallel_layout_worker.py")), folder, target.device]
        command = [sys.executable, "-m", "paddle.distributed.launch", *where, "--log_dir", f"{folder}/log", *worker]
        environment = {**os.environ, "PYTHONPATH": paths, **threads}
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, timeout=TIMEOUT_SECONDS, check=False
        )
        if done.returncode != 0:
            files = Path(folder, "log").glob("workerlog.*")
            logs = [file.read_text(encoding="utf-8", errors="replace").split("\n") for file in files]
            last = next((line for lines in logs for line in reversed(lines) if "Error" in line), "no message")
            raise RuntimeError(f"the launched processes failed: {last}")
        return json.loads(Path(folder, "results.json").read_text(encoding="utf-8"))
