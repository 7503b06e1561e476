"""Test the limits of chat templates: bombs end soon and in little memory, other templates are rendered as ever."""

from __future__ import annotations

import time

import pytest
from transformers.utils.chat_template_utils import (
    _cached_compile_jinja_template,
    _compile_jinja_template,
    render_jinja_template,
)

from paddlenlp_ext.data.rows.conversation import ASSISTANT, USER, Conversation, Message
from paddlenlp_ext.data.rows.errors import InvalidRowError
from paddlenlp_ext.data.templates import jinja_budget as budget
from paddlenlp_ext.data.templates import jinja_sandbox as sandbox
from paddlenlp_ext.data.templates.jinja_renderer import Renderer
from tests.data.tiny_tokenizers import CHATML, LLAMA3, make_tokenizer

GROWING = "{%% set ns = namespace(x=%s) %%}{%% for i in range(60) %%}%s{%% endfor %%}{{ ns.x }}"
NESTED_TUPLE = "{% set ns = namespace(x=(1,)) %}{% for i in range(60) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}"
LONG = "('a' * 10000)"
COLLIDING = "range(0, 5000 * (2 ** 61 - 1), 2 ** 61 - 1)"  # numbers with equal hashes
BOMBS = {
    "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}": "more than 0 seconds",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}": "more than 0 seconds",
    "{% for x in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}": "recursion",
    "{% for x in [1] recursive %}{% if loop.depth == 1 %}{{ loop('a' * 4000000) }}{% endif %}{% endfor %}": "char",
    "{{ 'a' * 10**12 }}": "characters",
    "{{ 2 ** (10**9) }}": "number with too many digits",
    GROWING % ("7**99", "{% set ns.x = ns.x * ns.x %}"): "number with too many digits",
    GROWING % ("'abcd'", "{% set ns.x = ns.x + ns.x %}"): "characters",
    GROWING % ("'abcd'", "{% set ns.x = ns.x ~ ns.x %}"): "characters",
    GROWING % ("'abcd'", "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}"): "characters",
    GROWING % ("'abcd'", "{% set ns.x = [ns.x, ns.x] %}"): "characters",
    GROWING % ("'abcd'", "{% set ns.x = (ns.x, ns.x) %}"): "characters",
    GROWING % ("'abcd'", "{% set ns.x = {1: ns.x, 2: ns.x} %}"): "characters",
    GROWING % ("'abcd'", "{% set ns.x = dict(a=ns.x, b=ns.x) %}"): "characters",
    GROWING % ("'abcd'", "{% set ns.x = cycler(ns.x, ns.x).items %}"): "characters",
    "{% set ns = namespace(x='abcd') %}{% macro m() %}{% set ns.x = varargs %}{% endmacro %}"
    "{% for i in range(60) %}{{ m(ns.x, ns.x) }}{% endfor %}{{ ns.x == ns.x }}": "characters",
    "{% for i in range(100000) %}" + "y" * 1000 + "{% endfor %}": "characters",
    "{% set n = namespace(x=1) %}{% set n.x = n %}{{ n.x == n }}": "namespace",
    GROWING % ("[]", "{% set ns.x = ns.x + ['a' * 10000000][:1] %}"): "characters",
    GROWING % ("'abcd'", "{% set ns.x = ns %}"): "namespace",
    "{% set n = namespace(x=1) %}{{ n ~ 'a' }}": "namespace",
    "{% set n = namespace(x=1) %}{{ [n] }}": "namespace",
    "{% set n = namespace(x=1) %}{{ n|string }}": "namespace",
    "{{ '%1000000000d' % 3 }}": "width",
    "{{ '%*d' % (1000000000, 3) }}": "width",
    "{{ '%1000000000d'|format(3) }}": "width",
    "{{ '{:1000000000}'.format(1) }}": "width",
    "{{ '{:{}}'.format(1, 1000000000) }}": "width",
    "{{ ('{0}' * 2000).format('a' * 1000000) }}": "characters",
    "{{ 'a'|center(1000000000) }}": "center; the maximum is 10,000",
    "{{ 'a'.ljust(1000000000) }}": "ljust; the maximum is 10,000",
    "{{ [1]|batch(1000000000, 'x')|list }}": "batch; the maximum is 10,000",
    "{{ 1.5|round(1000000000, 'ceil') }}": "round; the maximum is 10,000",
    "{{ messages|tojson(indent=1000000000) }}": "tojson; the maximum is 10,000",
    "{{ ('a' * 5000).translate({97: 'b'}) }}": "characters to translate",
    "{{ (5).to_bytes(1000000000, 'big') }}": "to_bytes",
    f"{{{{ ({LONG} * 10)|replace('a', {LONG}) }}}}": "characters",
    f"{{{{ ({LONG} * 10).replace('a', {LONG}) }}}}": "characters",
    f"{{{{ {LONG}.join(range(10000)|map('string')) }}}}": "characters",
    f"{{{{ range(100000)|join({LONG}) }}}}": "characters",
    f"{{{{ ('\\n' * 100000)|indent({LONG}) }}}}": "characters",
    "{{ ([[]] * 1000)|sum(start=[]) }}": "concatenates lists",
    "{{ lipsum(n=1000000000) }}": "lipsum",
    f"{{{{ {COLLIDING}|unique|list }}}}": "set or dictionary",
    f"{{{{ dict.fromkeys({COLLIDING}) }}}}": "set or dictionary",
    f"{{{{ dict({COLLIDING}|batch(2)) }}}}": "set or dictionary",
    f"{{{{ ({LONG} * 10).rfind('ab' ~ {LONG}) }}}}": "characters",
    f"{{{{ ({LONG} * 10).rsplit('ab' ~ {LONG}) }}}}": "characters",
    f"{{{{ ({LONG} * 10).rpartition('ab' ~ {LONG}) }}}}": "characters",
    f"{{{{ ({LONG} * 10).strip('b' * 10000 ~ 'a') }}}}": "characters",
    f"{{{{ ({LONG} * 10)|trim('b' * 10000 ~ 'a') }}}}": "characters",
    f"{{{{ {LONG}|urlize }}}}": "more than 4,096 characters to urlize",
    f"{{{{ {LONG}|striptags }}}}": "more than 4,096 characters to striptags",
    f"{{{{ {LONG}|wordwrap }}}}": "more than 4,096 characters to wordwrap",
    f"{{{{ {LONG}.encode('punycode') }}}}": "more than 4,096 characters to encode",
    "{{ ({'a': 'x' * 5000})|xmlattr }}": "more than 4,096 characters to xmlattr",
    "{{ ([['a'] * 50] * 8000)|pprint }}": "characters",
    "{{ ('a b ' * 200000)|title }}": "characters",
    "{{ ('a b ' * 200000)|wordcount }}": "characters",
    "{{ ('a b ' * 200000).split() }}": "characters",
    "{{ ('a\n' * 500000)|indent }}": "characters",
    "{{ ('a' * 500000)|list }}": "characters",
    "{{ ('ü' * 500000)|urlencode }}": "characters",
    "{{ ('}}' * 500000).format() }}": "characters",
    "{{ (['a' * 100] * 5000)|sort }}": "characters",
    "{{ (('&' * 1000000)|safe) + ('&' * 1000000) }}": "characters",
    "{{ ([1] * 1000)|tojson(indent=10000) }}": "characters",
    **{
        "{{ ('a' * 2000000)|" + filter_ + "|list }}": "characters"
        for filter_ in ("select('float')", "reject('string')", "selectattr('b')", "rejectattr('upper')", "map('upper')")
    },
    "{{ ([('a' * 1000)|safe]|map(attribute='replace')|list * 1000) }}": "characters",
    "{{ '%1000000000d'.encode() % 3 }}": "formats bytes",
    "{{ ('f' * 500)|int(base=16) }}": "number with too many digits",
    GROWING % ("{1: 1}", "{% set ns.x = {1: ns.x.items(), 2: ns.x.items()} %}"): "characters",
    GROWING % ("(1,)", "{% set ns.x = (ns.x, ns.x) %}{% set y = messages[0][ns.x] %}"): "characters",
    GROWING % ("(1,)", "{% set ns.x = (ns.x, ns.x) %}{% set y = {ns.x: 1} %}"): "characters",
    GROWING % ("(1,)", "{% set ns.x = (ns.x, ns.x) %}{% set y = ns.x in [ns.x, 1] %}"): "characters",
    **{
        NESTED_TUPLE + "{{ " + expression + " }}": "characters"
        for expression in (
            "messages|map(attribute=ns.x)|list",
            "messages|selectattr(ns.x)|list",
            "messages|sort(attribute=ns.x)",
            "messages|groupby(ns.x)",
            "messages|unique(attribute=ns.x)|list",
            "messages|min(attribute=ns.x)",
            "messages|sum(ns.x)",
            "messages|join('', ns.x)",
            "messages[0]|attr(ns.x)",
        )
    },
    "{% autoescape true %}{{ 'a' }}{% endautoescape %}": "autoescape",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}": "recursion",
    "{% if 1 %}" * 200 + "{% endif %}" * 200: "IndentationError",
    "x" * 300_000: "300,000 characters",
    ("{% if " + " or ".join(["x"] * 90) + " %}{% endif %}") * 20: "compilation takes .* steps; the maximum is 50,000",
    "{{ 'abc'|center(1000)|replace('a', 'b' * 1000" + " }}": "unexpected",
    "{{ 1 // 0 }}": "ZeroDivisionError",
}


@pytest.mark.parametrize("text", BOMBS, ids=lambda text: text[:60])
def test_text_of_bomb_raises_soon(text, monkeypatch):
    if "seconds" in BOMBS[text]:
        monkeypatch.setattr(budget, "MAX_SECONDS", 0.05)
    else:
        monkeypatch.setattr(budget, "MAX_WORK", 1 << 23)
    renderer = Renderer(text, make_tokenizer())
    started = time.thread_time()
    with pytest.raises(InvalidRowError, match=BOMBS[text]):
        renderer.text_of(Conversation((Message(USER, "a"),)), {})
    assert time.thread_time() - started < 2


EVERYTHING = """
{%- macro shown(value, indent=2) %}{{ value | tojson(indent=indent) }} {{ varargs | length }}{% endmacro -%}
{%- set ns = namespace(count=0, names=[]) -%}
{%- for message in messages[1:] | reverse %}
{{ loop.index }}/{{ loop.length }} {{ loop.last }} {{ (loop.previtem or {}).role | default('none') }}
{%- set ns.count = ns.count + 2 ** 3 * 4 -%}
{%- set ns.names = ns.names + [message.role ~ '-' ~ ns.count] -%}
{{ '<' + message['role'] + '>' + message.content.strip().split(' ')[-1] | trim }}
{{- 'x' * 3 }}{{ '%s=%05d' % (message.role, 7) }}{{ '{:>6}|{}'.format('a', 1) }}{{ '%s'|format('b') }}
{{- ', '.join(ns.names) }}{{ ns.names | join('/') }}{{ message.content.replace('a', 'bb') | replace('b', 'c') }}
{%- if loop.first %}{% continue %}{% endif %}
{%- endfor %}
{%- for key, value in {'a': [1, 2.5, none], 'b': (1, true)}.items() recursive %}{{ key }}{{ value }}{% endfor %}
{%- for x in missing %}{{ x }}{% else %}nothing{% endfor %}
{%- set block %}{{ messages | map(attribute='role') | list }}{% endset %}{{ block }}
{%- filter upper %}{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | first }}
{%- endfilter %}
{{- shown({'text': 'grüße', 'n': 1700000000}, 1, 2, 3) }}{{ [3, 1, 2] | sort | sum }}{{ 'abc'.ljust(5) }}{{ 7 // 2 }}
{{- undefined_name }}{{ messages[0].get('x', 1700000000) }}{{ 1.5 | round }}{{ dict(a=1, **{'b': 2}) }}{{ 10 % 4 }}
"""
MESSAGES = [
    {"role": role, "content": content}
    for role, content in [("system", "s a"), ("user", " a b "), ("assistant", "bab"), ("user", "c")]
]


@pytest.mark.parametrize("text", [EVERYTHING, CHATML, LLAMA3], ids=["everything", "chatml", "llama3"])
@pytest.mark.parametrize("prompt", [True, False])
def test_bound_template_renders_the_text_of_transformers(text, prompt):
    arguments = {"add_generation_prompt": prompt, "bos_token": "<s>", "eos_token": "</s>"}
    expected = render_jinja_template([MESSAGES], chat_template=text, **arguments)
    with budget.limited(100):
        name = sandbox.bound_template(text)
        assert render_jinja_template([MESSAGES], chat_template=name, **arguments) == expected
    assert len(expected[0][0]) > 50


def test_text_of_template_that_transformers_has_forgotten_is_the_same():
    renderer = Renderer("{{ messages[0].content }}!", make_tokenizer())
    conversation = Conversation((Message(USER, "a"), Message(ASSISTANT, "b")))
    assert renderer.text_of(conversation, {}) == "a!"
    for function in (_compile_jinja_template, _cached_compile_jinja_template):
        getattr(function, "cache_clear", lambda: None)()
    assert renderer.text_of(conversation, {}) == "a!"


def test_text_of_long_conversation_pays_with_its_length(monkeypatch):
    monkeypatch.setattr(budget, "MAX_WORK", 100)
    renderer = Renderer("{% for m in messages %}{{ m.content + '' }}{{ m.content ~ '' }}{% endfor %}", make_tokenizer())
    assert len(renderer.text_of(Conversation((Message(USER, "a" * 5000),)), {})) == 10_000


def test_limited_inner_blocks_end_at_the_deadline_of_the_outer_one(monkeypatch):
    monkeypatch.setattr(budget, "MAX_SECONDS", 0.05)
    renderer = Renderer("{% for i in range(1000) %}{% endfor %}", make_tokenizer())
    with pytest.raises(InvalidRowError, match="more than 0 seconds"), budget.limited():
        for _ in range(10_000):
            renderer.text_of(Conversation((Message(USER, "a"),)), {})
    renderer.text_of(Conversation((Message(USER, "a"),)), {})
