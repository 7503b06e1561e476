"""Charge the operations of a template to the budget of its rendering, before the operations run.

An operation cannot be interrupted, and may take much more time or memory than the size of its operands suggests. The
cost of a filter or method is computed from its name and arguments:

    lower, find, partition, ...      characters of the text, times a weight for slow operations
    rfind, rsplit, strip, ...        characters, times the length of the text to find
    list, sum, sort, groupby, ...    entries, including nested entries; a character of a string is an entry
    replace, join, format, * % ...   size of the result
    map, select, items, ...          nothing in advance; each item is charged when it is read
    any other name                   refused for more than 4,096 characters

The last rule covers operations that take quadratic time (urlize, striptags), and methods of later Python versions.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from types import GeneratorType
from typing import Any

from jinja2.runtime import Macro
from jinja2.utils import Namespace

from paddlenlp_ext.data.templates.jinja_budget import (
    BUDGET,
    CHARS_PER_ESCAPED,
    MAX_BITS,
    WORK_PER_ENTRY,
    WORK_PER_ITEM,
    Budget,
    TemplateLimitError,
    charged,
    copied_size,
    escape_factor,
    iterate,
    printed_size,
    size,
)

_MAX_WIDTH = 10_000
_MAX_OTHER_CHARS = 4096
"""Maximum number of characters for operations whose cost is not known."""
_MAX_HASHED = 1024
"""Maximum number of values other than strings in a set; numbers with equal hashes take quadratic time."""
_NESTED_FIELD = re.compile(r"\{[^{}]*\{")
_NUMBER = re.compile(r"\d+")


def _depth(value: Any) -> int:
    """Return how deeply lists and dictionaries are nested."""
    depth, level = 0, [[value]]
    while level:
        depth += 1
        containers = [item.values() if isinstance(item, dict) else item for item in level]
        level = [part for items in containers for part in items if isinstance(part, dict | list | tuple)]
    return depth


def _longest(*options: Any, **named: Any) -> int:
    """Return the size of the largest text or container among the arguments of an operation.

    Containers are included, because an operation may hash an argument for each item. Hashing a tuple also hashes its
    nested tuples, once per occurrence.
    """
    large = (option for option in (*options, *named.values()) if isinstance(option, str | tuple | list | Mapping))
    return max(map(size, large), default=0)


def _per_char(weight: int) -> Callable[..., int]:
    return lambda value, *options, **named: weight * printed_size(value)


def _copy(value: Any, *options: Any, **named: Any) -> int:
    return WORK_PER_ENTRY * len(value) if isinstance(value, str | bytes | range) else copied_size(value)


def _compare(weight: int) -> Callable[..., int]:
    return lambda items, *options, **named: (weight + _longest(*options, **named)) * size(items)


def _per_char_of_text(value: Any, *options: Any) -> int:
    return len(value) if isinstance(value, str | bytes) else 0


def _search(value: Any, *options: Any, **named: Any) -> int:
    return printed_size(value) * (1 + _longest(*options, **named) // 16)


def _split(value: Any, sep: Any = None, maxsplit: int = -1) -> int:
    pieces = value.count(sep) if sep else len(value) // 2 + 1
    return _search(value, sep) + WORK_PER_ENTRY // 2 * (min(pieces, maxsplit) if maxsplit >= 0 else pieces)


def _replace(value: Any, old: Any = "", new: Any = "", count: Any = None) -> int:
    text, old_size = printed_size(value), len(old) if isinstance(old, str | bytes) else 1
    return text + (text // max(old_size, 1) + 1) * printed_size(new)


def _join(items: list[Any], separator: Any = "", attribute: Any = None) -> int:
    work = sum(map(printed_size, items)) + len(items) * (printed_size(separator) + 16 * _longest(attribute))
    return work * escape_factor(separator)


def _format(value: Any, *options: Any, **named: Any) -> int:
    return printed_size(value) + format_cost(str(value), "%", (*options, *named.values()))


def _indent(value: Any, *options: Any, **named: Any) -> int:
    widths = [option for option in (*options, *named.values()) if isinstance(option, int)]
    return printed_size(value) * (32 + max([_longest(*options, **named), *widths]))


def _tojson(value: Any, *options: Any, **named: Any) -> int:
    work = 4 * size(value)
    given = [option for option in (*options, *named.values()) if option is not None]
    widths = [option if isinstance(option, int) else size(option) for option in given]
    return work + (work // WORK_PER_ENTRY * _depth(value) * max(widths) if any(widths) else 0)


def _sum(value: Any, attribute: Any = None, start: Any = 0) -> int:
    if not isinstance(start, int | float):
        raise TemplateLimitError("the template concatenates lists with the filter sum")
    return _copy(value) * (1 + _longest(attribute))


def _hash(items: list[Any], *options: Any, **named: Any) -> int:
    check_hashed(items)
    return (1 + _longest(*options, **named)) * size(items)


def check_hashed(items: Iterable[Any]) -> None:
    """Check the number of entries in a set or dictionary.

    Raises:
        TemplateLimitError: there are too many entries other than strings.
    """
    if sum(not isinstance(item, str) for item in items) > _MAX_HASHED:
        raise TemplateLimitError(
            f"the template creates a set or dictionary of more than {_MAX_HASHED:,} entries other than strings"
        )


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_LAZY = _names("attr d default first items last length map random reject rejectattr select selectattr")
"""Filters that return an existing value or an iterator."""
_PER_ITEM = _names("map reject rejectattr select selectattr")
"""Filters that read items one at a time; they can read many items before they yield one."""
_ALTERNATIVES = _names("d default")
"""Filters that return their argument without reading it."""
_CONSTANT_TESTS = _names(
    "boolean callable defined even false float integer iterable mapping none number odd sameas sequence string true "
    "undefined"
)
"""Tests that do not read the contents of their operands."""
_SHARE = _names("copy get items keys values")
"""Methods of a mapping that do not read its values."""
_ADDED_BY_JINJA = _names("_block_vars _loop_vars")
"""Keyword arguments that Jinja adds to calls in loops."""
_COLLECT = _names("fromkeys groupby join max min sort unique")
"""Operations that receive a list in place of an iterator."""
_TAKE_WIDTHS = _names("batch slice center indent round tojson ljust rjust zfill")
"""Operations whose integer arguments are widths, counts or precisions."""
_COSTS: dict[str, Callable[..., int]] = {
    name: cost
    for cost, names in (
        (
            _per_char(1),
            "abs capitalize casefold center endswith find float index int isalnum isalpha isascii isdecimal",
        ),
        (_per_char(1), "isdecimal isdigit isidentifier islower isnumeric isprintable isspace istitle isupper ljust"),
        (_per_char(1), "lower partition removeprefix removesuffix rjust round safe startswith string swapcase"),
        (_per_char(1), "truncate upper zfill"),
        (_per_char(CHARS_PER_ESCAPED), "e escape forceescape"),
        (_per_char(16), "title wordcount"),
        (_per_char(32), "splitlines urlencode"),
        (_per_char_of_text, "count reverse"),
        (_search, "lstrip rfind rindex rpartition rstrip strip trim"),
        (_split, "rsplit split"),
        (_copy, "batch list slice"),
        (_compare(1), "max min"),
        (_compare(16), "dictsort groupby sort"),
        (_hash, "fromkeys unique"),
        (_format, "format"),
        (_indent, "indent"),
        (_join, "join"),
        (_replace, "replace"),
        (_sum, "sum"),
        (_tojson, "tojson"),
    )
    for name in _names(names)
}
"""Work of filters and methods by name; the functions take the arguments of the operation."""


def charge(budget: Budget, name: str, value: Any, options: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    """Charge a filter or a method in advance, and return `value`; an iterator may become a list.

    Args:
        budget: budget of the rendering.
        name: name of the filter or method.
        value: the first argument of the filter, or the owner of the method.
        options: other positional arguments.
        named: keyword arguments.

    Raises:
        TemplateLimitError: the operation is refused, or exceeds the budget.
    """
    cost = _COSTS.get(name)
    if cost is None or name in _TAKE_WIDTHS:
        _check_operands(name, value, (*options, *named.values()), is_other=cost is None)
    if name in _COLLECT:
        budget.spend(_copy(value))
        value = list(value)
    work = 0 if cost is None else cost(value, *options, **named)
    budget.spend(work * escape_factor(value))
    return value


def _check_operands(name: str, value: Any, options: Iterable[Any], is_other: bool) -> None:
    """Check the integer arguments of an operation, and the size of its operands if its cost is not known (`is_other`).

    Raises:
        TemplateLimitError: an argument is too large.
    """
    for option in options:
        if isinstance(option, int) and abs(option) > _MAX_WIDTH:
            raise TemplateLimitError(f"the template passes {option} to {name}; the maximum is {_MAX_WIDTH:,}")
    if is_other and sum(map(size, (value, *options))) > _MAX_OTHER_CHARS:
        raise TemplateLimitError(f"the template passes more than {_MAX_OTHER_CHARS:,} characters to {name}")


def charge_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that charges its work before it runs, and charges its result."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0  # skip the context that Jinja passes

    @functools.wraps(function)
    def lazy(*args: Any, **kwargs: Any) -> Any:
        budget = BUDGET.get()
        if budget is None:
            return function(*args, **kwargs)
        # Each item reads the arguments, such as the path of an attribute.
        chars = 0 if name in _ALTERNATIVES else _longest(*args[first + 1 :], **kwargs)
        budget.spend(chars)
        if name in _PER_ITEM and args[first]:
            args = (*args[:first], iterate(args[first], WORK_PER_ITEM + chars), *args[first + 1 :])
        result = function(*args, **kwargs)
        return iterate(result) if type(result) is GeneratorType else result

    @functools.wraps(function)
    def eager(*args: Any, **kwargs: Any) -> Any:
        budget = BUDGET.get()
        if budget is None:
            return function(*args, **kwargs)
        value, options = args[first], args[first + 1 :]
        value = charge(budget, name, value, options, kwargs)
        return charged(function(*args[:first], value, *options, **kwargs))

    return lazy if name in _LAZY else eager


def charge_test(name: str, test: Callable[..., Any]) -> Callable[..., Any]:
    """Return a test that charges its work before it runs."""
    first = 1 if hasattr(test, "jinja_pass_arg") else 0

    @functools.wraps(test)
    def bounded(*args: Any) -> Any:
        budget = BUDGET.get()
        if budget is not None:
            budget.spend(sum(map(printed_size, args[first:])))
        return test(*args)

    return test if name in _CONSTANT_TESTS else bounded


def charge_call(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Charge a function or a method in advance, and return its positional arguments.

    Raises:
        TemplateLimitError: see `charge`.
    """
    budget = BUDGET.get()
    if budget is None:
        return args
    owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    kwargs = {key: value for key, value in kwargs.items() if key not in _ADDED_BY_JINJA}
    if isinstance(function, Macro):
        budget.spend(WORK_PER_ITEM * (len(args) + len(kwargs)))
    elif name in ("join", "fromkeys") and args:
        others = (owner, *args[1:]) if name == "join" else args[1:]
        return (charge(budget, name, args[0], others, kwargs), *args[1:])
    elif isinstance(owner, str | bytes | int | float):
        charge(budget, name, owner, args, kwargs)
    elif isinstance(owner, type):
        _check_operands(name, None, (*args, *kwargs.values()), is_other=True)
    elif name in ("format", "format_map"):  # Jinja's wrapper of a string method
        text = getattr(function, "__wrapped__", function).__self__
        budget.spend(format_cost(text, "{", (*args, *kwargs.values())))
    elif isinstance(owner, Mapping) and name in _SHARE:
        budget.spend(size((args, kwargs)))
    else:  # methods of containers may compare or hash entries
        budget.spend(size((owner, args, kwargs)))
        if hasattr(function, "fromkeys") or (isinstance(function, type) and issubclass(function, Namespace)):
            args = tuple(argument if isinstance(argument, Mapping) else list(argument) for argument in args)
            for argument in args:
                check_hashed(() if isinstance(argument, Mapping) else argument)
    return args


def operator_cost(operator: str, left: Any, right: Any) -> int:
    """Return the work of a product, a power, or a text formatted with `%`.

    Raises:
        TemplateLimitError: the result is too large.
    """
    if operator == "%":
        if isinstance(left, bytes):
            raise TemplateLimitError("the template formats bytes")
        return format_cost(left, "%", (right,)) if isinstance(left, str) else 0
    if operator == "**":
        if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > MAX_BITS:
            raise TemplateLimitError("the rendering computes a number with too many digits")
        return 0
    for count, value in ((left, right), (right, left)):
        if isinstance(count, int) and not isinstance(value, int | float):
            return max(count, 0) * copied_size(value)
    return 0


def format_cost(text: str, mark: str, values: Iterable[Any]) -> int:
    """Return the work of filling a format string, including widths and values; each field starts with `mark`.

    Raises:
        TemplateLimitError: a field has a large or computed width.
    """
    fields = text.partition(mark)[2]
    numbers = _NUMBER.findall(fields)
    computes = _NESTED_FIELD.search(text.replace("{{", "").replace("}}", "")) if mark == "{" else "*" in fields
    if computes or any(len(number) > 4 for number in numbers):
        raise TemplateLimitError("the template formats a text with a large or computed width")
    per_field = WORK_PER_ENTRY + sum(map(printed_size, values))
    work = WORK_PER_ENTRY // 2 * len(text) + sum(map(int, numbers)) + text.count(mark) * per_field
    return work * escape_factor(text)
