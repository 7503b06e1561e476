"""load_tokenizer on folders that are not what they should be."""

from __future__ import annotations

import pytest

import paddlenlp_ext
from paddlenlp_ext.checkpoint.tokenizer import load_tokenizer


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"no tokenizer files \(looked for tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_a_damaged_tokenizer_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"model": ')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(ValueError, match=f"{tmp_path}: transformers cannot read the tokenizer"):
        load_tokenizer(tmp_path)


def test_the_public_spelling(golden):
    tokenizer = paddlenlp_ext.AutoTokenizer.from_pretrained(golden / "checkpoint_llama.gguf")
    assert tokenizer.encode("ABC") == [39, 34] and tokenizer.decode([39, 34]) == "ABC"
