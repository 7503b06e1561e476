"""Prompts of the predictor: template, variables and tools of the run and of the rows."""

from __future__ import annotations

import json

import pytest

from paddlenlp_ext.cli.predict import choose_template, encode_prompts
from paddlenlp_ext.cli.predict_arguments import parse_arguments
from paddlenlp_ext.data.prediction_prompts import read_prompts
from tests.data.chat_rows import Q1, SUN, call, row
from tests.data.templates.test_chat_templates import byte_tokenizer, decode
from tests.golden import DATA

QWEN3 = str(DATA / "chat_templates" / "qwen3.jinja")
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"


@pytest.fixture
def prompts_of(tmp_path):
    """Return a function from rows and arguments to the prompts of the predictor, after a run with thinking off."""
    settings = {"chat_template": QWEN3, "chat_template_kwargs": {"enable_thinking": False}}
    (tmp_path / "run_config.json").write_text(json.dumps(settings))

    def prompts_of(*rows, arguments=()):
        data = tmp_path / "data.json"
        data.write_text("".join(json.dumps(value) + "\n" for value in rows))
        parsed = parse_arguments(["--model_name_or_path", "m", "--data_file", str(data), *arguments])
        template = choose_template(parsed, [str(tmp_path)], byte_tokenizer())
        return [decode(ids) for ids in encode_prompts(template, read_prompts(data), 4000)]

    return prompts_of


def test_prompts_have_the_template_and_variables_of_the_run(prompts_of):
    (text,) = prompts_of({"src": "What?"})
    assert text == f"<|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\n{EMPTY_THOUGHT}"


def test_prompts_have_variables_of_the_command_line_and_of_rows(prompts_of):
    rows = ({"src": "What?"}, {"src": "What?", "enable_thinking": False})
    first, second = prompts_of(*rows, arguments=["--chat_template_kwargs", '{"enable_thinking": true}'])
    assert first.endswith("<|im_start|>assistant\n") and second.endswith(EMPTY_THOUGHT)


def test_prompts_have_tools_calls_and_results_of_rows(prompts_of):
    (text,) = prompts_of(row(Q1, call("Ask."), SUN, tools=True))
    assert '"name": "weather", "description"' in text and "<think>\nAsk.\n</think>" in text
    assert text.endswith(f"sunny\n</tool_response><|im_end|>\n<|im_start|>assistant\n{EMPTY_THOUGHT}")


def test_choose_template_of_the_command_line_has_its_own_variables(prompts_of):
    arguments = ["--chat_template", str(DATA / "chat_templates" / "qwen2_5.jinja")]
    (text,) = prompts_of({"src": "What?"}, arguments=arguments)
    with pytest.raises(ValueError, match="data_file: row 2: the chat template has no variable 'enable_thinking'"):
        prompts_of({"src": "What?"}, {"src": "What?", "enable_thinking": True}, arguments=arguments)
    assert text.endswith("What?<|im_end|>\n<|im_start|>assistant\n")
    arguments += ["--chat_template_kwargs", '{"enable_thinking": true}']
    with pytest.raises(ValueError, match="chat_template_kwargs: the chat template has no variable 'enable_thinking'"):
        prompts_of({"src": "What?"}, arguments=arguments)
