"""Configuration of a run: parse flat JSON files and the command line into a tree of dataclasses.

`load_run_config` returns a `RunConfig`; `option` declares a key. This package does not import Paddle.
"""

from __future__ import annotations

from paddlenlp_ext.config.dataclass_options import option
from paddlenlp_ext.config.errors import ConfigError, Problem
from paddlenlp_ext.config.parser import load_run_config
from paddlenlp_ext.config.run_config import RunConfig
from paddlenlp_ext.utils.json_reader import Location

__all__ = ["ConfigError", "Location", "Problem", "RunConfig", "load_run_config", "option"]
