"""Rules about the parallel layout of a run."""

from __future__ import annotations

from paddlenlp_ext.config.errors import Report
from paddlenlp_ext.config.paddlenlp_flags import COMPAT_FLAGS
from paddlenlp_ext.config.parallel_degrees import Degrees, complete_degrees, nearest_degrees
from paddlenlp_ext.config.sections.optim import OptimConfig
from paddlenlp_ext.config.sections.parallel import ParallelConfig
from paddlenlp_ext.config.validation.rules import AdapterChoice, Rules
from paddlenlp_ext.utils.distributed_env import world_size

rules = Rules()
_DEGREES = (
    *("tensor_parallel_degree", "pipeline_parallel_degree", "sharding_parallel_degree"),
    "expert_parallel_degree",
)
_SHARDING_WEIGHTS = (
    *("tensor_parallel_degree", "pipeline_parallel_degree", "expert_parallel_degree"),
    *("sep_parallel_degree", "context_parallel_degree"),
)
LAYOUT_KEYS = ("sharding", *_SHARDING_WEIGHTS)
"""Keys of `check_whole_model`."""


def check_whole_model(parallel: ParallelConfig, what: str, report: Report) -> None:
    """Report layouts in which a process does not hold the whole model.

    Args:
        parallel: section of the run.
        what: what each process computes with the whole model, such as "GRPO samples with the full model".
        report: report of the problems.
    """
    reason = f"{what} in each process"
    for key in _SHARDING_WEIGHTS:
        if getattr(parallel, key) > 1:
            report.error(f"{key}: {reason}; use data parallelism, or sharding: stage1 or stage2", key)
    if "stage3" in parallel.sharding.split():
        report.error(f"sharding: stage3 shards the weights, but {reason}; set stage1 or stage2", "sharding")


@rules("sharding", "optim", *_DEGREES)
def _layout_fits_processes(
    parallel: ParallelConfig, optim: OptimConfig, adapter: AdapterChoice, report: Report
) -> None:
    processes = world_size()
    try:
        degrees = complete_degrees(parallel, processes)
    except ValueError as error:
        report.error(str(error), *[key for key in _DEGREES if getattr(parallel, key) > 1])
        return
    if parallel.sharding:
        _check_sharding(parallel.sharding, degrees, processes, report)
    elif parallel.sharding_parallel_degree > 1:
        report.note(
            "sharding_parallel_degree has no effect: sharding is off; set sharding to stage1, stage2 or stage3",
            "sharding_parallel_degree",
        )
    _check_adapter(parallel, adapter, degrees, processes, report)
    for key, degree in (("tensor_parallel_degree", degrees.tensor), ("expert_parallel_degree", degrees.expert)):
        if degree > 1 and optim.optim not in ("adamw", "muon"):
            report.error(
                f"optim: {optim.optim} needs unsharded parameters, but {key}: {degree} shards the parameters; use "
                f"optim: adamw or optim: muon, or sharding instead of {key}",
                "optim",
                key,
            )


def _check_adapter(
    parallel: ParallelConfig, adapter: AdapterChoice, degrees: Degrees, processes: int, report: Report
) -> None:
    """Report parallel layouts that the adapter method does not support."""
    switch, excludes = adapter.switch, getattr(adapter.method, "excludes", {})
    if switch is None or degrees.tensor == 1:
        return
    if why := excludes.get("tensor_parallel_degree"):
        report.error(
            f"{switch} cannot be combined with tensor_parallel_degree {degrees.tensor}: {why}; nearest valid degrees: "
            f"{nearest_degrees(degrees, processes, max_tensor=1)}",
            "tensor_parallel_degree",
            switch,
        )
    if (why := excludes.get("sequence_parallel")) and parallel.sequence_parallel:
        report.error(
            f"{switch} cannot be combined with sequence_parallel: {why}; set sequence_parallel: false",
            "sequence_parallel",
            switch,
        )


def _check_sharding(sharding: str, degrees: Degrees, processes: int, report: Report) -> None:
    stages = [word for word in sharding.split() if word.startswith("stage")]
    if len(stages) != 1:
        report.error(
            f"sharding {sharding!r} names {len(stages) or 'no'} stages; set one of stage1, stage2, stage3", "sharding"
        )
    elif processes == 1:
        report.note(f"sharding {stages[0]} has no effect: there is one process", "sharding")
    elif degrees.sharding == 1:
        report.note(f"sharding {stages[0]} has no effect: the degrees are {degrees}", "sharding")
    elif degrees.pipeline > 1 and stages[0] != "stage1":
        report.error(
            f"sharding: {stages[0]} cannot be combined with a pipeline, whose micro-batches overlap; use sharding: "
            "stage1, or pipeline_parallel_degree: 1",
            "sharding",
            "pipeline_parallel_degree",
        )


@rules("pipeline_parallel_degree", "virtual_pp_degree")
def _virtual_stages_need_a_pipeline(parallel: ParallelConfig, report: Report) -> None:
    if parallel.pipeline_parallel_degree <= 1 < parallel.virtual_pp_degree:
        report.note("virtual_pp_degree has no effect: there is no pipeline", "virtual_pp_degree")


@rules(*COMPAT_FLAGS, *_DEGREES, "sharding")
def _note_flags(parallel: ParallelConfig, report: Report) -> None:
    for key, flags in COMPAT_FLAGS.items():
        words = list(dict.fromkeys(getattr(parallel, key).split()))
        if words and getattr(parallel, flags.owner) in ("", -1, 0, 1):
            report.note(f"{key} has no effect: there is no {flags.what}", key)
            continue
        for word in words:
            tell = report.error if word in flags.unavailable else report.note
            tell(flags.message(key, word), key)
