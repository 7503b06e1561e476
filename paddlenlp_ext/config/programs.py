"""Programs that read a `RunConfig`: scripts, sections, and keys without effect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from paddlenlp_ext.config.dataclass_options import options_of
from paddlenlp_ext.config.run_config import (
    GRPO_SECTIONS,
    PREFERENCE_SECTIONS,
    QUANTIZATION_SECTIONS,
    REWARD_SECTIONS,
    SECTIONS,
)
from paddlenlp_ext.config.validation.grpo import UNREAD_GRPO_KEYS
from paddlenlp_ext.config.validation.preference import UNREAD_KEYS
from paddlenlp_ext.config.validation.ptq import QUANTIZATION_KEYS


@dataclass(frozen=True)
class Program:
    """Program whose configuration is a `RunConfig`.

    Attributes:
        name: short name, such as "sft"; its schema is `config/schema/<name>.schema.json`.
        script: name of the script in llm/.
        sections: name -> class, for every section.
        has_adapters: whether the program accepts adapter methods.
        unread: keys of the sections that the program does not read.
    """

    name: str
    script: str
    sections: Mapping[str, type]
    has_adapters: bool = True
    unread: frozenset[str] = field(default_factory=frozenset)


def _without(keys: frozenset[str]) -> frozenset[str]:
    """Return the keys of run_quantization.py's sections, without `keys`."""
    sections = QUANTIZATION_SECTIONS.items()
    return frozenset(option.key for name, section in sections for option in options_of(section, name)) - keys


PROGRAMS = (
    Program("sft", "run_finetune.py", SECTIONS),
    Program("dpo", "run_dpo.py", PREFERENCE_SECTIONS, unread=UNREAD_KEYS),
    Program("reward", "run_reward.py", REWARD_SECTIONS, unread=UNREAD_KEYS),
    Program("grpo", "run_grpo.py", GRPO_SECTIONS, unread=frozenset(UNREAD_GRPO_KEYS)),
    Program("quantize", "run_quantization.py", QUANTIZATION_SECTIONS, False, _without(QUANTIZATION_KEYS)),
)


def find_program(script: str) -> Program:
    """Return the program with the script `script`, such as "run_dpo.py"."""
    return next(program for program in PROGRAMS if program.script == script)
