"""Configuration of a run: flat JSON or YAML files and the command line, parsed into dataclasses.

`load_run_config` returns a `RunConfig`; `option` declares a key. This package does not import Paddle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paddlenlp_ext.utils.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from paddlenlp_ext.config.dataclass_options import option as option
    from paddlenlp_ext.config.errors import ConfigError as ConfigError
    from paddlenlp_ext.config.errors import Problem as Problem
    from paddlenlp_ext.config.parser import load_run_config as load_run_config
    from paddlenlp_ext.config.run_config import RunConfig as RunConfig
    from paddlenlp_ext.utils.json_reader import Location as Location
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
