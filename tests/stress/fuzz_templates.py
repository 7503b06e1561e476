"""Templates of random pieces, many of which loop or grow."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

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
