"""Print the keys of a program for `--help`: first the basic keys, then the other keys by section."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

USAGE = "{} CONFIG.json [MORE.json ...] [--key value ...]"
HELP_FLAGS = ("-h", "--help", "--help_all", "--help-all")
ALL_FLAGS = ("--help_all", "--help-all")
"""Flags that also list the keys without effect."""
WIDTH = 100
_INDENT = 32
_SCHEMAS = Path(__file__).with_name("schema")
BASIC_KEYS = (
    *("model_name_or_path", "dataset_name_or_path", "train_dataset_path", "dev_ratio", "eval_dataset_path"),
    "output_dir",
    *("do_train", "do_eval", "do_ptq", "do_gptq", "do_awq", "quant_type", "group_size"),
    *("chat_template", "src_length", "max_length", "zero_padding"),
    *("loss_type", "beta", "lora", "lora_rank", "weight_quantize_algo"),
    *("learning_rate", "num_train_epochs", "max_steps"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "recompute", "bf16", "device"),
    *("logging_steps", "evaluation_strategy", "save_strategy", "save_steps", "resume_from_checkpoint"),
    *("dry_run", "preview_data"),
)
"""Basic keys in the order of `--help`: keys that most runs set. A program lists only the basic keys that it reads."""

Keys = Mapping[str, Mapping[str, Any]]
"""Key -> its schema (config/key_schema.py)."""


def schema_file(program: str) -> Path:
    """Return the path of the schema of a program: "sft", "dpo", "reward" or "quantize"."""
    return _SCHEMAS / f"{program}.schema.json"


def read_keys(program: str) -> dict[str, dict[str, Any]]:
    """Return the keys of a program from its stored schema."""
    return file_keys(read_schema(program))


@cache
def read_schema(program: str) -> dict[str, Any]:
    """Return the stored schema of a program."""
    return json.loads(schema_file(program).read_text(encoding="utf-8"))


def read_aliases(program: str) -> dict[str, str]:
    """Return a dict from the aliases of a program's keys, including names in other toolkits, to the keys."""
    references = (
        (alias, entry["$ref"]) for alias, entry in read_schema(program)["properties"].items() if "$ref" in entry
    )
    return {alias: reference.rpartition("/")[2] for alias, reference in references}


def file_keys(schema: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the keys of a schema and the keys of the command line, without aliases."""
    own = {key: entry for key, entry in schema["properties"].items() if "x-section" in entry}
    return own | dict(schema["x-command-line"])


def print_requested_help(argv: Sequence[str], program: str, script: str) -> None:
    """Print the help of a program and exit if the arguments request help; Paddle is not imported."""
    if not set(HELP_FLAGS).isdisjoint(argv):
        print_help(read_keys(program), USAGE.format(script), not set(ALL_FLAGS).isdisjoint(argv))


def print_help(keys: Keys, usage: str, with_idle: bool = False) -> None:
    """Print the help text (see `help_text`) and exit the program."""
    sys.stdout.write(help_text(keys, usage, with_idle))
    raise SystemExit(0)


def help_text(keys: Keys, usage: str, with_idle: bool = False) -> str:
    """Return the text of `--help`, in lines of at most `WIDTH` characters.

    Args:
        keys: the keys of the program.
        usage: first lines of the text.
        with_idle: whether to list keys without effect.
    """
    active = {key: entry for key, entry in keys.items() if not entry.get("x-idle")}
    idle = {key: entry for key, entry in keys.items() if key not in active}
    basic = [key for key in BASIC_KEYS if key in active] if idle else []
    lines = [f"usage: {usage}"]
    if basic:
        lines += ["", "basic keys:", *_entries(active, basic)]
    for title, members in _sections(active, set(basic)).items():
        lines += ["", f"{title}:", *_entries(active, members)]
    for title, members in _sections(idle, set()).items() if with_idle else ():
        what = "translated, ignored or rejected" if "x-toolkit" in idle[members[0]] else "not used by this program"
        lines += ["", f"{title}, {what}:", *_entries(idle, members)]
    if idle and not with_idle:
        lines += ["", f"--help_all lists {len(idle)} more keys, which this program translates, ignores or rejects."]
    if idle:
        lines += ["`pnx help KEY` explains one key, and docs/configuration.md has tables of all keys."]
    return "\n".join(lines) + "\n"


def key_details(entry: Mapping[str, Any]) -> str:
    """Return the type, limits and default of a key on one line."""
    if "x-type" not in entry:
        return ""
    default = "required" if entry.get("x-required") else f"default {show_default(entry['default'])}"
    return f"{entry['x-type']}; {default}"


def wrapped(text: str, indent: int, first: str = "") -> list[str]:
    """Wrap a text into lines of at most `WIDTH` characters; the first line begins with `first`."""
    start = f"{first:<{indent}}" if len(first) < indent else f"{first}\n{' ' * indent}"
    lines = textwrap.wrap(text, WIDTH - indent, break_long_words=False, break_on_hyphens=False) or [""]
    return (start + f"\n{' ' * indent}".join(lines)).split("\n")


def _sections(keys: Keys, left_out: set[str]) -> dict[str, list[str]]:
    sections: dict[str, list[str]] = {}
    for key, entry in keys.items():
        if key not in left_out:
            sections.setdefault(entry["x-section"], []).append(key)
    return sections


def _entries(keys: Keys, names: Iterable[str]) -> Iterator[str]:
    for name in names:
        entry = keys[name]
        details = f" [{found}]" if (found := key_details(entry)) else ""
        also = f", also --{', --'.join(entry['x-aliases'])}" if "x-aliases" in entry else ""
        yield from (line.rstrip() for line in wrapped(f"{entry['description']}{also}{details}", _INDENT, f"  --{name}"))


def show_default(default: Any) -> str:
    """Format a default as in a JSON file, with "unset" for null."""
    if default is None:
        return "unset"
    if isinstance(default, float) and 0 < abs(default) < 1e-3:
        return f"{default:g}"
    return json.dumps(default, ensure_ascii=False)
