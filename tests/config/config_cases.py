"""Helpers of the config tests: stand-ins for adapter methods, a minimal file, a loader."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from paddlenlp_ext.config import ConfigError, Problem, RunConfig, load_run_config, option
from paddlenlp_ext.config.known_keys import KnownKeys, known_keys

ALPHABET = "abcdefghijklmnopqrstuvwxyz_"


@dataclass(frozen=True, kw_only=True)
class FakeLoRAConfig:
    """Stand-in for the config of LoRA: its keys, without the method."""

    path: str | None = option(None, help="adapter to start from")
    rank: int = option(8, minimum=1, help="rank")
    alpha: float | None = option(None, above=0, help="scale")
    dropout: float = option(0.0, minimum=0, below=1, help="dropout")
    target_modules: tuple[str, ...] | None = option(None, help="targets")
    rslora: bool = option(False, key="rslora", help="rank-stabilized scale")
    plus_scale: float = option(1.0, above=0, help="ratio of learning rates")
    not_a_key: int = 3

    def __post_init__(self) -> None:
        if self.rank == 13:
            raise ValueError("rank 13 brings bad luck; take 12")


@dataclass(frozen=True, kw_only=True)
class FakePissaConfig(FakeLoRAConfig):
    """Stand-in for PiSSA, which refines LoRA: it is switched on in addition to `lora` and uses the keys of `lora`."""

    refines: ClassVar[str] = "lora"


@dataclass(frozen=True, kw_only=True)
class FakeLoKrConfig:
    """Stand-in for LoKr, whose rank has an alias."""

    rank: int = option(8, minimum=1, aliases=("lokr_dim",), help="rank")


METHODS: dict[str, type] = {"lora": FakeLoRAConfig, "pissa": FakePissaConfig, "lokr": FakeLoKrConfig}
SMALLEST: dict[str, Any] = {
    "model_name_or_path": "model",
    "dataset_name_or_path": "data",
    "output_dir": "out",
    "do_train": True,
}


def known() -> KnownKeys:
    return known_keys(METHODS)


def write(folder: Path, values: dict[str, Any] | str, name: str = "run.json") -> str:
    """Write a configuration file with one key per line; return its path for the loader."""
    text = values if isinstance(values, str) else json.dumps(values, indent=4, allow_nan=True)
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


def load(*argv: str, methods: dict[str, type] = METHODS) -> RunConfig:
    return load_run_config(argv, methods)


def problems(*argv: str, methods: dict[str, type] = METHODS) -> list[Problem]:
    """Return the problems of a command line, which must have at least one."""
    try:
        load_run_config(argv, methods)
    except ConfigError as error:
        return error.problems
    raise AssertionError(f"accepted: {argv}")


def edits(word: str, seed: int) -> dict[str, str]:
    """Return one typo of the word for each kind of edit, by kind."""
    draw = random.Random(f"{word} {seed}")
    at = draw.randrange(1, len(word) - 1)
    other = draw.choice([letter for letter in ALPHABET if letter != word[at]])
    return {
        "left out": word[:at] + word[at + 1 :],
        "put in": word[:at] + draw.choice(ALPHABET) + word[at:],
        "replaced": word[:at] + other + word[at + 1 :],
        "swapped": word[:at] + word[at + 1] + word[at] + word[at + 2 :],
    }
