"""Prompt and answers of TRL's rows, compared with the texts that TRL renders."""

from __future__ import annotations

import json

import pytest

from paddlenlp_ext.data.preference.tokenize_pairs import PreferenceEncoder
from paddlenlp_ext.data.rows.source_row import SourceRow
from paddlenlp_ext.data.templates.load import load_template
from paddlenlp_ext.data.tokenization.truncation import LengthLimits
from paddlenlp_ext.utils.json_reader import Location
from tests.data.tiny_tokenizers import CHATML, make_tokenizer
from tests.golden import DATA
from tests.golden.cases.preference_row_cases import ROWS

GOLDEN = json.loads((DATA / "preference_rows.json").read_text("utf-8"))


@pytest.mark.parametrize("name", ROWS)
def test_preference_encoder_splits_prompt_and_answers_as_trl(name, tmp_path):
    (tmp_path / "chatml.jinja").write_text(CHATML, "utf-8")
    tokenizer = make_tokenizer(eos="<|im_end|>")
    template = load_template(str(tmp_path / "chatml.jinja"), tokenizer)
    encoder = PreferenceEncoder(template, LengthLimits(512, 512, "error"), False, ("rows",))
    (row,) = encoder.encode_rows([SourceRow(Location("rows", 0, 1), ROWS[name])])
    prompt, *answers = (tokenizer.decode(tokens) for _, tokens, _ in row.parts)
    golden = GOLDEN[name]
    expected = golden["prompt"]
    if "messages" not in name:  # TRL renders no template; here the text is the user's message
        system, user = "<|im_start|>system\nYou are helpful.<|im_end|>\n", "<|im_start|>user\n"
        expected = f"{system}{user}{expected}<|im_end|>\n<|im_start|>assistant\n"
    assert prompt == expected
    texts = [golden[key].removesuffix("<|im_end|>\n") for key in ("chosen", "rejected", "completion") if key in golden]
    assert [answer.removesuffix("\n") for answer in answers] == [f"{text}<|im_end|>" for text in texts]
