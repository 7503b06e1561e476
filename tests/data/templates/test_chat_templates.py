"""Chat templates of other models: which tokens of a conversation are learned, and after which prompt.

The expected texts are written by hand in `chat_rows.py`. Where a template marks the assistant's text, the mask of
`transformers` is the reference.
"""

from __future__ import annotations

import datetime
import functools
import itertools

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from paddlenlp_ext.data.rows.errors import InvalidRowError
from paddlenlp_ext.data.rows.row_formats import parse_row
from paddlenlp_ext.data.templates.base import TemplateOptions
from paddlenlp_ext.data.templates.load import load_template
from tests.data.chat_rows import (
    ROWS,
    TEMPLATES,
    answer_text,
    expected,
    written_answers,
)
from tests.golden import DATA

SPECIAL = (
    *("<unk>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<|start|>", "<|end|>", "<|return|>", "<|call|>", "<|message|>", "<|channel|>"),
)
MARKED = ("qwen2_5_marked", "qwen3_marked", "qwen3_5_marked", "gemma3_marked", "gptoss_marked", "smollm3")


@functools.cache
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are bytes and special tokens, so that every text has one encoding."""
    words = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    core = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<bos>", eos_token="<eos>", unk_token="<unk>")
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL[3:])})
    return tokenizer


@functools.cache
def template_of(name: str, **options):
    return load_template(str(DATA / "chat_templates" / f"{name}.jinja"), byte_tokenizer(), TemplateOptions(**options))


def decode(tokens: list[int]) -> str:
    return byte_tokenizer().decode(tokens)


def target_text(tokens: list[int], mask: list[bool]) -> str:
    return decode([token for token, is_target in zip(tokens, mask, strict=True) if is_target])


def spans(mask: list[bool]) -> list[tuple[int, int]]:
    """Return (start, end) of each run of targets."""
    runs = [(flag, len(list(run))) for flag, run in itertools.groupby(mask)]
    ends = list(itertools.accumulate(length for _, length in runs))
    return [(end - length, end) for (flag, length), end in zip(runs, ends, strict=True) if flag]


def rendered(template, conversation, for_generation: bool = False) -> str:
    return template.renderer.text_of(conversation, conversation.template_kwargs, for_generation)


def test_chat_rows_are_forty_or_more():
    assert len(ROWS) >= 40


@pytest.mark.parametrize("name", TEMPLATES)
def test_encode_learns_the_answers_written_by_hand(name):
    template = template_of(name)
    for row, value in ROWS.items():
        numbers = expected(name, row)
        if numbers is None:
            with pytest.raises(InvalidRowError):
                template.encode(parse_row(value))
            continue
        answers = [answer_text(name, *answer) for answer in written_answers(row)]
        learned = [target_text(*example) for example in template.encode(parse_row(value))]
        assert learned == ["".join(answers[number - 1] for number in part) for part in numbers], row


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name not in MARKED])
def test_encode_learns_every_answer_after_the_prompt_of_a_server(name):
    """Compare the text before each answer with the template's prompt, to which an empty thought may be added."""
    template = template_of(name)
    for row, value in ROWS.items():
        numbers = expected(name, row)
        conversation = parse_row(value)
        positions = [index for index, message in enumerate(conversation.messages) if message.is_answer]
        examples = [] if numbers is None else template.encode(conversation)
        for part, (tokens, mask) in zip(numbers or (), examples, strict=True):
            for number, (start, _) in zip(part, spans(mask), strict=True):
                prompt = rendered(template, conversation.until(positions[number - 1]), for_generation=True)
                added = decode(tokens[:start]).removeprefix(prompt)
                assert added in ("", "<think>\n\n</think>\n\n", "\n</think>\n\n"), (row, number)
                assert decode(template.encode_prompt(conversation.until(positions[number - 1]))) == prompt


@pytest.mark.parametrize("name", MARKED)
def test_encode_of_a_marked_template_has_the_mask_of_transformers(name):
    template = template_of(name, learn_empty_think=True)
    count = 0
    for row, value in ROWS.items():
        conversation = parse_row(value)
        try:
            examples = template.render(conversation)
        except InvalidRowError:
            continue
        for example, (tokens, mask) in zip(examples, template.encode(conversation), strict=True):
            reference = transformers_mask(template, example.conversation)
            found = [decode(tokens[start:end]) for start, end in spans(mask)]
            assert found == [reference[turn.number] for turn in example.turns if turn.is_target], row
            if name != "gptoss_marked":  # which drops the thoughts of calls that are in the prompt
                assert rendered(template, example.conversation).startswith(decode(tokens)), row
            count += 1
    assert count >= 15


def transformers_mask(template, conversation) -> list[str]:
    """Return the spans of the assistant's tokens that `transformers` reports for a conversation."""
    encoded = byte_tokenizer().apply_chat_template(
        template.renderer.dictionaries(conversation),
        tools=list(conversation.tools) or None,
        chat_template=template.text,
        return_assistant_tokens_mask=True,
        return_dict=True,
        **conversation.template_kwargs,
    )
    ids, mask = encoded["input_ids"], [bool(flag) for flag in encoded["assistant_masks"]]
    return [decode(ids[start:end]) for start, end in spans(mask)]


@pytest.mark.parametrize("kwargs", [{}, {"strftime_now": "2026-11-02"}])
def test_template_that_reads_the_clock_writes_a_fixed_date(kwargs, tmp_path):
    formats = ("%Y-%m-%d", "%d %B %Y", "%A, %b %-d")
    path = tmp_path / "dated.jinja"
    text = "\n{% for m in messages %}<|im_start|>{{ m.role }}{{ m.content }}<|im_end|>{% endfor %}"
    path.write_text("\n".join(f"{{{{ strftime_now('{each}') }}}}" for each in formats) + text)
    template = load_template(str(path), byte_tokenizer(), TemplateOptions(kwargs))
    day = datetime.date.fromisoformat(kwargs.get("strftime_now", "2024-07-26"))
    (example,) = template.render(parse_row({"src": "Q", "tgt": "A"}))
    assert example.turns[0].head.splitlines()[:3] == [day.strftime(each) for each in formats]
