"""Ollama templates of chat templates with tools, against prompts of Go's text/template (write_ollama_templates.py)."""

from __future__ import annotations

import json

import pytest

from paddlenlp_ext.checkpoint.gguf.ollama_tools import compact_json
from paddlenlp_ext.cli.export_gguf import chat_delimiters
from paddlenlp_ext.data.rows.row_formats import parse_row
from paddlenlp_ext.data.templates.base import TemplateOptions
from paddlenlp_ext.data.templates.load import load_template
from paddlenlp_ext.utils.logging import get_logger
from tests.data.templates.test_chat_templates import byte_tokenizer, decode, template_of
from tests.golden import DATA
from tests.golden.cases.ollama_cases import CHATS, TEMPLATES

GOLDEN = json.loads((DATA / "ollama_templates.json").read_text(encoding="utf-8"))
CASES = [(name, chat) for name in TEMPLATES for chat in CHATS if chat not in TEMPLATES[name]]


@pytest.mark.parametrize("name", TEMPLATES)
def test_ollama_template_is_the_one_that_go_executed(name):
    delimiters = chat_delimiters(byte_tokenizer(), template_of(name))
    assert delimiters.go_template() == GOLDEN[name]["template"]
    assert "{{ range $i, $tool := $.Tools }}" in GOLDEN[name]["template"]


@pytest.mark.parametrize(("name", "mark"), [("qwen2_5", "<tool_call>"), ("qwen3", "<tool_call>"), ("llama3_2", "")])
def test_ollama_template_has_the_text_by_which_ollama_recognizes_calls(name, mark):
    assert GOLDEN[name]["mark"] == mark, "without a mark, Ollama takes every JSON object for a call"


@pytest.mark.parametrize(("name", "chat"), CASES)
def test_ollama_template_writes_the_prompt_of_the_chat_template_up_to_spaces_in_json(name, chat):
    template = template_of(name)
    # A row needs an answer at the end; the prompt ends before it.
    row = {"messages": [*CHATS[chat]["messages"], {"role": "assistant", "content": "x"}]}
    conversation = parse_row({**row, "tools": CHATS[chat]["tools"]} if CHATS[chat]["tools"] else row)
    expected = decode(template.encode_prompt(conversation.until(len(conversation.messages) - 1)))
    assert compact_json(GOLDEN[name]["texts"][chat]) == compact_json(expected)


@pytest.mark.parametrize("name", ["gemma3", "qwen3_5"])
def test_chat_delimiters_of_a_template_without_calls_in_json_have_no_tools(name):
    delimiters = chat_delimiters(byte_tokenizer(), template_of(name))
    assert delimiters is None or delimiters.tools is None


@pytest.mark.parametrize(
    ("tools", "warns"),
    [("{% for each in tools or [] %}<tool>{{ each.function.name }}</tool>{% endfor %}", True), ("", False)],
)
def test_chat_delimiters_of_a_template_with_tools_in_another_form_warn(tools, warns, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(get_logger(), "propagate", True)
    path = tmp_path / "chat.jinja"
    turns = "{% for each in messages %}<|{{ each.role }}|>{{ each.content }}{% endfor %}"
    path.write_text(f"{tools}{turns}{{% if add_generation_prompt %}}<|assistant|>{{% endif %}}")
    delimiters = chat_delimiters(byte_tokenizer(), load_template(str(path), byte_tokenizer(), TemplateOptions()))
    assert delimiters is not None and delimiters.tools is None
    assert ("does not write tools and calls as JSON" in caplog.text) == warns
