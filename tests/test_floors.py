"""Imports go down only: the floors written in paddlenlp_ext/__init__.py hold, function-level imports included."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import paddlenlp_ext

PACKAGE = Path(paddlenlp_ext.__file__).parent
FLOOR_OF = {room: floor for floor, rooms in enumerate(paddlenlp_ext.FLOORS) for room in rooms}
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")
WITHOUT_PADDLE = ("_runtime", "runtime", "utils", "config", "plan")


def room_of(path: Path) -> str:
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


def test_every_room_has_a_floor():
    rooms = {room_of(path) for path in MODULES}
    assert rooms <= set(FLOOR_OF), f"rooms without a floor: {rooms - set(FLOOR_OF)}"
    assert len(MODULES) > 10


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down(path: Path):
    room = room_of(path)
    for line, module in imported_modules(path):
        where = f"{path.relative_to(PACKAGE)}:{line} imports {module}"
        if room in WITHOUT_PADDLE and path.name not in ("runtime.py", "_runtime.py"):
            assert module.split(".")[0] != "paddle", f"{where}: this room does not know Paddle"
        if not module.startswith("paddlenlp_ext."):
            continue
        other = module.split(".")[1]
        assert other in FLOOR_OF, f"{where}: not a room"
        assert other == room or FLOOR_OF[other] < FLOOR_OF[room], f"{where}: that is not below {room}"
