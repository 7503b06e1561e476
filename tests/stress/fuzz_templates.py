"""Templates of random pieces that loop or grow, and every operation of Jinja with large arguments."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any
from unittest import mock

from jinja2.defaults import DEFAULT_FILTERS, DEFAULT_TESTS
from markupsafe import Markup

from paddlenlp_ext.data.rows.conversation import USER, Conversation, Message
from paddlenlp_ext.data.templates import jinja_budget
from paddlenlp_ext.data.templates.jinja_renderer import Renderer
from paddlenlp_ext.data.templates.jinja_template import JinjaTemplate
from tests.data.tiny_tokenizers import CHATML, LLAMA3, make_tokenizer
from tests.stress.wrong_values import damage

_VALUES = (
    *(
        "1",
        "10 ** 9",
        "99999",
        "2.5",
        "'a'",
        "'ab' * 1000",
        "none",
        "true",
        "[1, 'x']",
        "{'a': 1}",
        "messages",
        "ns",
        "x",
    ),
    *("messages[0]", "messages[0].content", "ns.x", "range(100000)", "loop", "undefined", "(1, 2)", "'%9999d'", "'{}'"),
)
_OPERATIONS = (
    *(
        "{} + {}",
        "{} ~ {}",
        "{} * {}",
        "{} ** {}",
        "{} % {}",
        "{} // {}",
        "{} == {}",
        "{} in {}",
        "[{}, {}]",
        "({}, {})",
    ),
    *("{}[{}]", "{}[:{}]", "{}.join({})", "{}.replace('a', {})", "{}.format({})", "{}.center({})", "{}|center({})"),
    *("{}|join({})", "{}|replace('a', {})", "{}|batch({})|list", "{}|default({})", "{}|round({})", "{}|indent({})"),
    *(
        "{}|tojson(indent={})",
        "{}|map('string')|list + {}",
        "dict(a={}, b={})",
        "namespace(x={}, y={})",
        "cycler({}, {})",
    ),
    *("{{'a': {}, 'b': {}}}", "{}|sort == {}", "{}|unique|list + {}", "{}|sum(start={})", "{}.split({})", "{}({})"),
)
_STATEMENTS = (
    *("{{{{ {0} }}}}", "{{% set x = {0} %}}", "{{% set ns.x = {0} %}}", "{{% if {0} %}}a{{% endif %}}"),
    *("{{% for i in {0} %}}{1}{{% endfor %}}", "{{% for i in range(50) %}}{1}{{% endfor %}}"),
    *("{{% macro m(x) %}}{1}{{% endmacro %}}", "{{{{ m({0}) }}}}", "{{% set x %}}{1}{{% endset %}}"),
    *(
        "{{% filter upper %}}{1}{{% endfilter %}}",
        "{{% call m({0}) %}}{1}{{% endcall %}}",
        "{{{{ raise_exception({0}) }}}}",
    ),
    *("{{% generation %}}{1}{{% endgeneration %}}", "{{% for i in {0} recursive %}}{{{{ loop({0}) }}}}{{% endfor %}}"),
)


@functools.cache
def _tokenizer() -> Any:
    return make_tokenizer(bos="<s>", eos="<|im_end|>")


def _expression(rng: random.Random, depth: int) -> str:
    if depth == 0 or rng.random() < 0.3:
        return rng.choice(_VALUES)
    return rng.choice(_OPERATIONS).format(_expression(rng, depth - 1), _expression(rng, depth - 1))


def _statements(rng: random.Random, depth: int) -> str:
    return "".join(
        rng.choice(_STATEMENTS).format(_expression(rng, 3), _statements(rng, depth - 1) if depth else "y")
        for _ in range(rng.randrange(1, 4))
    )


def attack(rng: random.Random, folder: Path) -> JinjaTemplate:
    """Load a template, which renders conversations in several forms."""
    if rng.random() < 0.3:
        text = damage(rng.choice((CHATML, LLAMA3)).encode(), rng).decode("utf-8", "replace")
    else:
        text = "{% set ns = namespace(x='abc') %}" + _statements(rng, 2) + CHATML
    return JinjaTemplate(text, _tokenizer())


_SIZES = (*(0, 1, 10, 1000, 1000, 4000, 4000, 20_000, 50_000, 99_999), *(300_000, 2_000_000, 30_000_000, 10**12))
_SECONDS = 0.2
"""Limit of a rendering in the attack on operations, so that only operations that cannot be interrupted take longer."""
_LARGE_VALUES = (
    *("'a' * {0}", "'ab' ~ 'a' * {0}", "'a b ' * {0}", "'a\\n' * {0}", "'\\n' * {0}", "'ü' * {0}", "'A' * {0}"),
    *("'<!--' * {0}", "'-->' * {0}", "'<a>' * {0}", "')' * {0} ~ 'x'", "'http://a.b ' * {0}", "'&' * {0}", "'1' * {0}"),
    *(
        "'{{}}' * {0}",
        "'{{' * {0}",
        "'}}' * {0}",
        "'%s' * {0}",
        "'%(a)s' * {0}",
        "'\U000e0001' * {0}",
        "'a' ~ '.a' * {0}",
    ),
    *("('&' * {0})|safe", "('<b>' * {0})|escape", "('a' * {0}).encode()", "'f' * {0}", "('f' * {0})|int(base=16)"),
    *("range({0})", "range({0})|list", "range(0, {0} * (2 ** 61 - 1), 2 ** 61 - 1)", "range({0})|map('string')", "{0}"),
    *("[1] * {0}", "['a'] * {0}", "['a' * 1000] * {0}", "[[1]] * {0}", "[messages] * {0}", "[{{'a': 1}}] * {0}"),
    *("('a' * {0})|list", "{{'a': 'b' * {0}}}", "dict.fromkeys(range({0})|map('string'))", "{{'a': 1}}.items()"),
    *("dict.fromkeys(range({0})|map('string'), 'a').keys()", "deep.x", "wide.x", "('a' * {0}).split", "-{0}", "1e300"),
    *("messages", "namespace(a=1)", "cycler('a', 'b' * {0})", "undefined", "none", "true", "'a' * {0} ~ '&' * {0}"),
)
_PREAMBLE = (
    "{% set deep = namespace(x=[1]) %}{% for i in range(300) %}{% set deep.x = [deep.x] %}{% endfor %}"
    "{% set wide = namespace(x=(1,)) %}{% for i in range(60) %}{% set wide.x = (wide.x, wide.x) %}{% endfor %}"
)
_METHODS = sorted(
    {name for kind in (str, Markup, bytes, list, tuple, dict, int, float, range) for name in dir(kind)}
    | {"isdisjoint", "mapping", "send", "throw", "next", "changed", "cycle"}
)
_NAMES = ("attribute", "default", "base", "indent", "width", "start", "case_sensitive", "reverse", "d", "old", "new")
_USES = (
    *("{{{{ {0} }}}}", "{{{{ ({0})|string|length }}}}", "{{{{ ({0})|list|length }}}}", "{{% set q = {0} %}}"),
    *("{{% for i in {0} %}}{{{{ i }}}}{{% endfor %}}", "{{% for i in x %}}{{% set q = {0} %}}{{% endfor %}}"),
    *("{{% for i in range(1000) %}}{{% set q = {0} %}}{{% endfor %}}", "{{{{ [{0}, {0}, {0}]|tojson }}}}"),
)
_OPERATORS = ("+", "-", "*", "/", "//", "%", "**", "~", "==", "<", "in", "not in", "and")


def _operation(rng: random.Random) -> str:
    """Return an expression with the large values x, y and z."""
    named = rng.random() < 0.2
    arguments = [rng.choice(("x", "y", "z", "'a'", "1", "none")) for _ in range(rng.choice((0, 1, 1, 2, 2, 3)))]
    inside = ", ".join(
        (f"{rng.choice(_NAMES)}=" if named else "") + argument for argument in arguments[: 1 + 2 * (not named)]
    )
    filter_, test, method = rng.choice(sorted(DEFAULT_FILTERS)), rng.choice(sorted(DEFAULT_TESTS)), rng.choice(_METHODS)
    more = f", {inside}" if inside else ""
    return rng.choice(
        (
            *(f"x|{filter_}({inside})", f"x|{filter_}({inside})", f"x.{method}({inside})", f"x.{method}({inside})"),
            *(f"x is {test}({inside or 'y'})", f"x {rng.choice(_OPERATORS)} y", f"x|map('{filter_}'{more})|list"),
            *(f"x|select('{test}'{more})|list", "x|map(attribute=y)|list", "x[y]", "x[y:z]", "{x: y}", "dict(x, a=y)"),
            *("namespace(x)", "range(x, y)", "joiner(x)()", "x.fromkeys(y)", "dict(a=x) == dict(a=y)", "[x] == [y]"),
        )
    )


def attack_operations(rng: random.Random, folder: Path) -> str:
    """Render a template that applies one operation to large values."""
    values = (rng.choice(_LARGE_VALUES).format(rng.choice(_SIZES)) for _ in range(3))
    sets = "".join(f"{{% set {name} = {value} %}}" for name, value in zip("xyz", values, strict=True))
    operation = _operation(rng)
    if rng.random() < 0.1:
        operation = " or ".join([operation] * 20)
    text = (_PREAMBLE if "." in sets else "") + sets + rng.choice(_USES).format(operation)
    with mock.patch.object(jinja_budget, "MAX_SECONDS", _SECONDS):
        return Renderer(text, _tokenizer()).text_of(Conversation((Message(USER, "a"),)), {})
