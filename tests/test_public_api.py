"""Public API, recorded in `public_api.txt`, so that no name is added or removed by accident.

After an intended change: python tests/test_public_api.py > tests/public_api.txt
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import paddlenlp_ext
from paddlenlp_ext import peft

RECORD = Path(__file__).with_name("public_api.txt")
PACKAGES = pytest.mark.parametrize("package", [paddlenlp_ext, peft], ids=lambda package: package.__name__)


def describe(name: str, value: Any) -> str:
    """Return one line for a function, dataclass or config, with its arguments; for other classes, one per member."""
    if name != value.__name__:
        return f"{name} = {value.__name__}"
    if isinstance(value, type) and issubclass(value, peft.PeftConfig):
        from paddlenlp_ext.peft.constructor_arguments import argument_names

        return f"{name}({', '.join(sorted(argument_names(value)))})"
    if inspect.isfunction(value) or dataclasses.is_dataclass(value):
        return f"{name}({', '.join(inspect.signature(value).parameters)})"
    members = sorted({member for cls in recorded_bases(value) for member in vars(cls) if not member.startswith("_")})
    return "\n".join([name, *(f"{name}.{member}" for member in members)])


def recorded_bases(value: type) -> Iterator[type]:
    """Yield a class and its base classes in this package, up to the first base class with its own lines."""
    for cls in value.mro():
        if cls is not value and cls.__name__ in paddlenlp_ext.__all__:
            return
        if cls is value or cls.__module__.startswith("paddlenlp_ext."):
            yield cls


def public_api() -> str:
    """Return all public names, one per line."""
    names = sorted(set(paddlenlp_ext.__all__) - {"__version__"})
    return "\n".join(describe(name, getattr(paddlenlp_ext, name)) for name in names) + "\n"


def test_public_api_equals_the_recorded_one():
    recorded, found = RECORD.read_text().splitlines(), public_api().splitlines()
    added, removed = sorted(set(found) - set(recorded)), sorted(set(recorded) - set(found))
    assert not added and not removed, (
        f"added: {added}\nremoved: {removed}\nIf this is intended: see this file's docstring"
    )
    assert found == recorded


@PACKAGES
def test_exports_are_the_imports_that_type_checkers_see(package):
    """Check that each import under TYPE_CHECKING re-exports its name, and that the name can be imported."""
    tree = ast.parse(Path(package.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    for node in block.body:
        for alias in node.names:
            assert alias.name in ("*", alias.asname), f"write: from {node.module} import {alias.name} as {alias.name}"
    assert len(package.__all__) == len(set(package.__all__)), "a name is exported twice"
    assert set(package.__all__) <= set(dir(package))
    assert all(getattr(package, name) is not None for name in package.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'LoRaConfig'"):
        package.LoRaConfig  # noqa: B018


def test_peft_exports_are_exported_by_the_package_too():
    assert set(peft.__all__) <= set(paddlenlp_ext.__all__)
    assert all(getattr(peft, name) is getattr(paddlenlp_ext, name) for name in peft.__all__)


def test_exports_include_the_config_of_every_method():
    from paddlenlp_ext.peft.registry import PEFT_METHODS

    for switch, method in PEFT_METHODS.items():
        assert getattr(paddlenlp_ext, method.__name__, None) is method, f"{switch}: {method.__name__} is not exported"


def test_package_is_marked_as_typed():
    assert (Path(paddlenlp_ext.__file__).parent / "py.typed").is_file()
    assert '"py.typed"' in (Path(__file__).parents[1] / "setup.py").read_text()


def test_dir_of_the_package_imports_nothing():
    code = "import sys, paddlenlp_ext; dir(paddlenlp_ext); dir(paddlenlp_ext.peft); print('paddle' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


if __name__ == "__main__":
    sys.stdout.write(public_api())
