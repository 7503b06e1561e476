"""Mutations of a Python source: one changed operator, constant, condition or removed statement each.

A mutation replaces the text of one syntax node, so all line numbers stay. Not mutated, because no test could or should
notice it: annotations, docstrings, decorators, assertions, log calls, and the texts of error messages.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

_COMPARISONS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is",
}  # fmt: skip
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitOr,
}  # fmt: skip
_LOGGERS = {"logger", "_logger", "logging", "warnings"}
_LOG_METHODS = {"debug", "info", "warning", "error", "exception", "warn"}


@dataclass(frozen=True)
class Mutation:
    """One fault in one file.

    Attributes:
        path: file, relative to the repository.
        line: line of the changed node, from 1.
        before, after: text of the node.
        start, end: byte offsets of the node in the file.
        lines: first and last line of the statement, without its body.
        occurrence: index, from 0, among identical changes in lines with the same text; makes `key` unique.
        text: text of the line.
    """

    path: str
    line: int
    before: str
    after: str
    start: int
    end: int
    lines: tuple[int, int]
    occurrence: int
    text: str

    @property
    def key(self) -> str:
        """Identifier that survives changes elsewhere in the file."""
        parts = (self.path, self.text, self.before, self.after, str(self.occurrence))
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:10]

    def apply(self, source: str) -> str:
        """Return the source with the fault."""
        data = source.encode()
        return (data[: self.start] + self.after.encode() + data[self.end :]).decode()

    def __str__(self) -> str:
        before, after = (" ".join(text.split())[:70] for text in (self.before, self.after))
        return f"{self.key} {self.path}:{self.line}: {before} -> {after}"


def mutations_of(path: str, source: str) -> list[Mutation]:
    """Return all mutations of a file.

    Args:
        path: file, relative to the repository.
        source: its contents.
    """
    lines = source.encode().splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    data, seen, found = source.encode(), {}, []
    for statement, node, after in _changes(ast.parse(source)):
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        before, text = data[start:end].decode(), lines[node.lineno - 1].decode().strip()
        occurrence = seen[text, before, after] = seen.get((text, before, after), -1) + 1
        mutation = Mutation(path, node.lineno, before, after, start, end, _lines_of(statement), occurrence, text)
        if before != after and _parses(mutation.apply(source)):
            found.append(mutation)
    return found


def _parses(source: str) -> bool:
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


def _lines_of(statement: ast.stmt) -> tuple[int, int]:
    body = getattr(statement, "body", None)
    first, last = statement.lineno, statement.end_lineno or statement.lineno
    return first, max(first, body[0].lineno - 1) if isinstance(body, list) and body else last


def _changes(node: ast.AST, statement: ast.stmt | None = None) -> Iterator[tuple[ast.stmt, ast.AST, str]]:
    """Yield (statement, node, new text) for each node below that can be changed."""
    for child in _children(node):
        own = child if isinstance(child, ast.stmt) else statement
        if own is not None:
            yield from ((own, changed, after) for changed, after in _changes_of(child))
        yield from _changes(child, own)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "msg", "type_comment", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not _is_skipped(child):
                yield child


def _is_skipped(node: ast.AST) -> bool:
    if isinstance(node, (ast.Assert, ast.Import, ast.ImportFrom, ast.JoinedStr)):
        return True
    if isinstance(node, ast.keyword) and node.arg in ("help", "message", "remedy"):
        return True
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return True
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant) or _is_log_call(node.value)
    if isinstance(node, ast.Assign):  # tables for readers and type aliases
        return any(isinstance(target, ast.Name) and target.id.startswith("__") for target in node.targets)
    return False


def _is_log_call(node: ast.expr) -> bool:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return False
    owner = node.func.value
    called = isinstance(owner, ast.Call) and ast.unparse(owner.func) == "get_logger"
    return node.func.attr in _LOG_METHODS and (called or (isinstance(owner, ast.Name) and owner.id in _LOGGERS))


def _changes_of(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield node, f"{_text(node.left)} {_COMPARISONS[type(node.ops[0])]} {_text(node.comparators[0])}"
    elif isinstance(node, ast.Compare):  # a < b < c: change the last operator
        *operators, last = node.ops
        changed = ast.parse(f"x {_COMPARISONS[type(last)]} y", mode="eval").body
        yield node, ast.unparse(ast.Compare(node.left, [*operators, *changed.ops], node.comparators))
    elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        yield node, f"({ast.unparse(ast.BinOp(node.left, _ARITHMETIC[type(node.op)](), node.right))})"
    elif isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield node, f"({ast.unparse(ast.BoolOp(other, node.values))})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        yield node, f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.Constant):
        yield from _changed_constant(node)
    elif isinstance(node, (ast.If, ast.While, ast.IfExp)) and isinstance(
        node.test, (ast.Name, ast.Attribute, ast.Call)
    ):
        yield node.test, f"(not {ast.unparse(node.test)})"
    elif isinstance(node, ast.AugAssign):
        yield node, "pass"
        if type(node.op) in _ARITHMETIC:
            changed = ast.AugAssign(node.target, _ARITHMETIC[type(node.op)](), node.value)
            yield node, ast.unparse(changed)
    elif isinstance(node, (ast.Raise, ast.Continue, ast.Delete, ast.Break)) or _is_call_statement(node):
        yield node, "pass"


def _is_call_statement(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)


def _changed_constant(node: ast.Constant) -> Iterator[tuple[ast.AST, str]]:
    value = node.value
    if isinstance(value, bool):
        yield node, str(not value)
    elif isinstance(value, int):
        yield node, str(value + 1)
    elif isinstance(value, float):
        yield node, repr(value * 1.5 if value else 1.0)
    elif isinstance(value, str) and value and not any(letter.isspace() for letter in value):
        yield node, repr(f"{value}x")


def _text(node: ast.expr) -> str:
    text = ast.unparse(node)
    return text if isinstance(node, (ast.Name, ast.Constant, ast.Attribute, ast.Call, ast.Subscript)) else f"({text})"
