"""Scripts of the repository as modules and as processes."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
LLM = ROOT / "llm"


def load_script(path: Path) -> ModuleType:
    """Import a file that belongs to no package; every call returns a new module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def bare_packages(*ops: str) -> Iterator[None]:
    """Let the block import modules of `paddlenlp_ext.ops.<op>` without the package's __init__, which imports Paddle."""
    stubs = {f"paddlenlp_ext.ops.{op}": ROOT / "paddlenlp_ext" / "ops" / op for op in ops}
    stubs = {name: folder for name, folder in stubs.items() if name not in sys.modules}
    for name, folder in stubs.items():
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [str(folder)]
    try:
        yield
    finally:
        for name in stubs:
            del sys.modules[name]


def script_environment(**changes: str) -> dict[str, str]:
    """Return this process's environment variables with the repository on PYTHONPATH, and the changes."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **changes}
