"""From flat JSON files and the command line to a tree of dataclasses. Nothing here imports Paddle.

`load_run_config` reads a run's configuration; `RunConfig` is what it becomes; `option` declares a key.
"""

from __future__ import annotations

from paddlenlp_ext.config.errors import ConfigError, Problem
from paddlenlp_ext.config.options import option
from paddlenlp_ext.config.parser import load_run_config
from paddlenlp_ext.config.run_config import RunConfig
from paddlenlp_ext.utils.json_reader import Location

__all__ = ["ConfigError", "Location", "Problem", "RunConfig", "load_run_config", "option"]
