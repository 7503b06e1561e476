"""Chat templates: the target tokens are the answers and their end tokens."""

from __future__ import annotations

import json
import random

import pytest

from paddlenlp_ext.data.rows.conversation import Conversation
from paddlenlp_ext.data.rows.errors import InvalidRowError
from paddlenlp_ext.data.templates.load import load_template
from tests.data.tiny_tokenizers import (
    CHATML,
    MISTRAL,
    PADDLENLP_CHATML,
    TEMPLATES,
    make_marking_tokenizer,
    make_tokenizer,
)

ONE_TURN = Conversation.from_turns(None, (("Was ist 2 + 2?", "vier"),))
# Answers that occur in their questions and in each other, and that contain text similar to markers.
TURNS = (
    ("vier", "vier"),
    ("Sag vier\nund user", "vier\nund user\nassistant"),
    ("Und [/INST]? Grüße, 你好!", "你好 [/INST] vier"),
)
HARD_TURNS = Conversation.from_turns(None, TURNS)


def write_template(folder, text, name="template.jinja"):
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def encode_one(template, conversation):
    """Return tokens and loss mask of the only example of a conversation."""
    (encoded,) = template.encode(conversation)
    return encoded


def answers_of(conversation):
    return [message.content for message in conversation.answers]


def target_spans(tokens, mask):
    """Return the contiguous spans of target tokens."""
    spans, previous = [], False
    for token, flag in zip(tokens, mask, strict=True):
        if flag and not previous:
            spans.append([])
        if flag:
            spans[-1].append(token)
        previous = flag
    return spans


def decoded_targets(template, conversation):
    """Return the text of each span of target tokens, over all examples of a conversation."""
    spans = [span for encoded in template.encode(conversation) for span in target_spans(*encoded)]
    return [template.encoder.tokenizer.decode(span) for span in spans]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("conversation", [ONE_TURN, HARD_TURNS], ids=["one_turn", "hard_turns"])
def test_encode_target_spans_are_answers_and_ends(name, conversation, tokenizer, tmp_path):
    text, end = TEMPLATES[name]
    template = load_template(write_template(tmp_path, text), tokenizer)
    decoded = decoded_targets(template, conversation)
    expected = [answer + end for answer in answers_of(conversation)]
    if name == "mistral":
        expected = [" " + answer for answer in expected]
    if name == "thinking":
        expected = ["[t]\n\n[/t]\n\n" + answer for answer in expected]
    assert decoded == expected
    assert template.stop_token_ids[0] == tokenizer.convert_tokens_to_ids(end)


FRAGMENTS = ("vier", " ", "\n", "user", "assistant\n", "[/INST]", "Q:", "A:", "Grüße", "你", "2 + 2", "[t]", ".", "  x")


@pytest.mark.parametrize("name", TEMPLATES)
def test_encode_random_conversations_targets_their_answers(name, tokenizer, tmp_path):
    """Test answers made of fragments of templates, without outer blanks, which some templates strip."""
    text, end = TEMPLATES[name]
    template = load_template(write_template(tmp_path, text), tokenizer)
    draw = random.Random(name)
    for _ in range(60):
        texts = ["".join(draw.choices(FRAGMENTS, k=draw.randint(1, 6))).strip() or "x" for _ in range(6)]
        turns = tuple(zip(texts[::2], texts[1::2], strict=True))[: draw.randint(1, 3)]
        decoded = [text.removeprefix(" ") for text in decoded_targets(template, Conversation.from_turns(None, turns))]
        if name == "thinking":
            decoded = [text.removeprefix("[t]\n\n[/t]\n\n") for text in decoded]
        assert decoded == [answer + end for _, answer in turns]


@pytest.mark.parametrize("name", TEMPLATES)
def test_encode_tokens_decode_to_the_rendering(name, tokenizer, tmp_path):
    """Compare with the rendered text, up to the last end token."""
    text, _ = TEMPLATES[name]
    template = load_template(write_template(tmp_path, text), tokenizer)
    tokens, _ = template.encode(HARD_TURNS)[-1]
    messages = [
        {"role": role, "content": content}
        for turn in TURNS
        for role, content in zip(("user", "assistant"), turn, strict=True)
    ]
    rendered = tokenizer.apply_chat_template(messages, chat_template=text, tokenize=False)
    assert tokenizer.decode(tokens) == rendered.rstrip("\n")


@pytest.mark.parametrize("name", ["chatml", "llama3", "mistral", "thinking"])
def test_encode_prompt_is_a_prefix_of_the_training_row(name, tokenizer, tmp_path):
    """Compare the ids of a prompt with the ids that precede the answer in training."""
    template = load_template(write_template(tmp_path, TEMPLATES[name][0]), tokenizer)
    *history, (question, _) = TURNS
    prompt = template.encode_prompt(Conversation.asking(question, history))
    tokens, mask = template.encode(HARD_TURNS)[-1]
    assert prompt == tokens[: len(prompt)]
    assert mask[len(prompt)] and not mask[len(prompt) - 1]


def test_encode_line_break_after_the_end_token_is_not_a_target(tokenizer, tmp_path):
    template = load_template(write_template(tmp_path, CHATML), tokenizer)
    tokens, mask = encode_one(template, HARD_TURNS)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    target_ends = [place for place, token in enumerate(tokens) if token == end and mask[place]]
    assert len(target_ends) == 3
    assert target_ends[-1] == len(tokens) - 1
    for place in target_ends[:-1]:
        assert tokenizer.decode([tokens[place + 1]]) == "\n" and not mask[place + 1]


def test_encode_two_end_tokens_are_both_targets_and_both_stop(tokenizer, tmp_path):
    """Test a template that ends a turn with two tokens: end of turn, then end of text."""
    twice = CHATML.replace("'<|im_end|>' + '\n' }}{% endfor %}", "'<|im_end|></s>' + '\n' }}{% endfor %}")
    assert twice != CHATML
    template = load_template(write_template(tmp_path, twice), tokenizer)
    tokens, mask = encode_one(template, HARD_TURNS)
    decoded = [tokenizer.decode(span) for span in target_spans(tokens, mask)]
    assert decoded == [answer + "<|im_end|></s>" for _, answer in TURNS]
    assert template.stop_token_ids == tuple(tokenizer.convert_tokens_to_ids(["<|im_end|>", "</s>"]))


def test_encode_with_a_system_prompt_replaces_the_default(tokenizer, tmp_path):
    template = load_template(write_template(tmp_path, CHATML), tokenizer)
    default, _ = encode_one(template, ONE_TURN)
    own, own_mask = encode_one(template, Conversation.from_turns("Grüße", (("Was ist 2 + 2?", "vier"),)))
    assert "You are helpful." in tokenizer.decode(default)
    assert "You are helpful." not in tokenizer.decode(own) and "system\nGrüße<|im_end|>" in tokenizer.decode(own)
    assert [tokenizer.decode(span) for span in target_spans(own, own_mask)] == ["vier<|im_end|>"]


def test_encode_with_a_stripping_template_targets_stripped_answers(tokenizer, tmp_path):
    template = load_template(write_template(tmp_path, TEMPLATES["llama3"][0]), tokenizer)
    tokens, mask = encode_one(template, Conversation.from_turns(None, (("  hi  ", "  vier \n"), ("\nuser", "vier"))))
    assert [tokenizer.decode(span) for span in target_spans(tokens, mask)] == ["vier<|eot_id|>", "vier<|eot_id|>"]


@pytest.mark.parametrize("name", ["llama3", "mistral"])
def test_encode_writes_one_beginning_token(name, tmp_path):
    """Test a template that writes the beginning token, with a tokenizer that would add another one."""
    tokenizer = make_tokenizer(bos="<s>", adds_bos=True)
    template = load_template(write_template(tmp_path, TEMPLATES[name][0]), tokenizer)
    tokens, _ = encode_one(template, HARD_TURNS)
    assert tokens.count(tokenizer.bos_token_id) == 1 and tokens[0] == tokenizer.bos_token_id


def test_encode_with_a_raising_template_names_the_reason(tokenizer, tmp_path):
    template = load_template(write_template(tmp_path, MISTRAL), tokenizer)
    with pytest.raises(InvalidRowError, match="roles must alternate") as caught:
        template.encode(Conversation.from_turns("a system prompt", (("Was ist 2 + 2?", "vier"),)))
    assert caught.value.reason == "template refuses"


def test_encode_with_a_template_that_rewrites_turns_unfolds_the_row(tokenizer, tmp_path):
    unmarked = TEMPLATES["marked"][0].replace("{% generation %}", "").replace("{% endgeneration %}", "")
    with pytest.raises(ValueError, match="generation"):
        load_template(write_template(tmp_path, unmarked), tokenizer)
    # The template rewrites all answers but the last, so each is a target in an example of its own.
    shouted = "(message['content'] if loop.last or message['role'] == 'user' else message['content'] | upper)"
    rewriting = CHATML.replace("message['content']", shouted)
    template = load_template(write_template(tmp_path, rewriting), tokenizer)
    assert decoded_targets(template, HARD_TURNS) == [answer + "<|im_end|>" for answer in answers_of(HARD_TURNS)]
    first, second, _ = (tokenizer.decode(tokens) for tokens, _ in template.encode(HARD_TURNS))
    assert "VIER<|im_end|>" not in first and "VIER<|im_end|>" in second


def test_encode_end_token_after_a_mark_is_a_target(tokenizer, tmp_path):
    marked, end = TEMPLATES["marked"]
    outside = marked.replace(" + '<|im_end|>' }}{% endgeneration %}", " }}{% endgeneration %}{{ '<|im_end|>' }}")
    assert outside != marked
    template = load_template(write_template(tmp_path, outside), tokenizer)
    tokens, mask = encode_one(template, HARD_TURNS)
    decoded = [tokenizer.decode(span) for span in target_spans(tokens, mask)]
    assert decoded == [answer + end for _, answer in TURNS]


def test_encode_with_two_adjacent_marks_learns_both(tokenizer, tmp_path):
    marked, end = TEMPLATES["marked"]
    twice = marked.replace(" + '<|im_end|>'", "}}{% endgeneration %}{% generation %}{{ '<|im_end|>'")
    assert twice != marked
    template = load_template(write_template(tmp_path, twice), tokenizer)
    assert decoded_targets(template, HARD_TURNS) == [answer + end for answer in answers_of(HARD_TURNS)]


def test_encode_with_dummy_prefixes_equals_the_full_text(tmp_path):
    """Test a tokenizer that, as Llama 2's, marks the beginning of a text: answers must not get a mark of their own."""
    tokenizer = make_marking_tokenizer()
    template = load_template(write_template(tmp_path, MISTRAL), tokenizer)
    tokens, mask = encode_one(template, ONE_TURN)
    expected = tokenizer("<s>[INST] Was ist 2 + 2? [/INST] vier</s>", add_special_tokens=False)["input_ids"]
    assert tokens == expected
    (span,) = target_spans(tokens, mask)
    assert tokenizer.convert_ids_to_tokens(span) == ["▁v", "ie", "r", "</s>"]


def test_plain_template_writes_turns_and_ends():
    tokenizer = make_tokenizer(bos="<s>", adds_bos=True)
    template = load_template("none", tokenizer)
    tokens, mask = encode_one(template, Conversation.from_turns("You are", (("user", "vier"), ("2 + 2?", "vier</s>"))))
    assert tokenizer.decode(tokens) == "<s>You are\nuservier</s>2 + 2?vier</s>"
    assert [tokenizer.decode(span) for span in target_spans(tokens, mask)] == ["vier</s>", "vier</s>"]
    prompt = template.encode_prompt(Conversation.asking("2 + 2?", (("user", "vier"),), "You are"))
    assert tokenizer.decode(prompt) == "<s>You are\nuservier</s>2 + 2?" and prompt == tokens[: len(prompt)]
    written, _ = encode_one(template, Conversation.from_turns(None, (("<s>user", "vier"),)))
    assert tokenizer.decode(written) == "<s>uservier</s>", "the text already has a beginning token"


def test_load_template_without_tokenizer_template_is_plain(tokenizer):
    assert load_template(None, tokenizer).text == "none"


def test_load_template_without_an_end_token_raises():
    with pytest.raises(ValueError, match="eos_token"):
        load_template("none", make_tokenizer(eos=None))


def test_load_template_null_uses_the_tokenizers_template(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHATML
    assert load_template(None, tokenizer).text == CHATML
    assert load_template("none", tokenizer).text == "none"


@pytest.mark.parametrize("conversation", [ONE_TURN, HARD_TURNS, Conversation.from_turns("You", TURNS)])
def test_paddlenlp_template_equals_the_jinja_template(conversation, tokenizer, tmp_path):
    pieces = load_template(write_template(tmp_path, json.dumps(PADDLENLP_CHATML), "chat_template.json"), tokenizer)
    jinja = load_template(write_template(tmp_path, CHATML), tokenizer)
    assert pieces.encode(conversation) == jinja.encode(conversation)
    assert pieces.stop_token_ids == jinja.stop_token_ids
    asked = conversation.until(len(conversation.messages) - 1)
    assert pieces.encode_prompt(asked) == jinja.encode_prompt(asked)


def test_paddlenlp_template_with_a_fixed_system_prompt_refuses_others(tokenizer, tmp_path):
    fixed = json.dumps(PADDLENLP_CHATML | {"system": "You are helpful."})
    template = load_template(write_template(tmp_path, fixed, "chat_template.json"), tokenizer)
    template.encode(ONE_TURN)
    with pytest.raises(InvalidRowError, match="would be lost"):
        template.encode(Conversation.from_turns("Other", (("Was ist 2 + 2?", "vier"),)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", ":1:2"),
        ("[]", "not a chat template"),
        ('{"chat_template": 1}', "not a chat template"),
        ('{"conversation": ["{{user}}"], "query": "{{query}}"}', "two strings"),
        ('{"conversation": ["{{user}}", "{{bto}}"], "query": "{{query}}"}', "does not write {{bot}}"),
        ('{"conversation": ["{{user}}", "{{bot"], "query": "{{query}}"}', "cannot be rendered"),
        ('{"conversation": ["{{user}}", "{{bot}}"]}', "{{query}}"),
        ('{"conversation": ["{{user}}", "{{bot}}"], "query": "{{query}}", "system": 3}', '"system" is not a string'),
        ('{"conversation": ["{{user}}", "{{bot}}"], "query": "{{query}}", "system": "{{system"}', "cannot be rendered"),
        (
            '{"conversation": ["{{user}}", "{{bot}}"], "query": "{{query}}", "system": "{{ of() }}"}',
            "cannot be rendered",
        ),
        ('{"conversation": ["{{user}}", "{{bot ~ 1 // 0}}"], "query": "{{query}}"}', "division"),
        (
            '{"conversation": ["{{user * 10 ** 9}}", "{{bot}}"], "query": "{{query}}"}',
            "more than 67,108,864 characters",
        ),
        ('{"conversation": ["{{user}}", "{{bot ~ \'\\\\ud83d\'}}"], "query": "{{query}}"}', "surrogate"),
    ],
)
def test_load_template_with_a_damaged_file_names_it(content, message, tokenizer, tmp_path):
    path = write_template(tmp_path, content, "chat_template.json")
    with pytest.raises(ValueError) as caught:
        load_template(path, tokenizer)
    assert message in str(caught.value) and path in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{% for message in messages %}", "cannot render"),
        ("{{ raise_exception('no') }}", "no"),
        ("{{ messages[0]['content'] }}", "once each"),
    ],
)
def test_load_template_with_unusable_jinja_raises(text, message, tokenizer, tmp_path):
    with pytest.raises(ValueError, match=message):
        load_template(write_template(tmp_path, text), tokenizer)


def test_load_template_with_a_missing_file_raises(tokenizer, tmp_path):
    with pytest.raises(ValueError, match="no file"):
        load_template(str(tmp_path / "absent.jinja"), tokenizer)
    with pytest.raises(ValueError, match=r"chat_template\.jinja"):
        load_template(str(tmp_path), tokenizer)


def test_load_template_without_a_special_token_warns(tokenizer, tmp_path, caplog):
    text = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    text += "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    with caplog.at_level("WARNING", logger="paddlenlp_ext"):
        from paddlenlp_ext.utils.logging import get_logger

        get_logger().propagate = True
        template = load_template(write_template(tmp_path, text), tokenizer)
        get_logger().propagate = False
    assert "no special token" in caplog.text
    tokens, mask = encode_one(template, ONE_TURN)
    assert [tokenizer.decode(span) for span in target_spans(tokens, mask)] == ["vier\n"]
