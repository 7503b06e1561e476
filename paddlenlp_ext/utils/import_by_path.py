"""Import a user's function or class that a configuration key names, as `module.name` or `folder/file.py:name`."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


def import_by_path(path: str, key: str) -> Any:
    """Import an object by its dotted path, or by a file and a name in the file. The import runs the module.

    A module is looked up in `sys.path` and the current folder.

    Args:
        path: "module.name" or "folder/file.py:name".
        key: the configuration key; error messages begin with it.

    Raises:
        ValueError: the path has neither of the two forms, or the module cannot be imported or does not define the name.
    """
    where, name, is_file = _parts(path)
    if not where or not name:
        raise ValueError(f"{key}: {path!r} is not a dotted path; write module.name, or file.py:name")
    try:
        module = _import_file(Path(where).expanduser()) if is_file else _import_module(where)
    except Exception as error:  # the user's module may raise anything
        remedy = "check the path, and that the file runs"
        if not is_file:
            remedy = "put the module in the current folder or a folder on PYTHONPATH, and check that the module runs"
        raise ValueError(f"{key}: {where} cannot be imported ({type(error).__name__}: {error}); {remedy}") from error
    if not hasattr(module, name):
        raise ValueError(f"{key}: {name} does not exist in {module.__file__}; define it there")
    return getattr(module, name)


def source_file(path: str) -> Path | None:
    """Return the file of the module that `import_by_path` would run; None if there is none.

    The module itself is not run, but the packages that contain it are.

    Args:
        path: see `import_by_path`.
    """
    where, _, is_file = _parts(path)
    if is_file:
        file = Path(where).expanduser()
        return file if file.is_file() else None
    _add_current_folder()
    try:
        spec = importlib.util.find_spec(where) if where else None
    except Exception:  # the user's packages may raise anything; `import_by_path` explains it
        return None
    return Path(spec.origin) if spec is not None and spec.has_location and spec.origin is not None else None


def _parts(path: str) -> tuple[str, str, bool]:
    """Return the file or module, the name in it, and whether it is a file."""
    file, _, name = path.rpartition(".py:")
    if file:
        return f"{file}.py", name, True
    module, _, name = path.rpartition(".")
    return module, name, False


def _add_current_folder() -> None:
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def _import_module(name: str) -> ModuleType:
    _add_current_folder()
    return importlib.import_module(name)


def _import_file(file: Path) -> ModuleType:
    """Import a file under a name derived from its path, so that a second import returns the same module."""
    file = file.resolve(strict=True)
    name = f"{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None, f"{file} is not a Python file"
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
