"""Conversations of many turns: the same examples as from renderings of the whole conversation, in linear work."""

from __future__ import annotations

import pytest

from paddlenlp_ext.data.rows.conversation import Conversation
from paddlenlp_ext.data.rows.errors import InvalidRowError
from paddlenlp_ext.data.rows.row_formats import parse_row
from paddlenlp_ext.data.templates import jinja_answer_spans, jinja_renderer
from paddlenlp_ext.data.templates.jinja_template import JinjaTemplate
from tests.data.tiny_tokenizers import TEMPLATES, make_tokenizer

GENERATION = TEMPLATES["chatml"][0].replace(
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}",
    "{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ message['content'] + '<|im_end|>' }}"
    "{% endif %}{{ '\n' }}",
)
ALL = {**TEMPLATES, "generation": (GENERATION, "<|im_end|>")}


def template_named(name: str) -> JinjaTemplate:
    text, eos = ALL[name]
    return JinjaTemplate(text, make_tokenizer(bos="<s>", eos=eos))


def conversation_of(roles: str) -> Conversation:
    """Return a conversation with a system message (s), user messages (u) and answers (a), some of them equal."""
    names = {"s": "system", "u": "user", "a": "assistant"}
    texts = [
        f"text {index % 5}\n" + "<|im_end|>" * (index % 11 == 3) + "x" * (index % 7) for index in range(len(roles))
    ]
    return parse_row(
        {"messages": [{"role": names[role], "content": text} for role, text in zip(roles, texts, strict=True)]}
    )


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("roles", ["ua" * 50, "sua" + "ua" * 50, "u" + "a" * 60, "a" + "ua" * 40, "uuaa" * 30])
def test_render_of_many_turns_is_that_of_whole_renderings(name, roles, monkeypatch):
    template = template_named(name)
    try:
        conversation = conversation_of(roles)
        in_windows = template.render(conversation)
    except InvalidRowError as error:
        in_windows = str(error)
    monkeypatch.setattr(jinja_answer_spans, "_WINDOW", 1000)
    try:
        assert in_windows == template.render(conversation)
    except InvalidRowError as error:
        assert in_windows == str(error)


@pytest.mark.parametrize("name", ["chatml", "llama3", "mistral", "generation"])
def test_render_of_many_turns_renders_each_message_a_bounded_number_of_times(name, monkeypatch):
    counts = []
    real = jinja_renderer.Renderer.dictionaries
    monkeypatch.setattr(
        jinja_renderer.Renderer,
        "dictionaries",
        lambda self, conversation: counts.append(len(conversation.messages)) or real(self, conversation),
    )
    template_named(name).render(conversation_of("ua" * 400))
    assert sum(counts) < 100 * 800


@pytest.mark.parametrize("name", ["thinking", "marked"])
def test_render_of_more_turns_than_a_rewriting_template_allows_says_so(name, monkeypatch):
    monkeypatch.setattr(jinja_renderer, "MAX_WORK_PER_ROW", 10_000)
    with pytest.raises(
        InvalidRowError, match=r"too many turns for the chat template; split the conversation into several rows"
    ):
        template_named(name).render(conversation_of("ua" * 100))


@pytest.mark.parametrize("answer", ["a" + " " * 10**6 + "b", "<think>" + " \n" * 10**6 + "b", " " * 10**6 + "x</think"])
def test_render_of_an_answer_of_a_million_spaces_takes_linear_time(answer):
    conversation = Conversation.from_turns(None, [("q", answer)])
    (example,) = template_named("chatml").render(conversation)
    assert answer in example.turns[0].answer
