"""Truncation: which tokens are removed, from which side, and which parts always remain."""

from __future__ import annotations

import pytest

from paddlenlp_ext.data.rows.conversation import Conversation
from paddlenlp_ext.data.rows.errors import InvalidRowError
from paddlenlp_ext.data.templates.load import load_template
from paddlenlp_ext.data.templates.turns import join_turns
from paddlenlp_ext.data.tokenization.truncation import LengthLimits, split_text, truncate_turns
from tests.data.tiny_tokenizers import CHATML, LLAMA3, make_tokenizer

# The tokenizer encodes every digit as one token.
QUESTION, ANSWER = "0123456789", "9876543210"
ONE_TURN = ((QUESTION, ANSWER),)
THREE_TURNS = (("11111", "22222"), ("33333", "44444"), ("55555", "66666"))
ONE, THREE = Conversation.from_turns(None, ONE_TURN), Conversation.from_turns(None, THREE_TURNS)


def truncate(conversation, template, src_length, max_length, truncation):
    (example,) = template.render(conversation)
    (turns,) = template.encode_turns([example.turns])
    truncated = truncate_turns(example, turns, template, LengthLimits(src_length, max_length, truncation))
    tokens, loss_mask = join_turns(truncated.turns)
    assert len(tokens) <= max_length
    assert truncated.num_truncated_tokens == sum(turn.length for turn in turns) - len(tokens)
    decode = template.encoder.tokenizer.decode
    answers = decode([token for token, flag in zip(tokens, loss_mask, strict=True) if flag])
    return decode(tokens), answers, truncated


def last_number(truncated):
    """Return the number of the last answer in the untruncated row."""
    return truncated.turns[-1].text.number + truncated.num_removed_answers


@pytest.fixture
def plain():
    return load_template("none", make_tokenizer(bos="<s>", adds_bos=True))


@pytest.fixture
def chat(tokenizer, tmp_path):
    path = tmp_path / "chatml.jinja"
    path.write_text(CHATML)
    return load_template(str(path), tokenizer)


def test_truncate_turns_within_the_limits_changes_nothing(plain):
    for truncation in ("right", "left", "drop", "error"):
        text, answers, truncated = truncate(ONE, plain, 11, 22, truncation)
        assert (
            text == f"<s>{QUESTION}{ANSWER}</s>" and answers == f"{ANSWER}</s>" and truncated.num_truncated_tokens == 0
        )


@pytest.mark.parametrize(
    ("truncation", "src_length", "max_length", "expected"),
    [
        ("right", 5, 99, "<s>0123" + ANSWER + "</s>"),
        ("left", 5, 99, "<s>6789" + ANSWER + "</s>"),
        ("right", 11, 21, "<s>" + QUESTION + ANSWER),
        ("right", 11, 15, "<s>" + QUESTION + "9876"),
        ("right", 5, 9, "<s>01239876"),
        ("left", 11, 15, "<s>789" + ANSWER + "</s>"),
        ("left", 5, 14, "<s>89" + ANSWER + "</s>"),
    ],
)
def test_truncate_turns_removes_tokens_on_the_given_side(truncation, src_length, max_length, expected, plain):
    text, _, truncated = truncate(ONE, plain, src_length, max_length, truncation)
    assert text == expected
    assert truncated.num_truncated_tokens == 22 - len(plain.encoder.encode([expected], [False])[0])


@pytest.mark.parametrize("max_length", range(13, 22))
def test_truncate_turns_right_leaves_no_end_token(max_length, plain):
    _, answers, _ = truncate(ONE, plain, 11, max_length, "right")
    assert "</s>" not in answers and ANSWER.startswith(answers) and len(answers) == max_length - 11


def test_truncate_turns_keeps_markers_and_system_prompt(chat):
    conversation = Conversation.from_turns("0000", ONE_TURN)
    prompt = chat.render(conversation)[0].turns[0].prompt
    length = len(chat.encoder.encode([prompt], [False])[0])
    for truncation, remaining in (("right", "0123"), ("left", "6789")):
        text, answers, _ = truncate(conversation, chat, length - 6, 999, truncation)
        assert text == prompt.replace(QUESTION, remaining) + f"{ANSWER}<|im_end|>" and answers == f"{ANSWER}<|im_end|>"
        with pytest.raises(InvalidRowError, match="the system message and the chat markers") as caught:
            truncate(conversation, chat, length - 10, 999, truncation)
        assert caught.value.reason == "no room"


def test_truncate_turns_right_removes_the_newest_turns(plain):
    # Turns of 6 + 6 tokens (the first prompt has the beginning token, answers the end token), 5 + 6 after that.
    text, answers, truncated = truncate(THREE, plain, 99, 25, "right")
    assert text == "<s>1111122222</s>3333344444</s>" and answers == "22222</s>44444</s>" and last_number(truncated) == 1
    text, answers, truncated = truncate(THREE, plain, 99, 20, "right")
    assert text == "<s>1111122222</s>33333444" and last_number(truncated) == 1


def test_truncate_turns_left_removes_the_oldest_turns(plain, chat):
    text, answers, truncated = truncate(THREE, plain, 99, 25, "left")
    assert text == "<s>3333344444</s>5555566666</s>" and answers == "44444</s>66666</s>" and last_number(truncated) == 2
    text, _, _ = truncate(THREE, plain, 99, 10, "left")
    assert text == "<s>55566666</s>"
    conversation = Conversation.from_turns("0000", THREE_TURNS)
    tokens = chat.encode(conversation)[0][0]
    text, answers, _ = truncate(conversation, chat, 99, len(tokens) - 1, "left")
    assert text.startswith("<|im_start|>system\n0000<|im_end|>\n<|im_start|>user\n33333"), (
        "the system prompt must remain"
    )
    assert answers == "44444<|im_end|>66666<|im_end|>"


def test_truncate_turns_left_with_a_long_answer_raises(plain):
    with pytest.raises(InvalidRowError) as caught:
        truncate(ONE, plain, 99, 12, "left")
    assert caught.value.reason == "no room"


def test_truncate_turns_drop_and_error_name_the_limit(plain):
    for truncation, by_policy in (("drop", True), ("error", False)):
        with pytest.raises(InvalidRowError, match="a prompt of 11 tokens, more than src_length 10") as caught:
            truncate(ONE, plain, 10, 99, truncation)
        assert caught.value.by_policy is by_policy
        with pytest.raises(InvalidRowError, match="22 tokens, more than max_length 21"):
            truncate(ONE, plain, 11, 21, truncation)


def test_truncate_turns_with_a_prompt_that_fills_the_row_raises(plain):
    with pytest.raises(InvalidRowError) as caught:
        truncate(ONE, plain, 99, 11, "right")
    assert caught.value.reason == "no target token"


def test_truncate_turns_with_stripped_words_truncates_them(tokenizer, tmp_path):
    path = tmp_path / "llama3.jinja"
    path.write_text(LLAMA3)
    template = load_template(str(path), tokenizer)
    (turns,) = template.encode_turns([template.render(ONE)[0].turns])
    spaced = Conversation.from_turns(None, ((f"  {QUESTION}\n", ANSWER),))
    text, _, _ = truncate(spaced, template, len(turns[0].prompt) - 6, 999, "right")
    assert "\n\n0123<|eot_id|>" in text and text.endswith(f"{ANSWER}<|eot_id|>")


def test_truncate_turns_with_rewritten_words_raises(tokenizer, tmp_path):
    path = tmp_path / "shouting.jinja"
    path.write_text(CHATML.replace("message['content']", "(message['content'] | replace('a', 'b'))"))
    with pytest.raises(InvalidRowError, match="rewrites"):
        truncate(
            Conversation.from_turns(None, (("aaaaaaaaaaaa", "x"),)),
            load_template(str(path), tokenizer),
            20,
            99,
            "right",
        )


def test_split_text_follows_the_policy():
    assert split_text([1, 2, 3, 4], LengthLimits(9, 3, "right")) == [[1, 2, 3], [3, 4]]
    assert split_text([1, 2, 3], LengthLimits(1, 3, "error")) == [[1, 2, 3]]
    for truncation in ("drop", "error"):
        with pytest.raises(InvalidRowError, match="4 tokens") as caught:
            split_text([1, 2, 3, 4], LengthLimits(9, 3, truncation))
        assert caught.value.by_policy == (truncation == "drop")


def test_length_limits_with_an_unknown_policy_raise():
    with pytest.raises(AssertionError, match="'middle'"):
        LengthLimits(1, 2, "middle")


def test_truncate_left_of_many_turns_renders_the_conversation_a_few_times(plain, monkeypatch):
    counts = []
    real = type(plain).render
    monkeypatch.setattr(
        type(plain), "render", lambda self, given: counts.append(len(given.messages)) or real(self, given)
    )
    turns = [(QUESTION, str(index)) for index in range(500)]
    _, answers, truncated = truncate(Conversation.from_turns(None, turns), plain, 20, 100, "left")
    assert answers.replace(" ", "").endswith("499</s>") and last_number(truncated) == 499
    assert sum(counts) < 4 * 1000
