"""Imports go down only and form no circle, function-level ones included; paddlenlp_ext/__init__.py lists the layers."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import paddlenlp_ext

PACKAGE = Path(paddlenlp_ext.__file__).parent
LAYER_OF = {package: index for index, packages in enumerate(paddlenlp_ext.LAYERS) for package in packages}
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")
FILE_OF = {
    ".".join(["paddlenlp_ext", *path.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(".__init__"): path
    for path in MODULES
}
WITHOUT_PADDLE = ("_runtime", "utils", "config", "sharding_spec")


def package_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_modules(path: Path) -> list[tuple[int, str]]:
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write imports in full"
            if node.module == "paddlenlp_ext":
                found += [(node.lineno, f"paddlenlp_ext.{alias.name}") for alias in node.names]
            else:
                found.append((node.lineno, node.module or ""))
    return found


def test_layers_every_package_has_one():
    packages = {package_of(path) for path in MODULES}
    assert packages <= set(LAYER_OF), f"packages without a layer: {packages - set(LAYER_OF)}"
    assert len(MODULES) > 10


@pytest.mark.parametrize("package", sorted({package_of(path) for path in MODULES}))
def test_layers_imports_go_down(package: str):
    for path in (path for path in MODULES if package_of(path) == package):
        for line, module in imported_modules(path):
            where = f"{path.relative_to(PACKAGE)}:{line} imports {module}"
            if package in WITHOUT_PADDLE and path.name != "_runtime.py":
                assert module.split(".")[0] != "paddle", f"{where}: this package must not import Paddle"
            if not module.startswith("paddlenlp_ext."):
                continue
            other = module.split(".")[1]
            assert other in LAYER_OF, f"{where}: not a package of LAYERS"
            assert other == package or LAYER_OF[other] < LAYER_OF[package], f"{where}: that is not below {package}"


def nodes_run(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a module, without blocks that only type checkers read."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield node
            yield from nodes_run(node)


def modules_run_by(name: str) -> set[str]:
    """Return the modules that the imports of a module run: those imported, and the packages that contain them."""
    found = set()
    for node in nodes_run(ast.parse(FILE_OF[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            members = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (members & FILE_OF.keys()) | ({node.module} if members - FILE_OF.keys() else set())
    packages = {".".join(module.split(".")[:length]) for module in found for length in range(2, module.count(".") + 1)}
    packages = {package for package in packages if not name.startswith(f"{package}.")}  # these are being imported
    return ((found | packages) & FILE_OF.keys()) - {name}


def test_layers_modules_form_no_import_circle():
    order = TopologicalSorter({name: modules_run_by(name) for name in FILE_OF})
    try:
        order.prepare()
    except CycleError as error:
        pytest.fail(f"circle of imports: {' <- '.join(error.args[1])}")
