"""Main program of llm/run_dpo.py: preference training, with the options of run_finetune.py and its own section."""

from __future__ import annotations

from collections.abc import Sequence

from paddlenlp_ext.cli.run_finetune import run_program
from paddlenlp_ext.config import load_run_config
from paddlenlp_ext.config.run_config import PREFERENCE_SECTIONS
from paddlenlp_ext.peft.registry import peft_methods


def run_dpo(argv: Sequence[str]) -> None:
    """Train on preferences: read the configuration from files and command line, and run it.

    Args:
        argv: the command line without the program's name.

    Raises:
        ValueError: invalid configuration, model, data or output_dir.
    """
    run_program(load_run_config(argv, peft_methods(), PREFERENCE_SECTIONS, "run_dpo.py"))
