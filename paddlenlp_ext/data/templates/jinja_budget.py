"""Limit the work, the processor time and the sizes of values while a template is rendered."""

from __future__ import annotations

import time
from collections.abc import Collection, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from contextlib import contextmanager
from contextvars import ContextVar
from types import GeneratorType
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace
from markupsafe import Markup

MAX_SECONDS = 3.0
"""Maximum processor time in seconds for one rendering, or for all renderings that probe a template."""
MAX_WORK = 1 << 26
"""Maximum number of characters that the operations of a rendering may process, weighted by their costs."""
_WORK_PER_CHAR = 64
"""Additional work allowed per character of the conversation, because a rendering copies texts several times."""
_MAX_ADDED_WORK = 1 << 28
_WORK_PER_OPERATION = 16
_WORK_BETWEEN_CHECKS = 256
_SECONDS_BETWEEN_CHECKS = 0.01
WORK_PER_ENTRY = 128
"""Work for an entry of a container whose contents are read, and for a character of a string that becomes a list."""
WORK_PER_ITEM = 16
"""Work for an item that is copied to another container or yielded; the contents of the item are not copied."""
MAX_BITS = 1 << 10
"""Maximum number of bits of an integer."""
_CHARS_PER_PRINTED = 12
"""Maximum number of characters that one character of a string takes in a printed container, such as \\ud83d\\ude00."""
CHARS_PER_ESCAPED = 6
"""Maximum number of characters in the HTML escape of one character."""
_STRINGS = {str}
_SCALARS = frozenset({bool, int, float, type(None)})


class TemplateLimitError(SecurityError):
    """Error about a template that exceeds the limits of a rendering."""


class _Clock:
    """Processor time of a rendering.

    Reading the processor time is slow, so it is first read after 10 ms.
    """

    __slots__ = ("_deadline", "_max_seconds", "_next_check")

    def __init__(self) -> None:
        self._max_seconds = MAX_SECONDS
        self._deadline: float | None = None
        self._next_check = time.perf_counter() + _SECONDS_BETWEEN_CHECKS

    def check(self) -> None:
        """Check the processor time.

        Raises:
            TemplateLimitError: the time limit is exceeded.
        """
        now = time.perf_counter()
        if now < self._next_check:
            return
        used = time.thread_time()
        if self._deadline is None:
            self._deadline = used + self._max_seconds
        elif used > self._deadline:
            raise TemplateLimitError(f"the rendering takes more than {self._max_seconds:.0f} seconds")
        self._next_check = now + _SECONDS_BETWEEN_CHECKS


class Budget:
    """Remaining work of a rendering, and its clock.

    Args:
        num_chars: length of the conversation.
        clock: clock of the rendering.
    """

    __slots__ = ("_next_check", "_work", "clock")

    def __init__(self, num_chars: int, clock: _Clock) -> None:
        self.clock = clock
        self._work = MAX_WORK + min(_WORK_PER_CHAR * num_chars, _MAX_ADDED_WORK + 8 * num_chars)
        self._next_check = self._work - _WORK_BETWEEN_CHECKS

    def spend(self, work: int = 0) -> None:
        """Charge an operation; check the clock every 16 operations, or earlier after large operations.

        Raises:
            TemplateLimitError: the limit of the work or the time is exceeded.
        """
        self._work -= work + _WORK_PER_OPERATION
        if self._work < self._next_check:
            if self._work < 0:
                raise TemplateLimitError(f"the rendering processes more than {MAX_WORK:,} characters")
            self.clock.check()
            self._next_check = self._work - _WORK_BETWEEN_CHECKS


BUDGET: ContextVar[Budget | None] = ContextVar("budget of a rendering", default=None)


@contextmanager
def limited(num_chars: int = 0) -> Iterator[None]:
    """Limit the renderings in the block; `num_chars` is the length of the conversation.

    A block inside another block uses the clock of the outer block.
    """
    outer = BUDGET.get()
    token = BUDGET.set(Budget(num_chars, _Clock() if outer is None else outer.clock))
    try:
        yield
    finally:
        BUDGET.reset(token)


def iterate(iterable: Iterable[Any], work: int = WORK_PER_ITEM) -> Iterator[Any]:
    """Yield the items of an iterable, and charge each item."""
    budget = BUDGET.get()
    for item in iterable:
        if budget is not None:
            budget.spend(work)
        yield item


def charged(value: Any) -> Any:
    """Charge a new value, and return it; the items of a generator are charged when they are consumed."""
    budget = BUDGET.get()
    if budget is None:
        return value
    kind = type(value)
    if kind is GeneratorType:
        return iterate(value)
    budget.spend(len(value) if kind is str else copied_size(value))
    return value


def read(value: Any) -> Any:
    """Charge a value whose contents are compared or hashed, and return the value."""
    budget = BUDGET.get()
    if budget is not None:
        kind = type(value)
        budget.spend(len(value) if kind is str else 0 if kind in _SCALARS else size(value))
    return value


def searched(value: Any) -> Any:
    """Charge a container in which a value is searched, and return the container; a dictionary is not charged."""
    return value if isinstance(value, Mapping) else read(value)


def written(value: Any) -> Any:
    """Charge a value that is written as text, and return the value."""
    budget = BUDGET.get()
    if budget is not None:
        budget.spend(len(value) if type(value) is str else printed_size(value))
    return value


def added(*values: Any) -> Any:
    """Return the sum of two or more values, and charge it to the budget; strings are joined in one step."""
    if {*map(type, values)} == _STRINGS:
        return charged("".join(values))
    budget = BUDGET.get()
    total, *others = values
    for value in others:
        if budget is not None and (factor := max(escape_factor(total), escape_factor(value))) > 1:
            budget.spend(factor * (printed_size(total) + printed_size(value)))
        total = charged(total + value)
    return total


def subtracted(left: Any, right: Any) -> Any:
    """Return the difference of two numbers or sets, and charge it to the budget."""
    return charged(read(left) - read(right))


def joined(*values: Any) -> str:
    """Return the concatenation of values as text, and charge it to the budget."""
    return "".join([str(written(value)) for value in values])


def copied_size(value: Any) -> int:
    """Return the work of creating a value; the entries of a container are shared, not copied.

    Raises:
        TemplateLimitError: the value is a number with too many digits.
    """
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise TemplateLimitError("the rendering computes a number with too many digits")
    return WORK_PER_ITEM * len(value) if isinstance(value, list | tuple | dict | set) else 0


def size(value: Any) -> int:
    """Return the work of reading a value: its characters, and a constant for each entry of a container.

    Raises:
        TemplateLimitError: the value is too large, or contains a namespace, whose size can change.
    """
    if isinstance(value, str | bytes):
        return len(value)
    total, remaining = WORK_PER_ENTRY, [value]
    while remaining:
        part = remaining.pop()
        kind = type(part)
        if kind is str:
            total += len(part)
        elif kind not in _SCALARS:
            parts = part if kind is list or kind is tuple else _parts(part)
            total += WORK_PER_ENTRY * len(parts)
            if total <= MAX_WORK:
                remaining += parts
        if total > MAX_WORK:
            raise TemplateLimitError(f"the rendering processes more than {MAX_WORK:,} characters")
    return total


def _parts(value: Any) -> Collection[Any]:
    """Return the values that are written when an object is converted to text."""
    if isinstance(value, str | bytes):
        return (str(value),)  # such as Markup
    if isinstance(value, Mapping):
        return (*value, *value.values())
    if isinstance(value, list | tuple | set | frozenset | KeysView | ValuesView | ItemsView):
        return value
    if isinstance(value, Namespace):
        raise TemplateLimitError("the template uses a namespace as a value")
    owner = getattr(value, "__self__", None)  # the object of a bound method
    return () if owner is None else (owner,)


def escape_factor(value: Any) -> int:
    """Return the factor by which a text can grow when combined with `value`; a `Markup` value escapes the text."""
    return CHARS_PER_ESCAPED if isinstance(value, Markup) else 1


def printed_size(value: Any) -> int:
    """Return the maximum number of characters of a value as text."""
    return len(value) if isinstance(value, str | bytes) else _CHARS_PER_PRINTED * size(value)
