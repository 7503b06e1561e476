"""Methods to compare: shipped configurations of one model, LoRA of several ranks, all other registered methods."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from paddlenlp_ext.config.dataclass_options import options_of
from paddlenlp_ext.config.run_config import SECTIONS, switches_of

SHIPPED = ROOT / "llm" / "config" / "smollm2"
LORA_RANKS = (2, 8, 16, 32)
_LORA_RATE = 2e-3
_OTHER_PROGRAMS = ("dpo", "reward", "ptq", "gptq", "awq")
_USUAL_RATE = 1e-3  # for methods without a shipped configuration
_OF_THE_BASE = ("weight_quantize_algo", "weight_double_quant")  # required by LoftQ


@dataclass(frozen=True)
class Entry:
    """One line of the table.

    Attributes:
        name: name of the row in the table, and of the folder of its runs.
        learning_rate: the middle value of the sweep.
        keys: configuration keys in addition to the keys of all runs.
    """

    name: str
    learning_rate: float
    keys: dict[str, Any] = field(default_factory=dict)


def all_entries(methods: Mapping[str, type], shipped: Path = SHIPPED) -> list[Entry]:
    """Return full fine-tuning, then LoRA and its variants, then the other methods by name.

    Args:
        methods: config class of every registered method by the JSON key that selects the method.
        shipped: folder of `<name>_argument.json` files; only their method keys and learning rates are used.
    """
    entries = {entry.name: entry for entry in _variants_of_lora()}
    others = {file for program in _OTHER_PROGRAMS for file in shipped.glob(f"{program}_*")}
    for file in sorted(set(shipped.glob("*_argument.json")) - others):
        entry = _from_file(file)
        if _switches_on(entry, methods) != {"lora"}:  # plain LoRA has entries of its own
            entries[entry.name] = entry
    covered = {switch for entry in entries.values() for switch in _switches_on(entry, methods)}
    for switch in sorted(methods.keys() - covered):
        keys = dict.fromkeys(switches_of(switch, methods[switch]), True)
        entries[switch] = Entry(switch, _USUAL_RATE, keys)
    full = [entry for entry in entries.values() if not entry.keys]
    return full + [entry for entry in entries.values() if entry.keys]


def _variants_of_lora() -> list[Entry]:
    plain = [Entry(f"lora_r{rank}", _LORA_RATE, {"lora": True, "lora_rank": rank}) for rank in LORA_RANKS]
    of_rank_16 = {"lora": True, "lora_rank": 16}
    return [
        *plain,
        Entry("qlora_r16", _LORA_RATE, {**of_rank_16, "weight_quantize_algo": "nf4", "weight_double_quant": True}),
        Entry("rslora_r32", _LORA_RATE, {"lora": True, "lora_rank": 32, "rslora": True}),
        Entry("lora_plus_r16", _LORA_RATE / 4, {**of_rank_16, "lora_plus_scale": 16.0}),
        Entry("lora_neftune_r16", _LORA_RATE, {**of_rank_16, "neftune": True}),
    ]


def _switches_on(entry: Entry, methods: Mapping[str, type]) -> set[str]:
    return {switch for switch in methods if entry.keys.get(switch) is True}


def _from_file(file: Path) -> Entry:
    content = json.loads(file.read_text(encoding="utf-8"))
    options = [option for section, options_class in SECTIONS.items() for option in options_of(options_class, section)]
    shared = {name for option in options for name in option.spellings}
    keys = {key: value for key, value in content.items() if key not in shared or key in _OF_THE_BASE}
    name = file.name.removesuffix("_argument.json")
    return Entry(name if keys else "full", content["learning_rate"], keys)
