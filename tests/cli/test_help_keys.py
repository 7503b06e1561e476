"""Keys that `--help` lists: a run of the program reads them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from paddlenlp_ext.cli.run_finetune import run_finetune
from paddlenlp_ext.cli.run_quantization import run_quantization
from paddlenlp_ext.config.dataclass_options import OptionGroup
from paddlenlp_ext.config.help_text import read_keys
from paddlenlp_ext.config.known_keys import known_keys
from paddlenlp_ext.config.programs import PROGRAMS
from tests.common.models import write_tiny_data, write_tiny_model

PAIRS = [{"prompt": f"{word} fig =", "chosen": f"fig {word}", "rejected": "lime plum"} for word in ("red", "blue")]
TRAINING = ["do_train", "do_eval", "audit", "zero_padding", "greedy_zero_padding", "disable_tqdm"]


@pytest.fixture
def attributes_read(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return the set that collects the attributes of sections which code outside the parser reads."""
    found: set[str] = set()

    def read(section: OptionGroup, name: str) -> Any:
        reader = Path(sys._getframe(1).f_code.co_filename)
        in_parser = reader.parent.name in ("config", "validation") or reader.name == "dataclasses.py"
        if not in_parser:
            found.add(name)
        return object.__getattribute__(section, name)

    monkeypatch.setattr(OptionGroup, "__getattribute__", read, raising=False)
    return found


def train_dpo(words: Sequence[str]) -> None:
    run_finetune(words, PROGRAMS[1].sections, PROGRAMS[1].script)


@pytest.mark.parametrize(
    ("name", "run", "sections", "keys"),
    [
        ("dpo", train_dpo, ("data", "generation"), dict.fromkeys(TRAINING, "true") | {"max_steps": 1}),
        ("quantize", run_quantization, tuple(PROGRAMS[3].sections), {"do_gptq": "true", "group_size": 16}),
    ],
)
def test_help_lists_only_keys_that_a_run_reads(
    attributes_read: set[str],
    tmp_path: Path,
    name: str,
    run: Callable[[Sequence[str]], None],
    sections: tuple[str, ...],
    keys: dict[str, Any],
):
    program = next(program for program in PROGRAMS if program.name == name)
    write_tiny_model(tmp_path / "model")
    write_tiny_data(tmp_path / "data")
    (tmp_path / "data" / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    data = {"eval_dataset_path": tmp_path / "data" / "pairs.jsonl"} if name == "dpo" else {}
    folders = {"model_name_or_path": "model", "output_dir": "out", "data_cache_dir": "cache"}
    folders["dataset_name_or_path"] = "data/pairs.jsonl" if name == "dpo" else "data"
    words = {key: tmp_path / folder for key, folder in folders.items()} | data | keys
    run([word for key, value in words.items() for word in (f"--{key}", str(value))])
    options = known_keys({}, program.sections).options
    # do_ptq is not read if another method is on.
    listed = {key for key, entry in read_keys(name).items() if not entry.get("x-idle")} & options.keys() - {"do_ptq"}
    attributes = {options[key].attribute for key in listed if options[key].section in sections}
    assert attributes - attributes_read == set() and len(attributes) > 15
