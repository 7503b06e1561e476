"""Commands that read a training configuration: sft, dpo, reward, grpo, plan, data show and data audit.

The commands run the program of llm/run_finetune.py, run_dpo.py, run_reward.py or run_grpo.py. Files with rows may be
passed without `--data`. The default of do_train is true.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paddlenlp_ext._runtime import require_paddle
from paddlenlp_ext.commands.arguments import wants_all_keys, wants_help, with_long_names
from paddlenlp_ext.config.config_files import FILE_SUFFIXES
from paddlenlp_ext.config.help_text import BASIC_KEYS, print_help, read_keys
from paddlenlp_ext.config.requested_trackers import check_requested_trackers
from paddlenlp_ext.config.run_config import (
    GRPO_SECTIONS,
    PREFERENCE_SECTIONS,
    REWARD_SECTIONS,
    SECTIONS,
    options_of,
)
from paddlenlp_ext.utils.suggest import did_you_mean

_SECTIONS: dict[str, Mapping[str, type]] = {
    "sft": SECTIONS,
    "dpo": PREFERENCE_SECTIONS,
    "reward": REWARD_SECTIONS,
    "grpo": GRPO_SECTIONS,
}
_WHAT = {
    "sft": "Fine-tune a model on questions and answers, conversations or texts.",
    "dpo": "Train a model on preferences: pairs of a chosen and a rejected answer.",
    "reward": "Train a reward model, which scores answers, on preferences.",
    "grpo": "Train a model with GRPO on its own answers, which reward functions score.",
}
_HELP = """{command} [FILE ...] [--key value ...]

{what}

  FILE                          configuration in JSON or YAML, or a file with training rows; later
                                configurations override earlier ones
  -m, --model                   model_name_or_path
  -d, --data                    dataset_name_or_path
  -o, --out                     output_dir
  --lora                        train a LoRA adapter; docs/adapters.md has other methods{more}

--help_all lists all keys, `pnx help KEY` explains one, and `pnx help WORDS` finds keys."""
_NPROC = """
  --nproc N                     start N processes on this machine (docs/parallel.md)"""
_TIME = """
  --time                        also run two steps, and estimate the time of the run"""
_ROWS = """
  --preview_data N              number of rows, by default 3"""


def sft(argv: Sequence[str]) -> None:
    """Fine-tune a model."""
    _run("sft", argv, "pnx sft", _WHAT["sft"], _NPROC)


def dpo(argv: Sequence[str]) -> None:
    """Train a model on preferences."""
    _run("dpo", argv, "pnx dpo", _WHAT["dpo"], _NPROC)


def reward(argv: Sequence[str]) -> None:
    """Train a reward model."""
    _run("reward", argv, "pnx reward", _WHAT["reward"], _NPROC)


def grpo(argv: Sequence[str]) -> None:
    """Train a model with GRPO."""
    _run("grpo", argv, "pnx grpo", _WHAT["grpo"], _NPROC)


def plan(argv: Sequence[str]) -> None:
    """Print rows, steps, trained parameters, memory and warnings of a run, without starting the run."""
    what = "Print what a run would do: rows, steps, trained parameters and memory, with warnings."
    kind, rest = _split_kind(argv)
    words = [word for word in rest if word != "--time"]
    _run(kind, [*words, "--dry_run", "true"], f"pnx plan {kind}", what, _TIME)
    if words != rest:
        from paddlenlp_ext.cli.time_steps import time_steps
        from paddlenlp_ext.config import load_run_config
        from paddlenlp_ext.peft.registry import peft_methods

        words = with_data_files(with_long_names(words))
        print(time_steps(load_run_config(words, peft_methods(), _SECTIONS[kind], "pnx plan", {"do_train": True})))


def data_show(argv: Sequence[str]) -> None:
    """Print tokenized training rows with their target tokens marked."""
    what = "Print tokenized training rows with their target tokens marked."
    kind, rest = _split_kind(argv)
    command = f"pnx data show [{'|'.join(_SECTIONS)}]"
    has_number = any(word.startswith(("--preview", "--show")) for word in rest)
    number = [] if has_number else ["--preview_data", "3"]
    _run(kind, [*rest, *number], command, what, _ROWS, output_dir="checkpoints/data")


def data_audit(argv: Sequence[str]) -> None:
    """Check all rows, and write data_audit.html."""
    what = "Check all rows for mistakes, and write the findings to data_audit.html in output_dir."
    kind, rest = _split_kind(argv)
    command = f"pnx data audit [{'|'.join(_SECTIONS)}]"
    _run(kind, [*rest, "--audit_only", "true"], command, what, output_dir="checkpoints/data")


def _run(kind: str, argv: Sequence[str], command: str, what: str, more: str = "", **defaults: Any) -> None:
    sections = _SECTIONS[kind]
    if wants_help(argv):
        wants_all = wants_all_keys(argv)
        keys = {key: entry for key, entry in read_keys(kind).items() if wants_all or key in BASIC_KEYS}
        print_help(keys, _HELP.format(command=command, what=what, more=more), wants_all)
    words = with_data_files(with_long_names(argv))
    check_requested_trackers(words)
    require_paddle()
    from paddlenlp_ext.cli.run_finetune import run_finetune

    run_finetune(words, sections, command.partition(" [")[0], {"do_train": True, **defaults})


def _split_kind(argv: Sequence[str]) -> tuple[str, list[str]]:
    """Return the kind of training that the first word names, by default "sft", and the other words.

    Raises:
        ValueError: the first word is neither a kind of training nor a file.
    """
    if argv and argv[0] in _SECTIONS:
        return argv[0], list(argv[1:])
    if argv and not argv[0].startswith("-") and "." not in argv[0] and not Path(argv[0]).exists():
        raise ValueError(
            f"{argv[0]!r} is neither one of {', '.join(_SECTIONS)} nor a file{did_you_mean(argv[0], _SECTIONS)}"
        )
    return "sft", list(argv)


def with_data_files(argv: Sequence[str]) -> list[str]:
    """Pass files with rows at the beginning of a command line as `--data`; leave configuration files unchanged."""
    count = next((index for index, word in enumerate(argv) if word.startswith("-")), len(argv))
    rows = [word for word in argv[:count] if has_rows(word)]
    files = [word for word in argv[:count] if word not in rows]
    return [*files, *(["--data", ",".join(rows)] if rows else []), *argv[count:]]


def has_rows(name: str) -> bool:
    """Return whether a file has rows rather than keys of a configuration.

    Folders have rows, and so do files other than .json and YAML files, such as .jsonl and .csv files. A .json or YAML
    file has rows if it begins with a list, or if its first line is an object without a key of a configuration.
    """
    path = Path(name).expanduser()
    if not path.is_file() or not name.endswith(FILE_SUFFIXES):
        return path.exists()
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        line = next((line.strip() for line in file if line.strip()), "")
    if line.startswith("["):
        return True
    try:
        row = json.loads(line)
    except ValueError:
        return False
    keys = {option.key for section, group in SECTIONS.items() for option in options_of(group, section)}
    return isinstance(row, dict) and bool(row) and keys.isdisjoint(row)
