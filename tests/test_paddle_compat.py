"""Private names of Paddle are used only in `paddlenlp_ext/paddle_compat.py`, which checks the installed release."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace

import paddle
import pytest
from paddle import nn

import paddlenlp_ext
from paddlenlp_ext.paddle_compat import TESTED_RELEASE, check_release

PACKAGE = Path(paddlenlp_ext.__file__).parent
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "paddle_compat.py")
EXEMPT = {
    "_runtime.py": {"core"},  # sets threads of a Paddle that is already imported, and must not import Paddle
    "library.py": {"_name"},  # the path of a ctypes.CDLL
}
PRIVATE_MODULES = ("paddle.base", "paddle.framework", "paddle._", "paddle.distributed.fleet.base")


def private_names_of_paddle() -> set[str]:
    layer = nn.Linear(2, 2)
    optimizer = paddle.optimizer.AdamW(parameters=layer.parameters())
    names = {name for owner in (paddle, layer, layer.weight, paddle.zeros([1]), optimizer) for name in dir(owner)}
    private = {name for name in names if name.startswith("_") and not name.startswith("__")}
    return private | {"_device_id", "_HYBRID_PARALLEL_GROUP"}


def own_names(tree: ast.Module) -> set[str]:
    """Return names that a module defines itself: functions, and attributes of `self` and of classes."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            names.add(node.attr)
    return names


def private_uses(source: str, private: set[str]) -> list[str]:
    tree = ast.parse(source)
    own, found = own_names(tree), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            is_own = node.attr in own and ast.unparse(node.value) in ("self", "cls")
            if (node.attr in private and not is_own) or (node.attr in ("base", "core") and is_paddle(node)):
                found.append(f"{node.lineno}: {ast.unparse(node)}")
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            if any(module.startswith(PRIVATE_MODULES) for module in modules):
                found.append(f"{node.lineno}: from {node.module}")
        elif isinstance(node, ast.Import):
            found += [f"{node.lineno}: {a.name}" for a in node.names if a.name.startswith(PRIVATE_MODULES)]
    return found


def is_paddle(node: ast.Attribute) -> bool:
    return ast.unparse(node.value) in ("paddle", "paddle.base", "sys.modules['paddle'].base")


def test_private_names_are_used_only_in_paddle_compat():
    private = private_names_of_paddle()
    assert {"_clear_data", "_parameters", "_accumulators", "_C_ops"} <= private
    for path in MODULES:
        uses = private_uses(path.read_text(encoding="utf-8"), private)
        uses = [use for use in uses if use.rpartition(".")[2] not in EXEMPT.get(path.name, set())]
        assert not uses, f"{path.relative_to(PACKAGE)}: move to paddle_compat.py: {uses}"


@pytest.mark.parametrize(
    "source",
    [
        "tensor._clear_data()",
        "class A(AdamW):\n    def f(self):\n        return self._accumulators",
        "from paddle.base import core",
        "import paddle.base.core",
        "from paddle.distributed.fleet.base import topology",
        "paddle._C_ops.empty([1])",
        "paddle.base.core.TCPStore",
        "ParallelEnv._device_id = 0",
    ],
)
def test_private_uses_of_a_private_name_finds_it(source):
    assert private_uses(source, private_names_of_paddle())


def test_check_release_of_the_tested_release_says_nothing(recwarn):
    check_release(f"{TESTED_RELEASE}.1")
    assert paddle.__version__.startswith(f"{TESTED_RELEASE}.") and not recwarn.list


@pytest.mark.parametrize("version", ["3.2.0", "3.30.0", "0.0.0"])
def test_check_release_of_another_release_names_the_tested_one(version):
    with pytest.warns(
        UserWarning, match=rf"paddlepaddle {version}: .* tested only with 3\.3; .* install paddlepaddle 3\.3"
    ):
        check_release(version)


def test_check_release_without_a_private_name_raises():
    required = ((SimpleNamespace(__name__="paddle.core", present=1), ("present", "gone")),)
    with pytest.raises(
        ImportError, match=r"paddlepaddle 3\.4\.0 lacks paddle\.core\.gone, .* install paddlepaddle 3\.3"
    ):
        check_release("3.4.0", required)
