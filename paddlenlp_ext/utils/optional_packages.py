"""Import packages that are optional extras of this one."""

from __future__ import annotations

import importlib
from typing import Any


def import_extra(module: str, extra: str, needed_by: str) -> Any:
    """Import a module of an optional package.

    Args:
        module: name of the module.
        extra: the extra of setup.py that installs it.
        needed_by: beginning of the error message: the file or key that needs the package.

    Raises:
        ValueError: the package is not installed; the message has the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ValueError(
            f"{needed_by}: needs the package {package}, which is not installed; run: pip install "
            f"'paddlenlp-ext[{extra}]' (or: pip install {package})"
        ) from error
