"""Conversations with thoughts and tools: options, refusals by name, truncation, statistics, and prompts."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from rich.console import Console

from paddlenlp_ext.data.dataset import load_dataset
from paddlenlp_ext.data.prediction_prompts import encode_truncated_prompt, parse_prompt
from paddlenlp_ext.data.preview import preview_rows
from paddlenlp_ext.data.rows.errors import DataError, InvalidRowError
from paddlenlp_ext.data.rows.row_formats import parse_row
from paddlenlp_ext.data.templates.base import TemplateOptions
from paddlenlp_ext.data.templates.load import load_template
from tests.data.chat_rows import A1, A2, Q1, Q2, ROWS, SUN, T1, TOOL, answer, call, row, user
from tests.data.templates.test_chat_templates import MARKED, byte_tokenizer, decode, target_text, template_of
from tests.data.tiny_tokenizers import CHATML
from tests.golden import DATA

TEMPLATE_FILES = DATA / "chat_templates"


@pytest.mark.parametrize(
    ("name", "learned"),
    [
        ("qwen2_5", "four<|im_end|>"),
        ("qwen3", "four<|im_end|>"),
        ("qwen3_5", "four<|im_end|>"),
        ("gptoss", "<|channel|>final<|message|>four<|return|>"),
        ("smollm3", "<|im_start|>assistant\nfour<|im_end|>\n"),
        ("qwen3_marked", "four<|im_end|>\n"),
        ("qwen3_5_marked", "four<|im_end|>\n"),
    ],
)
def test_encode_with_mask_reasoning_leaves_only_the_thought_unlearned(name, learned):
    value = ROWS["inline" if name == "qwen2_5" else "thought"]
    ((tokens, mask),) = template_of(name, mask_reasoning=True).encode(parse_row(value))
    ((plain, full_mask),) = template_of(name).encode(parse_row(value))
    assert tokens == plain and target_text(tokens, mask) == learned
    hidden = np.array(full_mask) & ~np.array(mask)
    assert "Two and two." in decode(np.array(tokens)[hidden].tolist())


def test_encode_with_mask_reasoning_leaves_the_thought_of_a_call_unlearned():
    value = parse_row(ROWS["call_thoughts"])
    ((tokens, mask),) = template_of("qwen3", mask_reasoning=True).encode(value)
    called = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>'
    assert target_text(tokens, mask) == f"{called}four<|im_end|>"


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5", "qwen3_marked", "qwen3_5_marked"])
def test_encode_learns_an_empty_thought_only_if_asked(name):
    value = parse_row(ROWS["one"])
    ((tokens, mask),) = template_of(name).encode(value)
    ((asked_tokens, asked_mask),) = template_of(name, learn_empty_think=True).encode(value)
    assert tokens == asked_tokens
    assert target_text(tokens, mask).startswith("four<|im_end|>")
    assert "</think>\n\nfour<|im_end|>" in target_text(asked_tokens, asked_mask)


def test_encode_after_an_empty_thought_has_the_prompt_without_thinking():
    """Check that rows without thoughts teach the answer to the prompt that `enable_thinking: false` writes."""
    for name in ("qwen3", "qwen3_5"):
        ((tokens, mask),) = template_of(name).encode(parse_row(ROWS["one"]))
        prompt = template_of(name).encode_prompt(parse_row(ROWS["no_thinking"]).until(1))
        assert tokens[: len(prompt)] == prompt and mask.index(True) == len(prompt)


def test_encode_of_a_thought_after_a_prompt_without_thinking_learns_what_differs():
    ((tokens, mask),) = template_of("qwen3").encode(parse_row(row(Q1, T1, enable_thinking=False)))
    assert decode(tokens[: mask.index(True)]).endswith("<|im_start|>assistant\n<think>\n")
    assert target_text(tokens, mask) == "Two and two.\n</think>\n\nfour<|im_end|>"


BRACKETS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}[t]\n{{ m.reasoning_content }}\n"
    "[/t]\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_encode_with_merges_has_the_prompt_of_generation_before_every_answer(tokenizer):
    """Test a tokenizer that would merge the end of the prompt with the answer if they were encoded as one text."""
    template = load_template(str(TEMPLATE_FILES / "qwen3.jinja"), tokenizer)
    for name in ("no_thinking_two", "thoughts_two", "call_thoughts"):
        conversation = parse_row(ROWS[name])
        position = len(conversation.messages) - 1
        tokens, mask = template.encode(conversation)[-1]
        prompt = tokenizer.decode(template.encode_prompt(conversation.until(position)))
        before = [end for end in range(1, len(tokens)) if mask[end] and not mask[end - 1]][-1]
        assert tokenizer.decode(tokens[:before]) == prompt
        if name != "call_thoughts":  # whose first answer is tokenized as a target, not as part of the prompt
            assert tokens[:before] == template.encode_prompt(conversation.until(position))


@pytest.fixture
def load_text(tmp_path):
    """Return a function that loads the source of a template."""

    def load_text(text, **options):
        (tmp_path / "template.jinja").write_text(text)
        return load_template(str(tmp_path / "template.jinja"), byte_tokenizer(), TemplateOptions(**options))

    return load_text


def test_encode_with_reasonings_in_other_brackets_finds_them(load_text):
    """Test a template that writes a thought before every answer, empty or not, and not in `<think>` tags."""
    for options, value, learned in (
        ({}, row(Q1, T1), "[t]\nTwo and two.\n[/t]\n\nfour<|im_end|>"),
        ({"mask_reasoning": True}, row(Q1, T1), "four<|im_end|>"),
        ({}, row(Q1, A1), "four<|im_end|>"),
        ({"learn_empty_think": True}, row(Q1, A1), "[t]\n\n[/t]\n\nfour<|im_end|>"),
    ):
        ((tokens, mask),) = load_text(BRACKETS, **options).encode(parse_row(value))
        assert target_text(tokens, mask) == learned


def test_encode_with_a_template_that_drops_parts_names_them(load_text):
    without_system = CHATML.replace(
        "{{ '<|im_start|>'", "{% if message['role'] != 'system' %}{{ '<|im_start|>'"
    ).replace("+ '\n' }}{% endfor %}", "+ '\n' }}{% endif %}{% endfor %}")
    template = load_text(without_system)
    template.encode(parse_row(ROWS["two"]))
    with pytest.raises(InvalidRowError, match="does not write a system message; remove this content"):
        template.encode(parse_row(ROWS["system_one"]))
    without_thoughts = load_text(
        CHATML.replace("+ message['content'] +", "+ message['content'].split('</think>')[-1] +")
    )
    with pytest.raises(InvalidRowError, match="does not write the reasoning of an answer"):
        without_thoughts.encode(parse_row(ROWS["inline"]))


def test_without_oldest_turn_removes_up_to_the_next_question():
    conversation = parse_row(row({"role": "system", "content": "s"}, Q1, Q1, A1, call(), SUN, A1, Q2, A2))
    shorter = conversation.without_oldest_turn()
    assert [message.content for message in shorter.messages] == ["s", Q2["content"], "six"]
    assert shorter.without_oldest_turn() is None


REFUSED = [
    ("qwen2_5", row(Q1, T1), "does not write reasoning", ("messages", 1)),
    ("qwen2_5", row(Q1, A1, enable_thinking=True), "has no variable 'enable_thinking'", ()),
    ("qwen3", row(Q1, A1, chat_template_kwargs={"messages": []}), "has no variable 'messages'", ()),
    (
        "qwen3",
        row(Q1, answer("<think>\nOne.\n</think>\n\nfour", "Two.")),
        "different reasoning in a field",
        ("messages", 1),
    ),
    ("llama3_2", ROWS["call_content"], "does not write the content of an answer", ("messages", 1)),
    ("llama3_2", ROWS["two_calls"], "only supports single tool-calls", ()),
    ("gptoss", ROWS["two_calls"], "does not write the call of weather", ("messages", 1)),
    ("gptoss", ROWS["system_later"], "does not write a system message after another", ("messages", 2)),
    ("gemma3", ROWS["tools_unused"], "does not write the tool weather", ("tools",)),
    ("gemma3", row(Q1, call(text="Let me see.")), "does not write the call of weather", ("messages", 1)),
    ("smollm3", ROWS["tools_unused"], "does not write the tool weather", ("tools",)),
    (
        "smollm3",
        row(Q1, T1, enable_thinking=False),
        "an empty reasoning block before the row's reasoning",
        ("messages", 1),
    ),
    ("qwen3_5", ROWS["system_later"], "System message must be at the beginning", ()),
]


@pytest.mark.parametrize(("name", "value", "message", "path"), REFUSED, ids=lambda value: str(value)[:30])
def test_encode_of_what_the_template_cannot_write_is_refused_by_name(name, value, message, path):
    with pytest.raises(InvalidRowError, match=message) as caught:
        template_of(name).encode(parse_row(value))
    assert (caught.value.path, caught.value.reason) == (path, "template refuses")


def test_encode_of_a_greeting_learns_it():
    value = parse_row(row(answer("Hello!"), Q1, A1))
    ((tokens, mask),) = template_of("llama3_2").encode(value)
    assert target_text(tokens, mask) == "Hello!<|eot_id|>four<|eot_id|>"


def test_load_template_with_unknown_variables_raises():
    path = str(TEMPLATE_FILES / "qwen3.jinja")
    with pytest.raises(ValueError, match="chat_template_kwargs: the chat template has no variable 'enable_thinkin'"):
        load_template(path, byte_tokenizer(), TemplateOptions({"enable_thinkin": True}))
    with pytest.raises(ValueError, match="chat_template_kwargs: only Jinja templates have variables"):
        load_template("none", byte_tokenizer(), TemplateOptions({"enable_thinking": True}))
    with pytest.raises(ValueError, match="mask_reasoning: only Jinja templates write reasoning"):
        load_template("none", byte_tokenizer(), TemplateOptions(mask_reasoning=True))


def test_render_prefers_variables_of_the_row_to_those_of_the_run():
    run = template_of("smollm3", kwargs=Frozen(enable_thinking=False))
    assert "/no_think" in decode(run.encode(parse_row(ROWS["one"]))[0][0])
    assert "/no_think" not in decode(run.encode(parse_row(row(Q1, A1, enable_thinking=True)))[0][0])


class Frozen(dict):
    """Dict that can be an argument of a cached function."""

    def __hash__(self) -> int:
        return hash(tuple(self.items()))


@pytest.mark.parametrize("name", ["qwen3", "gptoss", *MARKED[:1]])
def test_stop_token_ids_end_answers_and_calls(name):
    stops = byte_tokenizer().convert_ids_to_tokens(template_of(name).stop_token_ids)
    assert stops == {"gptoss": ["<|return|>", "<|call|>", "<eos>"]}.get(name, ["<|im_end|>", "<eos>"])


@pytest.fixture
def load(options, tmp_path):
    """Return a function that loads rows with a golden template."""

    def load(*rows, name="qwen3", **changed):
        folder = tmp_path / "set"
        folder.mkdir(exist_ok=True)
        (folder / "train.json").write_text("".join(json.dumps(value) + "\n" for value in rows), encoding="utf-8")
        limits = {"src_length": 5000, "max_length": 9000}
        config = options(folder, chat_template=str(TEMPLATE_FILES / f"{name}.jinja"), **(limits | changed))
        return load_dataset(config, "train", byte_tokenizer())

    return load


def targets(dataset) -> list[str]:
    return [target_text(example.tokens.tolist(), example.loss_mask.tolist()) for example in dataset]


def test_load_dataset_counts_unfolded_rows_thoughts_and_calls(load):
    dataset = load(ROWS["thoughts_two"], ROWS["one"], ROWS["call_thoughts"])
    stats = dataset.stats
    assert (stats.num_read, stats.num_untruncated, len(dataset)) == (3, 3, 4)
    assert (stats.num_unfolded, stats.num_unfolded_examples) == (1, 2)
    assert (stats.num_thoughts, stats.num_tool_calls, stats.num_empty_thoughts) == (4, 1, 1)
    assert [dataset.source(index)[1] for index in range(4)] == [1, 1, 2, 3]
    table = stats.table()
    assert "examples of unfolded rows" in table and "target tool calls" in table
    assert load(ROWS["thoughts_two"], ROWS["one"], ROWS["call_thoughts"]).stats == stats, "from the cache"


def test_prompts_of_unfolded_rows_ask_each_question(load):
    dataset = load(ROWS["thoughts_two"], ROWS["call"], ROWS["one"])
    found = [(decode(ids)[-60:], answer, question) for ids, answer, question in dataset.prompts()]
    assert [answer for _, answer, _ in found] == [
        "<think>\nTwo and two.\n</think>\n\nfour",
        "<think>\nThree and three.\n</think>\n\nsix",
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>',
        "four",
        "four",
    ]
    assert [question for _, _, question in found] == [Q1["content"], Q2["content"]] + [Q1["content"]] * 3
    assert found[0][0].endswith("<|im_start|>assistant\n") and found[4][0].endswith("</think>\n\n")


def test_prompts_of_a_marked_header_end_with_it(load):
    ((ids, reference, _),) = load(ROWS["one"], name="smollm3").prompts()
    assert decode(ids).endswith("<|im_start|>assistant\n") and reference == "four"


def test_prompts_with_mask_reasoning_leave_the_thought_to_the_model(load):
    dataset = load(ROWS["thought"], mask_reasoning=True)
    assert (dataset.stats.num_thoughts, dataset.stats.num_empty_thoughts) == (1, 0)
    ((ids, reference, _),) = dataset.prompts()
    assert decode(ids).endswith("<|im_start|>assistant\n")
    assert reference == "<think>\nTwo and two.\n</think>\n\nfour"


def test_preview_rows_shows_unfolded_examples_and_masked_thoughts(load):
    output = io.StringIO()
    dataset = load(ROWS["thoughts_two"], mask_reasoning=True)
    preview_rows(dataset, byte_tokenizer(), 3, Console(file=output, width=200))
    view = output.getvalue()
    assert "train.json:1  " in view and "train.json:1, example 2  " in view
    assert "</think>\n\n⟦four<|im_end|>⟧" in view and "</think>\n\n⟦six<|im_end|>⟧" in view


def test_load_dataset_with_other_options_tokenizes_again(load, tmp_path):
    for changed in ({}, {"mask_reasoning": True}, {"learn_empty_think": True}, {"chat_template_kwargs": {}}):
        load(ROWS["thought"], **changed)
    load(ROWS["thought"], chat_template_kwargs={"enable_thinking": True})
    assert len([path for path in (tmp_path / "cache").iterdir() if path.is_dir()]) == 4


def test_load_dataset_from_the_right_leaves_out_examples_that_do_not_fit(load):
    value = row(Q1, T1, user("y" * 300), A2)
    full = load(value)
    first, second = (len(example.tokens) for example in full)
    dataset = load(value, max_length=first)
    assert targets(dataset) == targets(full)[:1]
    assert (dataset.stats.num_truncated, dataset.stats.num_truncated_tokens) == (1, second)
    dropped = load(value, max_length=first, truncation="drop")
    assert targets(dropped) == targets(full)[:1] and dropped.stats.num_truncated == 1
    with pytest.raises(DataError, match="too long"):
        load(value, max_length=first, truncation="error")


def test_load_dataset_truncates_the_result_of_a_tool(load):
    value = row(Q1, call("Ask."), {**SUN, "content": "xyz" * 1000}, T1, tools=True)
    full, shorter = load(value), load(value, src_length=1000)
    assert targets(shorter) == targets(full)
    text = decode(shorter[0].tokens)
    assert 250 < text.count("x") < 334 and text.count("</tool_response><|im_end|>") == 1
    assert shorter.stats.num_truncated_tokens == len(full[0].tokens) - len(shorter[0].tokens)


def test_load_dataset_from_the_left_keeps_the_messages_of_the_last_question(load):
    value = row(user("y" * 200), A1, Q2, call(), SUN, A2, tools=True)
    name = "qwen2_5"
    full = load(value, name=name)[0]
    (example,) = load(value, name=name, max_length=len(full.tokens) - 100, truncation="left")
    text = decode(example.tokens)
    assert "yyy" not in text and "sunny" in text and "# Tools" in text
    ((_, answer, question),) = load(value, name=name, max_length=len(full.tokens) - 100, truncation="left").prompts()
    assert (answer, question) == ("six", Q2["content"])
    with pytest.raises(DataError, match="the last turn has"):
        load(value, name=name, max_length=100, src_length=5000, truncation="left")


def test_parse_prompt_with_tools_ends_with_the_result():
    given = row(Q1, call(), SUN, tools=True, enable_thinking=False)
    for value in (given, {**given, "messages": [*given["messages"], A1]}):
        prompt = parse_prompt(value)
        assert (prompt.text, prompt.src) == ("sunny", Q1["content"])
        text = decode(template_of("qwen3").encode_prompt(prompt.conversation))
        assert '"name": "weather"' in text and text.endswith(
            "sunny\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        )
        assert prompt.reference == ("four" if value is not given else None)


def test_encode_truncated_prompt_removes_the_oldest_question_with_its_calls():
    prompt = parse_prompt(row(user("y" * 100), call(), SUN, A1, Q2, tools=True))
    template = template_of("qwen3")
    full, _ = encode_truncated_prompt(template, prompt, 10_000)
    ids, was_truncated = encode_truncated_prompt(template, prompt, len(full) - 50)
    text = decode(ids)
    assert was_truncated and "yyy" not in text and "sunny" not in text and Q2["content"] in text and "# Tools" in text


def test_encode_prompt_with_tools_the_template_ignores_is_refused():
    with pytest.raises(InvalidRowError, match="does not write the tool weather"):
        template_of("gemma3").encode_prompt(parse_prompt({"src": "q", "tools": [TOOL]}).conversation)
