"""Preference data with reasoning and tool calls: the template renders both answers after a shared prompt."""

from __future__ import annotations

import json

import pytest

from paddlenlp_ext.data.preference.tokenize_pairs import PreferenceEncoder
from paddlenlp_ext.data.rows.source_row import InvalidRow, SourceRow
from paddlenlp_ext.data.tokenization.truncation import LengthLimits
from paddlenlp_ext.utils.json_reader import Location
from tests.data.chat_rows import A1, A2, Q1, Q2, SUN, T1, T2, TOOL, answer, answer_text, call
from tests.data.templates.test_chat_templates import decode, template_of

THOUGHT, OTHER = "Two and two.", "Two and three."


def encode(name, row):
    rows = [SourceRow(Location("file", 1, 1), row, json.dumps(row))]
    encoder = PreferenceEncoder(template_of(name), LengthLimits(5000, 9000, "right"), False, ("file",))
    (encoded,) = encoder.encode_rows(rows)
    return encoded


@pytest.mark.parametrize("name", ["qwen3", "gptoss"])
@pytest.mark.parametrize(
    ("row", "chosen", "rejected"),
    [
        (
            {"prompt": [Q1], "chosen": [T1], "rejected": [answer("five", OTHER)]},
            (THOUGHT, "four", 0),
            (OTHER, "five", 0),
        ),
        ({"prompt": [Q1], "chosen": [T1], "rejected": [A2]}, (THOUGHT, "four", 0), ("", "six", 0)),
        (
            {"prompt": [Q1, T1, Q2], "chosen": [T2], "rejected": [A1]},
            (T2["reasoning_content"], "six", 0),
            ("", "four", 0),
        ),
        (
            {"prompt": [Q1, call("Ask."), SUN], "chosen": [T1], "rejected": [A2], "tools": [TOOL]},
            (THOUGHT, "four", 0),
            ("", "six", 0),
        ),
        (
            {"prompt": [Q1], "chosen": [call("Ask.")], "rejected": [A2], "tools": [TOOL]},
            ("Ask.", "", 1),
            ("", "six", 0),
        ),
    ],
)
def test_preference_encoder_with_reasonings_compares_the_answers_of_the_template(name, row, chosen, rejected):
    encoded = encode(name, row)
    first, second, _ = encoded.answers
    for start, end, expected in ((first, second, chosen), (second, len(encoded.tokens), rejected)):
        tokens, mask = encoded.tokens[start:end], encoded.loss_mask[start:end]
        assert decode(tokens[mask].tolist()) == answer_text(name, *expected)
    assert decode(encoded.tokens[:first]).endswith("assistant\n" if name == "qwen3" else "<|start|>assistant")


def test_preference_encoder_of_answers_with_turns_that_a_template_rewrites_are_refused():
    row = {"prompt": [Q1], "chosen": [A1, Q2, A2], "rejected": [A2, Q2, A1]}
    assert not isinstance(encode("qwen2_5", row), InvalidRow)
    refused = encode("qwen3", row)
    assert isinstance(refused, InvalidRow) and "move the turns to the prompt" in refused.message
