"""Update the tables of keys in start/coming_from.md, English and Chinese, from the tables of docs/configuration.md.

python docs/make_configuration.py && python docs/make_coming_from.py
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from paddlenlp_ext.config.known_keys import known_keys
from paddlenlp_ext.peft.registry import peft_methods

DOCS = Path(__file__).parent
PAGES = [DOCS / folder / "coming_from.md" for folder in ("start", "zh/start")]
ALL_KEYS = DOCS / "configuration.md"
MARKERS = "<!-- {}: made by docs/make_coming_from.py -->\n", "<!-- end of {} -->\n"

KEYS = {
    "PaddleFormers": "model_name_or_path train_dataset_path eval_dataset_path train_dataset_type stage fine_tuning "
    "lora_rank max_seq_len packing mix_strategy attn_impl learning_rate evaluation_strategy sharding "
    "unified_checkpoint",
    "LLaMA-Factory": "model_name_or_path stage finetuning_type lora_rank lora_target dataset dataset_dir template "
    "cutoff_len max_samples val_size packing quantization_bit flash_attn deepspeed",
    "PEFT": "r lora_alpha lora_dropout target_modules exclude_modules use_rslora use_dora init_lora_weights bias "
    "modules_to_save layers_to_transform rank_pattern alpha_pattern task_type fan_in_fan_out",
    "TRL": "dataset_name max_length packing completion_only_loss assistant_only_loss use_peft lora_r "
    "lora_target_modules load_in_4bit gradient_checkpointing loss_type beta max_prompt_length "
    "eval_strategy padding_free",
}
"""Toolkit -> common keys."""


def key_tables(toolkit: str) -> str:
    """Return a list of the unchanged keys of a toolkit, and a table of its other keys."""
    answers, known = _answers(ALL_KEYS.read_text(encoding="utf-8")), known_keys(peft_methods())
    equal, lines = [], ["| key | here |", "|---|---|"]
    for key in KEYS[toolkit].split():
        if key in answers:
            lines.append(f"| `{key}` | {answers[key]} |")
        elif key in known.compat:
            entry = known.compat[key]
            lines.append(f"| `{key}` | {'no effect' if entry.outcome == 'no effect' else 'error'}: {entry.reason} |")
        elif known.keys[key] == key:
            equal.append(f"`{key}`")
        else:
            lines.append(f"| `{key}` | `{known.keys[key]}` |")
    return "\n".join([f"Unchanged: {', '.join(equal)}.", "", *lines])


def _answers(page: str) -> Mapping[str, str]:
    """Return the tables of toolkit keys as key -> meaning."""
    tables = page.split("<!-- toolkits: ")[1].split("<!-- end of toolkits -->")[0]
    rows = re.findall(r"^\| (`.+?`) \| (.+) \|$", tables, re.MULTILINE)
    return {key: answer for keys, answer in rows for key in re.findall(r"`([^`]+)`", keys)}


def renew(page: str) -> str:
    """Return the page with its tables generated."""
    for toolkit in KEYS:
        start, end = (marker.format(toolkit) for marker in MARKERS)
        before, rest = page.split(start)
        page = f"{before}{start}\n{key_tables(toolkit)}\n\n{end}{rest.split(end)[1]}"
    return page


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(renew(page.read_text(encoding="utf-8")), encoding="utf-8")
