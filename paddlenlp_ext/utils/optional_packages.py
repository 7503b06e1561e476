"""Import optional dependencies, which pip installs with an extra, such as `paddlenlp-ext[lm-eval]`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any


def is_installed(module: str) -> bool:
    """Return whether a module can be found, without importing it."""
    return sys.modules[module] is not None if module in sys.modules else importlib.util.find_spec(module) is not None


def missing_package(module: str, extra: str, needed_by: str) -> str:
    """Return the error message about an optional package; see `import_extra` for the arguments."""
    package = module.partition(".")[0]
    return (
        f"{needed_by}: needs the package {package}, which is not installed; run: pip install "
        f"'paddlenlp-ext[{extra}]' (or: pip install {package})"
    )


def import_extra(module: str, extra: str, needed_by: str) -> Any:
    """Import a module of an optional package.

    Args:
        module: name of the module.
        extra: name of the extra in pyproject.toml that installs the package.
        needed_by: program, file or key that needs the package; the error message begins with it.

    Raises:
        ValueError: the package is not installed; the message contains the installation command.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(missing_package(module, extra, needed_by)) from error
