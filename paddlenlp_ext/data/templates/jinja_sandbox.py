"""Limit processor time and memory of a chat template, which comes with a model and is not trusted.

Jinja's sandbox hides Python's internals from a template, but does not limit loops, strings and operations. In this
module, every operation is charged to the budget of the rendering (jinja_budget.py):

    calls, filters, tests, * ** %                     by the environment
    loops, + - ~ literals, slices, comparisons, ...   by filters that are added to the syntax tree
    texts that are written                            by Jinja's function `finalize`

transformers renders the template, but receives only a name instead of its source. transformers compiles this name to
empty code, which `bound_template` replaces with the charging code of the template. transformers must not compile the
source of the template, because the compiler evaluates constant expressions.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Any

from jinja2 import Environment, Template, nodes
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from paddlenlp_ext.data.templates import jinja_budget as budgets
from paddlenlp_ext.data.templates.jinja_budget import BUDGET, TemplateLimitError, charged, copied_size, iterate, written
from paddlenlp_ext.data.templates.jinja_costs import charge_call, charge_filter, charge_test, operator_cost

MAX_TEMPLATE_CHARS = 1 << 18
_MAX_VISITS = 50_000
"""Maximum number of node visits while a template is compiled."""
_LOOP, _NEW, _READ, _SEARCHED = "bounded loop", "new value", "compared value", "searched value"
_SUM, _DIFFERENCE, _TEXT = "new sum", "new difference", "new text"
_CHARGING_FILTERS = {
    _LOOP: iterate,
    _NEW: charged,
    _READ: budgets.read,
    _SEARCHED: budgets.searched,
    _SUM: budgets.added,
    _DIFFERENCE: budgets.subtracted,
    _TEXT: budgets.joined,
}
"""Filters that charge values; a template cannot call them, because their names contain a space."""


@functools.lru_cache(maxsize=256)
def _compiled(text: str) -> tuple[str, Template]:
    """Return the name of a template and its compiled, charging code."""
    from transformers.utils.chat_template_utils import _cached_compile_jinja_template

    # Bypass the cache that some versions of transformers add to this function, to get a new, empty environment.
    compile_ = getattr(_cached_compile_jinja_template, "__wrapped__", _cached_compile_jinja_template)
    template = compile_bounded(compile_("").environment, text)
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{{# {digest} #}}{{% generation %}}{{% endgeneration %}}", template


def compile_bounded(environment: Environment, text: str) -> Template:
    """Compile a template; its operations are charged when it is rendered within a block of `limited`.

    Args:
        environment: a sandboxed environment, which is changed and must not have compiled other templates.
        text: source text of the template.

    Raises:
        TemplateLimitError: the template is too long or too complex, or uses autoescape.
        jinja2.exceptions.TemplateError: the text is not valid Jinja.
    """
    if len(text) > MAX_TEMPLATE_CHARS:
        raise TemplateLimitError(f"the template has {len(text):,} characters; the maximum is {MAX_TEMPLATE_CHARS:,}")
    environment.__class__ = _BoundedEnvironment
    assert isinstance(environment, _BoundedEnvironment)
    environment.num_written = len(text)
    environment.filters = {name: charge_filter(name, value) for name, value in environment.filters.items()}
    environment.filters |= _CHARGING_FILTERS
    environment.tests = {name: charge_test(name, test) for name, test in environment.tests.items()}
    environment.finalize = written
    environment.globals.pop("lipsum", None)
    return environment.from_string(text)


def bound_template(text: str) -> str:
    """Compile a template with limits, and return the name under which transformers renders it.

    Raises:
        TemplateLimitError: the template is too long or too complex, or uses autoescape.
        jinja2.exceptions.TemplateError: the text is not valid Jinja.
    """
    from transformers.utils.chat_template_utils import _compile_jinja_template

    name, bounded = _compiled(text)
    placeholder = _compile_jinja_template(name)  # a new template if transformers has evicted it
    if placeholder.environment is not bounded.environment:
        placeholder.environment = bounded.environment
        placeholder.globals = bounded.globals
        placeholder.root_render_func, placeholder.blocks = bounded.root_render_func, bounded.blocks
    return name


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Environment of a bounded template.

    Attributes:
        num_written: length of the template, an upper bound on the literal characters that one iteration writes.
    """

    num_written: int
    intercepted_binops = frozenset({"*", "**", "%"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        if template.find(nodes.EvalContextModifier):  # also finds the subclass ScopedEvalContextModifier
            raise TemplateLimitError("the template uses autoescape")
        _, num_visits = _count_visits(template)
        if num_visits > _MAX_VISITS:
            raise TemplateLimitError(f"the compilation takes {num_visits:,} steps; the maximum is {_MAX_VISITS:,}")
        _ChargingCode().visit(template)
        template.set_environment(self)
        return template

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = BUDGET.get()
        if budget is not None:
            budget.spend(operator_cost(operator, left, right))
        return charged(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        args = charge_call(__obj, args, kwargs)
        if isinstance(__obj, LoopContext) and args:  # the call renders the next level of a recursive loop
            args = (iterate(args[0], __self.num_written), *args[1:])
        return charged(super().call(__context, __obj, *args, **kwargs))


def _count_visits(node: nodes.Node) -> tuple[int, int]:
    """Return the number of nodes of a syntax tree, and the number of visits that Jinja's compiler makes.

    The compiler tries to evaluate every expression as a constant, and visits all expressions inside it.
    """
    num_nodes = num_visits = 1
    for child in node.iter_child_nodes():
        nodes_below, visits_below = _count_visits(child)
        num_nodes += nodes_below
        num_visits += visits_below
    return num_nodes, num_visits + (num_nodes if isinstance(node, nodes.Expr) else 0)


class _ChargingCode(NodeTransformer):
    """Add charging filters to loops, and to operations that the environment does not intercept."""

    def get_visitor(self, node: nodes.Node) -> Any:
        """Return the visitor for the type of a node, or None for types that stay unchanged."""
        return getattr(self, f"charge_{type(node).__name__.lower()}", None)

    def charge_const(self, node: nodes.Const) -> nodes.Const:
        copied_size(node.value)
        return node

    def charge_for(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        written_chars = sum(len(data.data) for part in node.body for data in part.find_all(nodes.TemplateData))
        node.iter = _filtered(_LOOP, node.iter, nodes.Const(written_chars))
        return node

    def charge_getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            return _filtered(_NEW, node)
        node.arg = _read(node.arg)
        return node

    def charge_compare(self, node: nodes.Compare) -> nodes.Compare:
        self.generic_visit(node)
        if len(node.ops) == 1 and _is_short(node):
            return node
        node.expr = _read(node.expr)
        for operand in node.ops:
            operand.expr = _read(operand.expr, _SEARCHED if operand.op in ("in", "notin") else _READ)
        return node

    def charge_list(self, node: nodes.List | nodes.Tuple) -> nodes.Expr:
        self.generic_visit(node)
        is_target = isinstance(node, nodes.Tuple) and node.ctx != "load"
        return node if is_target or _is_constant(node) else _filtered(_NEW, node)

    charge_tuple = charge_list

    def charge_dict(self, node: nodes.Dict) -> nodes.Expr:
        self.generic_visit(node)
        for pair in node.items:
            pair.key = _read(pair.key)
        return _filtered(_NEW, node)

    def charge_sub(self, node: nodes.Sub) -> nodes.Expr:
        self.generic_visit(node)
        return _filtered(_DIFFERENCE, node.left, node.right)

    def charge_concat(self, node: nodes.Concat) -> nodes.Expr:
        self.generic_visit(node)
        return _filtered(_TEXT, *node.nodes)

    def charge_add(self, node: nodes.Add) -> nodes.Expr:
        operands: list[nodes.Expr] = []
        left: nodes.Expr = node
        while isinstance(left, nodes.Add):
            operands.append(self.visit(left.right))
            left = left.left
        return _filtered(_SUM, self.visit(left), *reversed(operands))


def _is_constant(node: nodes.Node) -> bool:
    """Return whether an expression is a constant, or a list or tuple of constants."""
    if isinstance(node, nodes.List | nodes.Tuple):
        return all(isinstance(item, nodes.Const) for item in node.items)
    return isinstance(node, nodes.Const)


def _is_short(node: nodes.Compare) -> bool:
    """Return whether a comparison of two operands is cheap, because one operand is a constant."""
    (operand,) = node.ops
    return _is_constant(operand.expr) or (operand.op not in ("in", "notin") and _is_constant(node.expr))


def _read(node: nodes.Expr, name: str = _READ) -> nodes.Expr:
    """Return an expression that charges a value whose contents are read."""
    return node if _is_constant(node) else _filtered(name, node)


def _filtered(name: str, node: nodes.Node, *arguments: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(arguments), [], None, None, lineno=node.lineno)
