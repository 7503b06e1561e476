"""Rules about post-training quantization."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paddlenlp_ext.config.dataclass_options import options_of
from paddlenlp_ext.config.errors import Report
from paddlenlp_ext.config.paddlenlp_keys import COMPAT_KEYS
from paddlenlp_ext.config.sections.data import DataConfig
from paddlenlp_ext.config.sections.ptq import PTQConfig

_PACKING_KEYS = ("zero_padding", "greedy_zero_padding", "pad_to_multiple_of", "pad_to_max_length", "use_pose_convert")
_STREAM_KEYS = ("lazy", "shuffle_buffer_size", "dataloader_num_workers")
QUANTIZATION_KEYS = frozenset(
    {
        *("model_name_or_path", "tokenizer_name_or_path", "output_dir", "overwrite_output_dir", "device"),
        "per_device_train_batch_size",
        *(option.key for section in (PTQConfig, DataConfig) for option in options_of(section, "")),
    }
) - {*_PACKING_KEYS, *_STREAM_KEYS, "eval_dataset_path", "dev_ratio", "audit", "max_lost_targets"}
"""Keys that run_quantization.py uses; all other keys are about training."""
_ACTIVATION_KEYS = {
    entry.key: entry for entry in COMPAT_KEYS if entry.needs == "do_ptq" and entry.key not in QUANTIZATION_KEYS
}


def check_quantization(sections: Mapping[str, Any], given: Mapping[str, Any], report: Report) -> None:
    """Check the configuration of a quantization, and add problems and notes to `report`.

    Args:
        sections: the sections by name.
        given: keys that the user set, with their values.
        report: problems and notes.
    """
    ptq: PTQConfig = sections["ptq"]
    switches = ("do_ptq", "do_gptq", "do_awq")
    if report.invalid_keys.isdisjoint(switches) and len(ptq.methods) != 1:
        message = (
            f"{' and '.join(ptq.methods)} are both true; keep one"
            if ptq.methods
            else f"no quantization method is on; set one of {', '.join(switches)} to true"
        )
        report.error(message, *(ptq.methods or switches))
        return
    needed = {"model_name_or_path": sections["model"].model_name_or_path, "output_dir": sections["train"].output_dir}
    if ptq.methods and ptq.methods != ["do_ptq"]:
        needed["dataset_name_or_path"] = sections["data"].dataset_name_or_path
    for key, value in needed.items():
        if value is None and key not in report.invalid_keys:
            report.error(f"{ptq.methods[0]} needs {key}, which is not set", key)
    if sections["model"].weight_quantize_algo is not None:
        report.error(
            "weight_quantize_algo applies only to training; leave it out, and set quant_type to the new format",
            "weight_quantize_algo",
        )
    if ptq.weight_layout == "awq" and ptq.quant_type == "weight_only_int8":
        report.error(
            "weight_layout: awq stores only 4-bit weights; use compressed-tensors or gptq for weight_only_int8",
            "weight_layout",
            "quant_type",
        )
    idle = {"desc_act": "do_gptq", "gptq_damping": "do_gptq", "gptq_step": "do_gptq"}
    idle |= {"auto_clip": "do_awq", "awq_step": "do_awq"}
    for key, value in given.items():
        entry = _ACTIVATION_KEYS.get(key)
        if entry is not None and value not in entry.neutral:
            report.error(entry.message(str(value)), key)
        elif key in idle and idle[key] not in ptq.methods:
            report.note(f"{key} has no effect: {idle[key]} is false", key)
        elif key == "group_size" and ptq.weight_quant_method != "groupwise":
            report.note("group_size has no effect: weight_quant_method is abs_max_channel_wise", key)
        elif key not in QUANTIZATION_KEYS and key not in report.invalid_keys:
            report.note(f"{key} has no effect: nothing is trained", key)
