"""Collect facts for the history and the report of a run: changed keys, environment, command and data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle

from paddlenlp_ext._runtime import threads_per_process
from paddlenlp_ext.config import RunConfig
from paddlenlp_ext.config.dataclass_options import Option, options_of
from paddlenlp_ext.config.run_config import method_options
from paddlenlp_ext.devices import capabilities, model_of
from paddlenlp_ext.trainer.lr_scheduler import num_warmup_steps
from paddlenlp_ext.utils.environment import describe_system, processor_name
from paddlenlp_ext.utils.secrets import command_without_secrets, without_secrets

_NUM_BINS = 40
_COUNTS = ("num_read", "num_truncated", "num_dropped", "num_tokens", "num_target_tokens", "num_lost_target_tokens")


def describe_run_start(config: RunConfig, rows: Any, total_steps: int, command: Sequence[str]) -> dict[str, Any]:
    """Return the facts of a run at its start as JSON values without secrets.

    Args:
        config: the run's configuration.
        rows: training rows; a stream has no statistics.
        total_steps: number of optimizer steps.
        command: program and arguments of the command that started the process.
    """
    return {
        "kind": kind_of_run(config),
        "total_steps": total_steps,
        "warmup_steps": num_warmup_steps(config.optim, total_steps),
        "command": command_without_secrets(command),
        "changed_keys": without_secrets(changed_keys(config)),
        "environment": dict(_environment()),
        "data": without_secrets(_data_facts(rows)),
    }


def kind_of_run(config: RunConfig) -> str:
    """Return the command that starts a run with this configuration: sft, dpo, reward or grpo."""
    kinds = {"reward": config.reward, "dpo": config.preference, "grpo": config.grpo}
    return next((kind for kind, section in kinds.items() if section is not None), "sft")


def changed_keys(config: RunConfig) -> dict[str, list[Any]]:
    """Return the value and the default of each key whose value differs from its default."""
    options: list[Option] = []
    for name, section in config.sections.items():
        if name != "command":
            options += options_of(type(section), name)
    if config.peft is not None and config.peft_switch is not None:
        options += method_options(config.peft_switch, type(config.peft))
    defaults = {option.key: _plain(option.default) for option in options}
    return {
        key: [value, defaults.get(key)]
        for key, value in ((key, _plain(value)) for key, value in config.to_flat_dict().items())
        if value != defaults.get(key)
    }


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _environment() -> list[tuple[str, str]]:
    device = paddle.device.get_device()
    device = ", ".join(filter(None, [device, model_of(device)]))
    processor = f"{processor_name()}, {threads_per_process()} cores for one process"
    return [*describe_system(), ("processor", processor), ("device", device)]


def _data_facts(rows: Any) -> dict[str, Any]:
    """Return counts of the training rows, and a histogram of their lengths; empty for streams."""
    stats, lengths = getattr(rows, "stats", None), getattr(rows, "lengths", None)
    if stats is None or lengths is None or not len(lengths):
        return {}
    longest = int(lengths.max()) + 1
    width = max(1, math.ceil(longest / _NUM_BINS))
    counts = np.bincount(np.asarray(lengths) // width, minlength=1).tolist()
    return {
        "num_rows": len(lengths),
        **{name: getattr(stats, name) for name in _COUNTS},
        "dropped": stats.dropped,
        "bin_width": width,
        "bins": counts,
        "median_length": int(np.median(lengths)) + 1,
        "longest": longest,
    }


def peak_device_bytes() -> dict[str, int]:
    """Return the peak memory on the device as `{"peak_device_memory_bytes": bytes}`; empty if Paddle does not count."""
    device = paddle.device.get_device()
    if not capabilities(device).memory_figures:
        return {}
    return {"peak_device_memory_bytes": paddle.device.max_memory_allocated(device)}
