"""Checks of how a run is laid out over processes."""

from __future__ import annotations

from paddlenlp_ext.config.parallel_degrees import Degrees, complete_degrees, nearest_degrees
from paddlenlp_ext.config.parallel_flags import FLAGS
from paddlenlp_ext.config.parse_state import ParseState
from paddlenlp_ext.config.run_config import RunConfig
from paddlenlp_ext.config.validation.registry import Checks
from paddlenlp_ext.utils.distributed_env import world_size

check = Checks()
_DEGREES = ("tensor_parallel_degree", "pipeline_parallel_degree", "sharding_parallel_degree")


@check("sharding", "optim", "device", *_DEGREES)
def _processes(config: RunConfig, given: ParseState) -> None:
    parallel, processes = config.parallel, world_size()
    try:
        degrees = complete_degrees(parallel, processes)
    except ValueError as error:
        given.refuse(str(error), *[key for key in _DEGREES if getattr(parallel, key) > 1])
        return
    if parallel.sharding:
        _sharding(parallel.sharding, config.precision.device, degrees, processes, given)
    elif parallel.sharding_parallel_degree > 1:
        given.note(
            "sharding_parallel_degree has no effect: sharding is off; set sharding to stage1, stage2 or stage3",
            "sharding_parallel_degree",
        )
    _method(config, degrees, processes, given)
    if degrees.tensor > 1 and config.optim.optim != "adamw":
        given.refuse(
            f"optim {config.optim.optim} keeps blocks of a whole parameter together, and tensor_parallel_degree "
            f"{degrees.tensor} cuts parameters; use optim adamw, or sharding in place of tensor parallelism",
            "optim",
            "tensor_parallel_degree",
        )


def _method(config: RunConfig, degrees: Degrees, processes: int, given: ParseState) -> None:
    """Refuse what the mathematics of the adapter method does not allow."""
    switch, excludes = config.peft_switch, getattr(config.peft, "excludes", {})
    if switch is None or degrees.tensor == 1:
        return
    if why := excludes.get("tensor_parallel_degree"):
        given.refuse(
            f"{switch} does not go with tensor_parallel_degree {degrees.tensor}: {why}; nearest with {processes}: "
            f"{nearest_degrees(degrees, processes, most_tensor=1)}",
            "tensor_parallel_degree",
            switch,
        )
    if (why := excludes.get("sequence_parallel")) and config.parallel.sequence_parallel:
        given.refuse(
            f"{switch} does not go with sequence_parallel: {why}; set sequence_parallel: false",
            "sequence_parallel",
            switch,
        )


def _sharding(sharding: str, device: str, degrees: Degrees, processes: int, given: ParseState) -> None:
    stages = [word for word in sharding.split() if word.startswith("stage")]
    if len(stages) != 1:
        given.refuse(
            f"sharding {sharding!r} names {len(stages) or 'no'} stages; name one of stage1, stage2, stage3", "sharding"
        )
    elif "offload" in sharding.split() and device == "cpu":
        given.refuse(
            "sharding offload keeps optimizer state off the GPU; on the CPU it is in the host's memory anyway: use "
            f"sharding {stages[0]}",
            "sharding",
        )
    elif processes == 1:
        given.note(f"sharding {stages[0]} has no effect: there is one process", "sharding")
    elif degrees.sharding == 1:
        given.note(f"sharding {stages[0]} has no effect: the degrees are {degrees}", "sharding")
    elif degrees.pipeline > 1 and stages[0] != "stage1":
        given.refuse(
            f"sharding {stages[0]} does not go with a pipeline, whose micro-batches overlap; use sharding stage1, or "
            "pipeline_parallel_degree 1",
            "sharding",
            "pipeline_parallel_degree",
        )


@check("pipeline_parallel_degree", "virtual_pp_degree")
def _pipeline(config: RunConfig, given: ParseState) -> None:
    if config.parallel.pipeline_parallel_degree <= 1 < config.parallel.virtual_pp_degree:
        given.note("virtual_pp_degree has no effect: there is no pipeline", "virtual_pp_degree")


@check(*FLAGS, *_DEGREES, "sharding")
def _flags(config: RunConfig, given: ParseState) -> None:
    parallel = config.parallel
    for key, (owner, what, flags) in FLAGS.items():
        words = getattr(parallel, key).split()
        for word in [word for word in words if flags[word].outcome == "not here"]:
            given.refuse(flags[word].message(key, word), key)
        is_off = getattr(parallel, owner) in ("", -1, 0, 1)
        if words and is_off and key not in given.broken:
            given.note(f"{key} has no effect: there is no {what}", key)
        elif not is_off:
            for word in dict.fromkeys(words):
                if flags[word].outcome != "not here":
                    given.note(flags[word].message(key, word), key)
