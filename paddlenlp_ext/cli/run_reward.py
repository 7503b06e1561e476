"""Main program of llm/run_reward.py: a reward model, with the options of run_finetune.py and its own section."""

from __future__ import annotations

from collections.abc import Sequence

from paddlenlp_ext.cli.run_finetune import run_program
from paddlenlp_ext.config import load_run_config
from paddlenlp_ext.config.run_config import REWARD_SECTIONS
from paddlenlp_ext.peft.registry import peft_methods


def run_reward(argv: Sequence[str]) -> None:
    """Train a reward model: read the configuration from files and command line, and run it.

    Args:
        argv: the command line without the program's name.

    Raises:
        ValueError: invalid configuration, model, data or output_dir.
    """
    run_program(load_run_config(argv, peft_methods(), REWARD_SECTIONS, "run_reward.py"))
