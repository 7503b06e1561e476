"""Limit processor time and memory of a chat template, which comes with a model and is not trusted.

Jinja's sandbox hides Python from a template, but does not bound its loops and strings. Here every operation that
creates a value, and every iteration, is charged to the budget of the rendering. Operations whose result can be much
larger than their operands are charged in advance:

    loops, calls, filters            a step each; the processor time is limited too
    + ~ slices literals filters      size of the result
    * ** % replace join format       size of the result, computed from the operands

A container is charged for the text that it prints, so that nested lists of one long string cannot grow unnoticed.
transformers renders the template. It receives a name in place of the template; `bound_template` replaces the empty code
that transformers compiled for the name with the charging code of the template. transformers must not compile the
template itself, because the compiler evaluates constant expressions.

Limits of the operating system would need a child process for each process that renders. A child renders as fast as this
sandbox, but takes 1.2 s to import transformers, or needs a copy of the environment in which transformers renders
templates.
"""

from __future__ import annotations

import functools
import hashlib
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_TEMPLATE_CHARS = 1 << 18
MAX_SECONDS = 3.0
"""Maximum processor time in seconds for one rendering, or for all renderings that probe a template."""
MAX_CHARS = 1 << 28
"""Maximum number of characters that a rendering may create, including dropped values."""
_CHARS_PER_TEXT = 64
"""Additional characters for each character of the conversation, because long texts are copied several times."""
_CHARS_PER_ENTRY = 512
_MAX_WIDTH = 10_000
_MAX_BITS = 1 << 16
"""Maximum number of bits of an integer product or power."""
_STEPS_PER_CHECK = 16
_EXPENSIVE_CHARS = 1 << 16

_LOOP, _NEW, _WRITTEN, _STORED = "bounded loop", "new value", "written value", "stored value"
"""Charging filters; templates cannot name them because of the space."""
_TAKE_ANY_OPTION = frozenset({"default", "d", "map", "select", "reject", "selectattr", "rejectattr", "groupby"})
_TAKE_WIDTHS = frozenset({"batch", "slice", "center", "indent", "round", "tojson", "ljust", "rjust", "zfill"})
"""Filters and string methods whose integer arguments are widths, counts or precisions."""
_REFUSED_METHODS = ("translate", "maketrans", "to_bytes", "from_bytes", "expandtabs")
_CHARGED_METHODS = frozenset({*_TAKE_WIDTHS, *_REFUSED_METHODS, "format", "format_map", "join", "replace"})
_NESTED_FIELD = re.compile(r"\{[^{}]*\{")
_NUMBERS = {"{": re.compile(r"\{[^{}]*?(\d+)[^{}]*\}"), "%": re.compile(r"(\d+)")}


class TemplateLimitError(SecurityError):
    """Error about a template that exceeds the limits of a rendering."""


class _Budget:
    """Remaining characters and processor time of a rendering."""

    __slots__ = ("_chars", "_deadline", "_steps")

    def __init__(self, num_chars: int, outer: _Budget | None) -> None:
        self._chars = num_chars
        self._steps = 0
        self._deadline = time.thread_time() + MAX_SECONDS
        if outer is not None:
            self._deadline = min(self._deadline, outer._deadline)

    def step(self) -> None:
        """Count an operation, and check the time after every 16 operations."""
        self._steps += 1
        if self._steps % _STEPS_PER_CHECK == 0:
            self.check_time()

    def spend(self, num_chars: int) -> None:
        """Charge the characters of a text."""
        self._chars -= num_chars
        if self._chars < 0:
            raise TemplateLimitError(f"it builds texts of more than {MAX_CHARS:,} characters")
        if num_chars > _EXPENSIVE_CHARS:
            self.check_time()

    def check_time(self) -> None:
        """Check the processor time of the rendering."""
        if time.thread_time() > self._deadline:
            raise TemplateLimitError(f"it takes more than {MAX_SECONDS:.0f} seconds")


_BUDGET: ContextVar[_Budget | None] = ContextVar("budget of a rendering", default=None)


@contextmanager
def limited(num_chars: int = 0) -> Iterator[None]:
    """Limit the renderings in the block; `num_chars` is the length of the conversation.

    A block inside another block also ends at the deadline of the outer block.
    """
    token = _BUDGET.set(_Budget(MAX_CHARS + _CHARS_PER_TEXT * num_chars, _BUDGET.get()))
    try:
        yield
    finally:
        _BUDGET.reset(token)


@functools.lru_cache(maxsize=256)
def _compiled(text: str) -> tuple[str, Template]:
    """Return the name of a template and its compiled, charging code."""
    from transformers.utils.chat_template_utils import _cached_compile_jinja_template

    if len(text) > MAX_TEMPLATE_CHARS:
        raise TemplateLimitError(f"it has {len(text):,} characters, more than {MAX_TEMPLATE_CHARS:,}")
    # A new environment without other templates; in some versions of transformers, this function has the cache.
    compile_ = getattr(_cached_compile_jinja_template, "__wrapped__", _cached_compile_jinja_template)
    environment = compile_("").environment
    environment.__class__ = _BoundedEnvironment
    environment.num_written = len(text)
    environment.filters = {name: _bounded_filter(name, filter_) for name, filter_ in environment.filters.items()}
    environment.filters |= {_LOOP: _bounded_loop, _NEW: _charged, _WRITTEN: _written, _STORED: _stored}
    environment.finalize = _written
    environment.globals.pop("lipsum", None)
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{{# {digest} #}}{{% generation %}}{{% endgeneration %}}", environment.from_string(text)


def bound_template(text: str) -> str:
    """Compile a template with limits, and return the name under which transformers renders it.

    Raises:
        TemplateLimitError: the template is too long.
        jinja2.exceptions.TemplateError: the text is not valid Jinja.
    """
    from transformers.utils.chat_template_utils import _compile_jinja_template

    name, bounded = _compiled(text)
    placeholder = _compile_jinja_template(name)  # may fall out of the cache of transformers
    if placeholder.environment is not bounded.environment:
        placeholder.environment = bounded.environment
        placeholder.globals = bounded.globals
        placeholder.root_render_func, placeholder.blocks = bounded.root_render_func, bounded.blocks
    return name


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Environment of a bounded template.

    Attributes:
        num_written: number of characters of the template, an upper bound of its text in one iteration.
    """

    num_written: int
    intercepted_binops = frozenset({"*", "**", "%"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        _ChargingCode().visit(template)
        template.set_environment(self)
        return template

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator, and charge its result."""
        budget = _BUDGET.get()
        if budget is not None:
            if isinstance(left, int) and isinstance(right, int):
                bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
                if operator in ("*", "**") and bits > _MAX_BITS:
                    raise TemplateLimitError("it computes a number of too many digits")
            elif operator == "*":
                for count, value in ((left, right), (right, left)):
                    if isinstance(count, int) and not isinstance(value, float):
                        budget.spend(max(count, 0) * _size(value))
            elif operator == "%" and isinstance(left, str):
                _charge_format(budget, left, "%", right)
        return _charged(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Call a macro, a function or a method, and charge its result."""
        budget = _BUDGET.get()
        if budget is not None:
            budget.step()
            collects = isinstance(__obj, type) or getattr(__obj, "catch_varargs", False)
            if collects or getattr(__obj, "catch_kwargs", False):
                budget.spend(_size((args, kwargs)))
            if isinstance(__obj, LoopContext) and args:  # next level of a recursive loop
                args = (_bounded_loop(args[0], __self.num_written), *args[1:])
            elif not isinstance(__obj, Macro):
                args = _charge_method(budget, getattr(__obj, "__wrapped__", __obj), args, kwargs)
        return _charged(super().call(__context, __obj, *args, **kwargs))


class _ChargingCode(NodeTransformer):
    """Wrap iterables of loops, and expressions that create values without a call, in charging filters."""

    def get_visitor(self, node: nodes.Node) -> Any:
        """Return the visitor for the type of a node, or None for types that stay unchanged."""
        return getattr(self, f"charge_{type(node).__name__.lower()}", None)

    def charge_for(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        written = sum(len(data.data) for statement in node.body for data in statement.find_all(nodes.TemplateData))
        node.iter = _filtered(node.iter, _LOOP, nodes.Const(written))
        return node

    def charge_getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        return _filtered(node, _NEW) if isinstance(node.arg, nodes.Slice) else node

    def charge_tuple(self, node: nodes.Tuple) -> nodes.Expr:
        self.generic_visit(node)
        return _filtered(node, _NEW) if node.ctx == "load" and node.items else node

    def _charge_new(self, node: nodes.Expr) -> nodes.Expr:
        self.generic_visit(node)
        return _filtered(node, _NEW)

    def charge_concat(self, node: nodes.Concat) -> nodes.Expr:
        self.generic_visit(node)
        node.nodes = [part if isinstance(part, nodes.Const) else _filtered(part, _WRITTEN) for part in node.nodes]
        return _filtered(node, _NEW)

    def charge_add(self, node: nodes.Add) -> nodes.Expr:
        return _filtered(self._sum(node), _NEW)

    def _sum(self, node: nodes.Expr) -> nodes.Expr:
        """Visit the operands of a sum; the sum is charged once."""
        if not isinstance(node, nodes.Add):
            return self.visit(node)
        node.left, node.right = self._sum(node.left), self._sum(node.right)
        return node

    def charge_output(self, node: nodes.Output) -> nodes.Output:
        node.nodes = [self._sum(part) for part in node.nodes]  # `finalize` charges the written text
        return node

    def charge_assign(self, node: nodes.Assign) -> nodes.Assign:
        self.generic_visit(node)
        if isinstance(node.target, nodes.NSRef):
            node.node = _filtered(node.node, _STORED)
        return node

    charge_list = charge_dict = _charge_new


def _filtered(node: nodes.Node, name: str, *arguments: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(arguments), [], None, None, lineno=node.lineno)


def _bounded_loop(iterable: Iterable[Any], num_written: int) -> Iterator[Any]:
    """Yield the items of a loop, and charge the template text of each iteration."""
    budget = _BUDGET.get()
    for item in iterable:
        if budget is not None:
            budget.step()
            budget.spend(num_written)
        yield item


def _charged(value: Any) -> Any:
    """Charge a new value, and return it."""
    budget = _BUDGET.get()
    if budget is not None:
        if type(value) is str:  # the most frequent case
            budget.spend(len(value))
            return value
        budget.step()
        if not isinstance(value, bool | float | None | Namespace):
            budget.spend(_size(value))
    return value


def _written(value: Any) -> Any:
    """Charge a value that is written as text, and return it; a namespace is refused because its contents can change."""
    return _charged(value if type(value) is str else _stored(value))


def _stored(value: Any) -> Any:
    """Return a value, or raise an error if it is a namespace."""
    if isinstance(value, Namespace):
        raise TemplateLimitError("it writes or stores a namespace")
    return value


def _size(value: Any) -> int:
    """Return the approximate number of characters that a value prints.

    Raises:
        TemplateLimitError: the text is too long, or a container holds a namespace, whose contents can change.
    """
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, int):
        return value.bit_length() // 3
    total, remaining = 0, [value]
    while remaining:
        part = remaining.pop()
        total += len(part) if isinstance(part, str | bytes) else _CHARS_PER_ENTRY
        if total > MAX_CHARS:
            raise TemplateLimitError(f"it builds texts of more than {MAX_CHARS:,} characters")
        if isinstance(part, str | bytes | int | float | None):
            continue
        if isinstance(part, Mapping):
            remaining.extend(part)
            remaining.extend(part.values())
        elif isinstance(part, list | tuple | set | frozenset):
            remaining.extend(part)
        elif isinstance(part, Namespace):
            raise TemplateLimitError("it puts a namespace into a list")
    return total


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that charges its result, in advance if the result can be large."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0  # after the context that Jinja passes

    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        budget = _BUDGET.get()
        if budget is not None and len(args) > first:
            budget.step()
            if len(args) == first + 1 and not kwargs and type(args[first]) is str:  # the most frequent case
                return _charged(function(*args))
            args = (*args[:first], *_charge_filter(budget, name, args[first:], kwargs))
        return _charged(function(*args, **kwargs))

    return bounded


def _charge_filter(budget: _Budget, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Charge a filter in advance, and return its arguments."""
    value, *options = args
    if isinstance(value, Namespace):
        raise TemplateLimitError("it passes a namespace to a filter")
    if name in _TAKE_ANY_OPTION:
        return args
    options += kwargs.values()
    _check_widths(name, options)
    if name == "format":
        _charge_format(budget, str(value), "%", options)
    elif name == "sum" and not all(isinstance(option, str | int | float | None) for option in options):
        raise TemplateLimitError("it concatenates lists with the filter sum")
    elif name == "join":
        value = list(value)
        budget.spend(len(value) * max(map(_size, options), default=0))
    elif name == "replace":
        _charge_replace(budget, str(value), *map(str, options[:2]))
    elif isinstance(value, str):
        budget.spend(len(value) * max((len(option) for option in options if isinstance(option, str)), default=0))
    return (value, *args[1:])


def _charge_method(budget: _Budget, method: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Charge a method of a string or number in advance, and return its arguments."""
    owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
    if not isinstance(owner, str | bytes | int):
        return args
    if name not in _CHARGED_METHODS:
        return args
    if name in _REFUSED_METHODS:
        raise TemplateLimitError(f"it calls {name}")
    if name in ("format", "format_map"):
        assert isinstance(owner, str)
        _charge_format(budget, owner, "{", (args, kwargs))
        return args
    _check_widths(name, (*args, *kwargs.values()))
    if name == "join" and args:
        items = list(args[0])
        budget.spend(len(items) * _size(owner))
        return (items, *args[1:])
    if name == "replace" and len(args) > 1 and all(isinstance(option, str) for option in args[:2]):
        _charge_replace(budget, str(owner), *args[:2])
    return args


def _check_widths(name: str, options: Iterable[Any]) -> None:
    for option in options:
        if name in _TAKE_WIDTHS and isinstance(option, int) and abs(option) > _MAX_WIDTH:
            raise TemplateLimitError(f"it passes {option} as a width or count, more than {_MAX_WIDTH:,}")


def _charge_replace(budget: _Budget, text: str, old: str = "", new: str = "") -> None:
    budget.spend(len(text) + text.count(old) * len(new))


def _charge_format(budget: _Budget, text: str, mark: str, values: Any) -> None:
    """Charge a format string, whose fields start with `mark`, with its widths and values."""
    fields = text.replace("{{", "").replace("}}", "") if mark == "{" else text.partition("%")[2]
    numbers = _NUMBERS[mark].findall(fields)
    computes = _NESTED_FIELD.search(fields) if mark == "{" else "*" in fields
    if computes or any(len(number) > 4 for number in numbers):
        raise TemplateLimitError("it formats a text with a large or computed width")
    budget.spend(len(text) + sum(map(int, numbers)) + text.count(mark) * _size(values))
