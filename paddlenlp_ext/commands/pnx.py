"""The `pnx` command: table of the commands, and dispatch.

A command's module is imported when the command is called. Modules import Paddle after they have parsed their arguments,
so that help texts and mistakes in arguments are printed at once.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence

import paddlenlp_ext
from paddlenlp_ext._runtime import configure_runtime
from paddlenlp_ext.utils.run_command import run_command
from paddlenlp_ext.utils.suggest import did_you_mean

TRAINING = ("sft", "dpo", "reward", "grpo")
"""Commands that run in several processes with `--nproc N`."""

GROUPS: dict[str, dict[str, tuple[str, str]]] = {
    "Train": {
        "sft": ("fine-tune a model", "train:sft"),
        "dpo": ("train a model on preferences", "train:dpo"),
        "reward": ("train a reward model on preferences", "train:reward"),
        "grpo": ("train a model on its own answers, scored by reward functions", "train:grpo"),
    },
    "Before training": {
        "init": ("ask for model and data, and write a configuration that fits", "init"),
        "plan": ("print rows, steps, memory and warnings of a run: plan sft, dpo, reward or grpo", "train:plan"),
        "data show": ("print rows as the model sees them", "train:data_show"),
        "data audit": ("check all rows for mistakes", "train:data_audit"),
    },
    "Configurations": {
        "configs": ("find the shipped configurations, and copy one", "configs"),
        "help": ("explain a key, or find keys by words", "help"),
        "schema": ("print the JSON schema of configurations for editors", "schema"),
    },
    "Look at runs": {
        "report": ("write the report page of a run, and print the verdict", "report"),
        "compare": ("compare runs: results, curves and differences", "report:compare"),
    },
    "Use a model": {
        "chat": ("chat in the terminal", "use_model:chat"),
        "predict": ("answer a file of rows", "use_model:predict"),
        "sample": ("sample answers, score them, and write training rows", "use_model:sample"),
        "merge": ("merge an adapter into its base model", "use_model:merge"),
        "export gguf": ("write a model for llama.cpp and Ollama", "use_model:export_gguf"),
        "export static": ("write a static graph for paddle.inference", "use_model:export_static"),
        "quantize": ("quantize a model for serving", "use_model:quantize"),
        "eval": ("score a model on tasks", "use_model:evaluate"),
        "serve": ("serve a model with OpenAI's API", "use_model:serve"),
        "push": ("upload a model or adapter to the Hugging Face hub", "push"),
    },
    "Check": {
        "doctor": ("check this installation", "doctor"),
        "completion": ("print a script for bash or zsh that completes commands", "completion"),
    },
}
"""Heading -> name of a command -> one-line summary of the command, and its module in this package.

The module's function `run(argv)` runs the command; `module:function` names another function.
"""

COMMANDS = {name: command for commands in GROUPS.values() for name, command in commands.items()}
"""Name of a command -> summary and module."""

_EPILOGUE = "`pnx COMMAND --help` describes a command. docs/commands.md has examples."


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command line, and exit with code 2 after a user error (see `run_command`).

    Args:
        argv: the arguments after the program's name; None: the arguments of this process.
    """
    run_command(run, argv)


def run(argv: Sequence[str]) -> None:
    """Run the command that the first one or two arguments name; without a command, print the help text.

    Raises:
        ValueError: there is no such command.
    """
    if not argv or argv[0] in ("-h", "--help"):
        print(help_text())
    elif argv[0] in ("-V", "--version"):
        print(f"pnx {paddlenlp_ext.__version__}")
    else:
        name, arguments = split_command(argv)
        if name not in COMMANDS:
            return print(help_text(f"{name} "))
        if name in TRAINING:
            from paddlenlp_ext.commands.launch import launch, requested_device, take_nproc

            num_processes, arguments = take_nproc(arguments)
            if num_processes > 1:
                from paddlenlp_ext.devices import device_type

                on_cpu = device_type(requested_device(arguments)) == "cpu"
                launch(name, num_processes, arguments, on_cpu)
        configure_runtime()  # not before a launch: processes that share the cores need fewer threads
        find_function(name)(arguments)


def split_command(argv: Sequence[str]) -> tuple[str, list[str]]:
    """Return the name of a command, or of a group whose help is requested, and the other arguments.

    Raises:
        ValueError: there is no such command.
    """
    for length in (2, 1):
        name = " ".join(argv[:length])
        if name in COMMANDS:
            return name, list(argv[length:])
    members = [name.partition(" ")[2] for name in COMMANDS if name.startswith(f"{argv[0]} ")]
    if not members:
        names = dict.fromkeys(name.partition(" ")[0] for name in COMMANDS)
        raise ValueError(
            f"pnx has no command {argv[0]!r}{did_you_mean(argv[0], names)} `pnx --help` lists the commands"
        )
    if argv[1:] and argv[1] not in ("-h", "--help"):
        known = " or ".join(f"`pnx {argv[0]} {member}`" for member in members)
        raise ValueError(f"pnx {argv[0]} has no command {argv[1]!r}; use {known}")
    return argv[0], list(argv[1:])


def find_function(name: str) -> Callable[[Sequence[str]], None]:
    """Import the module of a command, and return its function."""
    module, _, function = COMMANDS[name][1].partition(":")
    return getattr(importlib.import_module(f"paddlenlp_ext.commands.{module}"), function or "run")


def help_text(prefix: str = "") -> str:
    """Return the table of the commands whose names begin with `prefix`."""
    width = max(map(len, COMMANDS)) + 2
    lines = [f"usage: pnx {prefix}COMMAND [arguments]", ""]
    for heading, commands in GROUPS.items():
        shown = {name: summary for name, (summary, _) in commands.items() if name.startswith(prefix)}
        if shown:
            lines += [f"{heading}:", *(f"  {name:{width}}{summary}" for name, summary in shown.items()), ""]
    return "\n".join([*lines, _EPILOGUE])
