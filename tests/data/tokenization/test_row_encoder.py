"""Rows that the tokenizer cannot encode are invalid rows; the other rows of their chunk are encoded."""

from __future__ import annotations

import pytest
from tokenizers import Regex, pre_tokenizers

from paddlenlp_ext.data.preference.tokenize_pairs import PreferenceEncoder
from paddlenlp_ext.data.rows.source_row import InvalidRow, SourceRow
from paddlenlp_ext.data.templates.jinja_template import JinjaTemplate
from paddlenlp_ext.data.templates.text_encoder import NOT_ENCODED
from paddlenlp_ext.data.tokenization.row_encoder import RowEncoder
from paddlenlp_ext.data.tokenization.truncation import LengthLimits
from paddlenlp_ext.utils.json_reader import Location
from tests.data.tiny_tokenizers import CHATML, make_tokenizer

TEXTS = ["a", "x" * 40, "b"]
CONVERSATIONS = [{"src": text, "tgt": "c"} for text in TEXTS]
PAIRS = [{"prompt": text, "chosen": "c", "rejected": "d"} for text in TEXTS]


@pytest.mark.parametrize(
    ("encoder_class", "values", "autoregressive"),
    [
        (RowEncoder, CONVERSATIONS, False),
        (RowEncoder, [{"text": text + " c"} for text in TEXTS], True),
        (PreferenceEncoder, PAIRS, False),
    ],
    ids=["conversations", "texts", "pairs"],
)
def test_encode_rows_with_text_at_which_the_regular_expression_gives_up_yields_an_invalid_row(
    encoder_class, values, autoregressive
):
    tokenizer = make_tokenizer(bos="<s>", eos="<|im_end|>")
    gives_up = pre_tokenizers.Split(Regex(r"(x+x+)+y"), "isolated")
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [gives_up, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    encoder = encoder_class(JinjaTemplate(CHATML, tokenizer), LengthLimits(64, 128, "error"), autoregressive, ("f",))
    rows = [SourceRow(Location("f", line), value) for line, value in enumerate(values, 1)]
    first, invalid, last = encoder.encode_rows(rows)
    assert isinstance(invalid, InvalidRow) and invalid.location.line == 2 and invalid.reason == NOT_ENCODED
    assert "retry-limit-in-match over; change the text, or the regular" in invalid.message
    assert not isinstance(first, InvalidRow) and not isinstance(last, InvalidRow)
