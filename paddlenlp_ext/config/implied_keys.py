"""Set the keys that other keys imply, with a note for each change.

    flash_mask: true, zero_padding unset   ->  zero_padding: true, and a note

The values change before the rules in config/validation are checked and before `run_config.json` is written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

from paddlenlp_ext.config.dataclass_options import convert
from paddlenlp_ext.config.merge_settings import ParseState
from paddlenlp_ext.devices import capabilities
from paddlenlp_ext.utils.distributed_env import world_size

Values = Callable[[str], Any]
"""Function that returns the value of a key, or its default if the key is not set."""


@dataclass(frozen=True)
class Adjustment:
    """New values of keys, with the reason.

    Attributes:
        values: key -> new value.
        reason: text of the note.
        because: keys that imply the values; the note gives the location of the first key that is set.
    """

    values: dict[str, Any]
    reason: str
    because: tuple[str, ...]


def adjust(state: ParseState) -> None:
    """Apply all adjustments in order, with a note for each; a key with an invalid value counts as unset."""
    for find in _ADJUSTMENTS:
        for change in find(state.value):
            state.values.update(change.values)
            state.report.note(change.reason, *change.because)


def translate_toolkit_keys(state: ParseState) -> None:
    """Translate keys of other toolkits to keys of this project (toolkit_keys.json), with a note for each."""
    for key, entry in state.table.compat.items():
        if key not in state.values or key in state.report.invalid_keys:
            continue
        read_as = [
            f"{here}: {json.dumps(value)}"
            for here, value in (entry.translation(state.values[key]) or {}).items()
            if _set_counterpart(state, key, here, value)
        ]
        if read_as:
            state.report.note(f"{key} is read as {' and '.join(read_as)}", key)


def _set_counterpart(state: ParseState, key: str, here: str, value: Any) -> bool:
    """Set `here` to `value` and return True; return False if `here` is invalid or is set to a different value."""
    earlier = state.settings.get(here)
    if here in state.report.invalid_keys:
        return False
    if earlier is not None and state.values[here] != value:
        message = f"{key} and {earlier.key} contradict each other: {key} means {here}: {json.dumps(value)}; keep one"
        state.report.error(message, key, here)
        return False
    state.settings[here] = state.settings[key]
    state.values[here] = convert(state.table.options[here], value, from_command_line=False)
    return True


def _evaluate(value: Values) -> Iterator[Adjustment]:
    strategy = value("evaluation_strategy")
    if strategy != "no" and not value("do_eval"):
        reason = (
            f"do_eval is on, because evaluation_strategy is {strategy}; set evaluation_strategy: no to switch it off"
        )
        yield Adjustment({"do_eval": True}, reason, ("evaluation_strategy", "do_eval"))


def _evaluate_on_start(value: Values) -> Iterator[Adjustment]:
    if value("eval_on_start") and value("do_train") and not value("do_eval"):
        reason = "do_eval is on, because eval_on_start is true; set eval_on_start: false to switch it off"
        yield Adjustment({"do_eval": True}, reason, ("eval_on_start", "do_eval"))


def _evaluate_held_out_rows(value: Values) -> Iterator[Adjustment]:
    if value("dev_ratio") and value("do_train") and not value("do_eval"):
        reason = "do_eval is on, because dev_ratio holds out eval rows; set dev_ratio: 0 to switch it off"
        yield Adjustment({"do_eval": True}, reason, ("dev_ratio", "do_eval"))


def _load_no_best_model(value: Values) -> Iterator[Adjustment]:
    if value("load_best_model_at_end") and value("evaluation_strategy") == "no":
        reason = "load_best_model_at_end has no effect: evaluation_strategy is no"
        yield Adjustment({"load_best_model_at_end": False}, reason, ("load_best_model_at_end", "evaluation_strategy"))


def _pack_for_flash_mask(value: Values) -> Iterator[Adjustment]:
    needed = [key for key in ("zero_padding", "use_flash_attention") if not value(key)]
    if value("flash_mask") and needed:
        reason = f"{' and '.join(needed)} {'are' if len(needed) > 1 else 'is'} on, because flash_mask is true"
        yield Adjustment(dict.fromkeys(needed, True), reason, ("flash_mask", *needed))


_RSLORA_PLUS = {"rslora": True, "lora_plus_scale": 4.0, "lora_alpha": 4}


def _expand_rslora_plus(value: Values) -> Iterator[Adjustment]:
    if value("rslora_plus"):
        reason = "rslora_plus sets rslora: true, lora_plus_scale: 4 and lora_alpha: 4"
        yield Adjustment({**_RSLORA_PLUS, "rslora_plus": False}, reason, ("rslora_plus",))


_RECOMPUTES = {True: ("recompute",), "unsloth": ("recompute", "offload_recompute_inputs")}
"""Value of `use_gradient_checkpointing` in transformers, PEFT and Unsloth -> keys with the same effect."""


def _recompute_for_gradient_checkpointing(value: Values) -> Iterator[Adjustment]:
    written = value("use_gradient_checkpointing")
    if keys := _RECOMPUTES.get(written):
        reason = f"use_gradient_checkpointing {written} sets {' and '.join(keys)}"
        yield Adjustment(
            {**dict.fromkeys(keys, True), "use_gradient_checkpointing": None}, reason, ("use_gradient_checkpointing",)
        )


def _train_for_epochs(value: Values) -> Iterator[Adjustment]:
    if value("max_steps") == 0:
        reason = "max_steps: 0 has no effect: num_train_epochs sets the length of the run, as with max_steps: -1"
        yield Adjustment({"max_steps": -1}, reason, ("max_steps",))


_DEGREES = tuple(f"{axis}_parallel_degree" for axis in ("tensor", "pipeline", "sharding", "sep", "context", "expert"))


def _use_one_process(value: Values) -> Iterator[Adjustment]:
    degrees = {key: value(key) for key in _DEGREES if value(key) > 1}
    if degrees and world_size() == 1:
        written = " and ".join(f"{key} {degree}" for key, degree in degrees.items())
        reason = (
            f"{written} {'are' if len(degrees) > 1 else 'is'} set to 1, because there is one process; "
            f"to start several, run python -m paddle.distributed.launch --nproc_per_node {prod(degrees.values())}"
        )
        yield Adjustment(dict.fromkeys(degrees, 1), reason, tuple(degrees))


def _offload_from_gpus(value: Values) -> Iterator[Adjustment]:
    device = value("device")
    if capabilities(device).pinned_memory:
        return
    reason = "{} has no effect: on the CPU, the optimizer state is already in host memory"
    if not capabilities(device).cpp:
        reason = "{} has no effect: " + f"Paddle has page-locked host memory for GPUs only, and the device is {device}"
    if value("offload_optim"):
        yield Adjustment({"offload_optim": False}, reason.format("offload_optim"), ("offload_optim", "device"))
    stages = [word for word in value("sharding").split() if word != "offload"]
    if stages and "offload" in value("sharding"):
        yield Adjustment({"sharding": " ".join(stages)}, reason.format("sharding offload"), ("sharding", "device"))


_ADJUSTMENTS = (
    *(
        _evaluate,
        _evaluate_on_start,
        _evaluate_held_out_rows,
        _load_no_best_model,
        _pack_for_flash_mask,
        _expand_rslora_plus,
    ),
    *(_recompute_for_gradient_checkpointing, _train_for_epochs, _use_one_process, _offload_from_gpus),
)
