"""Command `pnx init`: ask for model, data, goal and memory, write a configuration that fits, and show its plan."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paddlenlp_ext._runtime import require_paddle
from paddlenlp_ext.checkpoint.builtin_models import BUILTIN_MODELS
from paddlenlp_ext.cli.next_steps import program, quote
from paddlenlp_ext.cli.run_folder import CHECKPOINTS
from paddlenlp_ext.commands.arguments import with_long_names
from paddlenlp_ext.config.command_line import parse_arguments
from paddlenlp_ext.config.dataclass_options import OptionGroup, option, options_of
from paddlenlp_ext.utils.files import check_writable, write_text
from paddlenlp_ext.utils.free_memory import free_memory

GOALS = ("instructions", "chat", "preferences")
_COMMANDS = {"instructions": "sft", "chat": "sft", "preferences": "dpo"}
_DATA_SUFFIXES = (".jsonl", ".csv", ".parquet")
_USAGE = """pnx init [-m MODEL] [-d DATA] [--goal GOAL] [--memory GB] [-o FILE.json] [--yes]

Write the configuration of a LoRA run whose steps and batches fit the data, whose learning rate fits
the model, and that fits in memory. The command asks for values that no argument sets; --yes
accepts the defaults instead.

  -m, --model                   model
  -d, --data                    training rows
  -o, --out                     file to write"""


@dataclass(frozen=True, kw_only=True)
class InitArguments(OptionGroup):
    """Arguments of `pnx init`; None: the user is asked."""

    model: str | None = option(None, help="folder, .gguf file, built-in name or hub id of the model")
    data: str | None = option(None, help="training rows: a file, a folder with train.json, or the name of a dataset")
    goal: str | None = option(
        None,
        choices=GOALS,
        help="kind of training: instructions (questions with answers), chat (conversations) or preferences (DPO)",
    )
    memory: float | None = option(
        None, above=0, help="memory in GB that the run may use; default: 90 % of the free memory"
    )
    out: str = option("run.json", help="file to write; the file name is also the name of output_dir in ./checkpoints")
    yes: bool = option(False, help="ask no questions, and accept the defaults")


def run(argv: Sequence[str]) -> None:
    """Ask the questions, write the configuration, and print its plan and the command that starts the run.

    Raises:
        ValueError: `--out` exists, is not a .json file or cannot be written; a question cannot be asked, or its answer
            cannot be used; or the run does not fit in memory.
    """
    values, _ = parse_arguments(with_long_names(argv), options_of(InitArguments, "arguments"), _USAGE)
    arguments = InitArguments(**values)
    out = Path(arguments.out).expanduser()
    if out.exists():
        raise ValueError(f"--out {out} exists; choose another name, or remove the file")
    if out.suffix != ".json":
        raise ValueError(f"--out {out} must end in .json")
    check_writable(out.parent, f"--out {out}")
    require_paddle()
    model = arguments.model or _ask("Model (folder, .gguf file, hub id)", next(iter(BUILTIN_MODELS)), arguments.yes)
    data = arguments.data or _ask("Data (file, folder or name)", _default_data(), arguments.yes)
    goal = arguments.goal or _ask(f"Goal ({', '.join(GOALS)})", _default_goal(data), arguments.yes)
    memory = arguments.memory or _ask("Memory in GB", f"{_default_memory():.1f}", arguments.yes)
    checked = InitArguments(model=model, data=data, goal=goal, memory=_number(memory))
    _write_and_plan(checked, out)


def _write_and_plan(arguments: InitArguments, out: Path) -> None:
    from paddlenlp_ext.cli.run_finetune import run_finetune
    from paddlenlp_ext.commands.suggest_config import suggest_config
    from paddlenlp_ext.config.run_config import PREFERENCE_SECTIONS, SECTIONS

    assert arguments.model and arguments.data and arguments.goal and arguments.memory, "answered"
    output_dir = str(_unused_folder(CHECKPOINTS / out.stem))
    keys = suggest_config(arguments.model, arguments.data, arguments.goal, arguments.memory, output_dir)
    write_text(out, json.dumps(keys, indent=2, ensure_ascii=False) + "\n")
    sections = PREFERENCE_SECTIONS if arguments.goal == "preferences" else SECTIONS
    run_finetune([str(out), "--dry_run", "true"], sections, "pnx plan")
    print(f"Written: {out}\nNext:\n  {quote([*program(), _COMMANDS[arguments.goal], str(out)])}")


def _unused_folder(folder: Path) -> Path:
    """Return the folder, or the first of `folder-2`, `folder-3`, ... that does not exist."""
    number = 2
    unused = folder
    while unused.exists():
        unused, number = folder.with_name(f"{folder.name}-{number}"), number + 1
    return unused


def _ask(question: str, default: str, takes_default: bool) -> str:
    """Return the answer of the user, or the default for an empty answer or if `takes_default` is true.

    Raises:
        ValueError: the input has ended.
    """
    if takes_default:
        print(f"{question}: {default}")
        return default
    try:
        return input(f"{question} [{default}]: ").strip() or default
    except EOFError:
        raise ValueError(
            "the questions need a terminal; pass --yes to accept the defaults, or pass answers (pnx init --help)"
        ) from None


def _number(text: str | float) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"memory: {text!r} is not a number of GB") from None


def _default_data() -> str:
    """Return the first data file in the current folder, or the built-in dataset."""
    files = [str(path) for path in sorted(Path().iterdir()) if path.suffix in _DATA_SUFFIXES]
    return files[0] if files else "inflection"


def _default_goal(data: str) -> str:
    """Guess the goal from the beginning of the data file."""
    path = Path(data).expanduser()
    if not path.is_file():
        return GOALS[0]
    with path.open("rb") as file:
        start = file.read(65536)
    if b'"chosen"' in start or b'"rejected"' in start:
        return "preferences"
    return "chat" if b'"messages"' in start or b'"conversations"' in start else GOALS[0]


def _default_memory() -> float:
    """Return 90 % of the free memory in GB; 8 if the free memory is unknown."""
    free = free_memory()
    return 8.0 if free is None else 0.9 * free / 1e9
