"""Test load_tokenizer on incomplete and damaged folders."""

from __future__ import annotations

import pytest

import paddlenlp_ext
from paddlenlp_ext.checkpoint.tokenizer import load_tokenizer


def test_load_tokenizer_folder_without_files_raises(tmp_path):
    with pytest.raises(ValueError, match=r"no tokenizer files \(looked for tokenizer\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [('{"model": ', "/tokenizer.json:1:11: damaged"), ('{"model": 1}', ": transformers cannot read the tokenizer")],
)
def test_load_tokenizer_damaged_file_is_named(content, message, tmp_path):
    (tmp_path / "tokenizer.json").write_text(content)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(ValueError, match=f"{tmp_path}{message}"):
        load_tokenizer(tmp_path)


def test_auto_tokenizer_is_public(golden):
    tokenizer = paddlenlp_ext.AutoTokenizer.from_pretrained(golden / "checkpoint_llama.gguf")
    assert tokenizer.encode("ABC") == [39, 34] and tokenizer.decode([39, 34]) == "ABC"
