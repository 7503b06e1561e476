"""Import the public names of a package on first use, so that importing the package is fast."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any


def lazy_exports(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package.

    The exports are the imports under `if TYPE_CHECKING:` in the `__init__.py` of the package. This function parses the
    source code, so that the program uses the same list as editors and type checkers. Each import has the form `from
    module import name as name`, which type checkers treat as public. `from module import *` exports the `__all__` of
    another package with lazy exports.

    Args:
        package: `__name__` of the package.
    """
    source = pkgutil.get_data(package, "__init__.py")
    assert source is not None, f"{package} has no source"
    exports = dict(_type_checking_imports(source.decode("utf-8")))

    def get(name: str) -> Any:
        if name not in exports:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(exports[name]), name)

    def names() -> list[str]:
        return sorted({*vars(importlib.import_module(package)), *exports})

    return get, names, [*exports]


def _type_checking_imports(source: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the module of each import under `if TYPE_CHECKING:`."""
    for block in ast.parse(source).body:
        if not (isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"):
            continue
        for node in block.body:
            assert isinstance(node, ast.ImportFrom) and node.module is not None, ast.unparse(node)
            for alias in node.names:
                if alias.name == "*":
                    yield from ((name, node.module) for name in importlib.import_module(node.module).__all__)
                else:
                    yield alias.name, node.module
