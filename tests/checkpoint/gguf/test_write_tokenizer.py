"""Tokenizers as metadata of GGUF files: the metadata that they were read from, and the same ids."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import GPT2Tokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer, Qwen3_5Tokenizer

from paddlenlp_ext.checkpoint.gguf.gguf_file import GgufFile
from paddlenlp_ext.checkpoint.gguf.pre_tokenizers import WORD_RULES
from paddlenlp_ext.checkpoint.gguf.read_tokenizer import tokenizer_from_gguf
from paddlenlp_ext.checkpoint.gguf.write_tokenizer import check_tokenizer, tokenizer_metadata
from tests.checkpoint.gguf.test_read_tokenizer import bpe_file, sentencepiece_file, vocabulary  # noqa: F401 (a fixture)

TEMPLATE = "{{ messages[0]['content'] }}<|eos|>"


def file_of(tokenizer, num_rows: int, ends: list[int], *stores_merges: bool) -> GgufFile:
    metadata = tokenizer_metadata(tokenizer, num_rows, None, ends, *stores_merges)
    return GgufFile(Path("made.gguf"), {"general.architecture": "llama", "llama.context_length": 64, **metadata}, {})


@pytest.mark.parametrize("rule", WORD_RULES, ids=lambda rule: rule.names[0])
def test_tokenizer_metadata_of_byte_level_bpe_are_those_it_was_read_from(rule, vocabulary):  # noqa: F811
    adds = {"ggml__add_bos_token": True, "ggml__add_eos_token": False, "chat_template": TEMPLATE}
    read = bpe_file(vocabulary, rule.names[-1], **adds)
    tokenizer = tokenizer_from_gguf(read)
    n = len(read.metadata["tokenizer.ggml.tokens"])
    written = file_of(tokenizer, n, [n - 3])
    tokens = [*read.metadata["tokenizer.ggml.tokens"][:-1], f"[PAD{n - 1}]"]
    assert written.metadata == {**read.metadata, "tokenizer.ggml.pre": rule.names[0], "tokenizer.ggml.tokens": tokens}
    check_tokenizer(written, tokenizer)


@pytest.mark.parametrize(
    ("kind", "name"), [(GPT2Tokenizer, "gpt-2"), (Qwen2Tokenizer, "qwen2"), (Qwen3_5Tokenizer, "qwen35")]
)
def test_tokenizer_metadata_of_transformers_tokenizers_name_their_rule(kind, name, vocabulary):  # noqa: F811
    tokens, merges = vocabulary
    tokenizer = kind(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    written = file_of(tokenizer, len(tokenizer) + 2, [tokenizer.eos_token_id])
    assert written.metadata["tokenizer.ggml.pre"] == name
    assert written.metadata["tokenizer.ggml.tokens"][-1] == f"[PAD{len(tokenizer) + 1}]"
    check_tokenizer(written, tokenizer)


@pytest.mark.parametrize("prefix", [True, False])
def test_tokenizer_metadata_of_sentencepiece_read_as_the_same_tokenizer(prefix, golden):
    expected = json.loads((golden / "checkpoint_sentencepiece.json").read_text(encoding="utf-8"))
    read = sentencepiece_file(expected, **{"tokenizer.ggml.add_space_prefix": prefix, "llama.context_length": 64})
    tokenizer = tokenizer_from_gguf(read)
    written = file_of(tokenizer, len(expected["tokens"]), [2])
    assert written.metadata["tokenizer.ggml.add_space_prefix"] is prefix
    assert written.metadata["tokenizer.ggml.token_type"] == expected["types"]
    again = tokenizer_from_gguf(written)
    for text in expected["texts"]:
        assert again.encode(text) == tokenizer.encode(text), text
    check_tokenizer(written, tokenizer)


def test_tokenizer_metadata_of_sentencepiece_with_merges_read_as_the_same_tokenizer(golden):
    expected = json.loads((golden / "checkpoint_sentencepiece.json").read_text(encoding="utf-8"))
    read = sentencepiece_file(expected, **{"tokenizer.ggml.add_space_prefix": False, "llama.context_length": 64})
    tokenizer = tokenizer_from_gguf(read)
    written = file_of(tokenizer, len(expected["tokens"]), [2], True)
    assert written.metadata["tokenizer.ggml.model"] == "gemma4" and "tokenizer.ggml.scores" not in written.metadata
    again = tokenizer_from_gguf(written)
    for text in expected["texts"]:
        assert again.encode(text) == tokenizer.encode(text), text
    assert again.encode("a")[0] == tokenizer.bos_token_id
    check_tokenizer(written, tokenizer)


@pytest.mark.parametrize(("prefix", "break_"), [(True, "b"), (False, "\n")])
def test_tokenizer_metadata_with_merges_that_llama_cpp_does_not_apply_raise(prefix, break_):
    pieces = {"tokens": ["<unk>", "<s>", "</s>", "\u2581", "a", break_, f"a{break_}"], "types": [2, 3, 3, 1, 1, 1, 1]}
    pieces["scores"] = [float(-index) for index in range(7)]
    tokenizer = tokenizer_from_gguf(
        sentencepiece_file(pieces, **{"tokenizer.ggml.add_space_prefix": prefix, "llama.context_length": 64})
    )
    with pytest.raises(ValueError, match="no tokenizer that adds a space or merges line breaks with letters"):
        file_of(tokenizer, 7, [2], True)


def test_tokenizer_metadata_of_sentencepiece_score_the_first_merge_highest():
    pieces = {"tokens": ["<unk>", "<s>", "</s>", "a", "b", "c", "ab", "bc"], "types": [2, 3, 3, 1, 1, 1, 1, 1]}
    pieces["scores"] = [0.0, 0.0, 0.0, -9.0, -9.0, -9.0, -2.0, -1.0]
    tokenizer = tokenizer_from_gguf(
        sentencepiece_file(pieces, **{"tokenizer.ggml.add_space_prefix": False, "llama.context_length": 64})
    )
    written = file_of(tokenizer, 8, [2])
    for each in (tokenizer, tokenizer_from_gguf(written)):
        assert each.tokenize("abc") == ["a", "bc"]


def test_tokenizer_metadata_name_three_end_tokens_the_tokenizers_own_first(vocabulary, caplog):  # noqa: F811
    tokenizer = tokenizer_from_gguf(bpe_file(vocabulary, "qwen2"))
    ids = [tokenizer.convert_tokens_to_ids(token) for token in ("a", "b", "c", "<|eos|>")]
    with caplog.at_level(logging.WARNING, "paddlenlp_ext.checkpoint"):
        metadata = tokenizer_metadata(tokenizer, len(tokenizer), None, ids)
    assert [metadata[f"tokenizer.ggml.{name}_token_id"] for name in ("eos", "eot", "eom")] == [ids[3], *ids[:2]]
    assert f"left out: [{ids[2]}]" in caplog.text


def byte_level(vocabulary, **parts) -> PreTrainedTokenizerFast:  # noqa: F811
    tokens, merges = vocabulary
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=tokens[0])


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"normalizer": normalizers.Lowercase()}, "the normalizer Lowercase cannot be written as GGUF"),
        ({"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True)}, "llama.cpp has no name for the way"),
        ({"model": models.WordLevel({"a": 0}, "a")}, "tokenizers of type WordLevel cannot be written as GGUF"),
    ],
)
def test_tokenizer_metadata_of_another_tokenizer_raise(parts, message, vocabulary):  # noqa: F811
    with pytest.raises(ValueError, match=message):
        tokenizer_metadata(byte_level(vocabulary, **parts), 1000, None, [])


def test_tokenizer_metadata_with_fewer_rows_than_tokens_raise(vocabulary):  # noqa: F811
    with pytest.raises(ValueError, match="the tokenizer has the id 599, but the model's embedding has 10 rows"):
        tokenizer_metadata(byte_level(vocabulary), 10, None, [])


def test_check_tokenizer_names_the_first_difference(vocabulary):  # noqa: F811
    tokenizer = tokenizer_from_gguf(bpe_file(vocabulary, "qwen2"))
    with pytest.raises(ValueError, match=r"different tokens for '1 12 123.*instead of"):
        check_tokenizer(bpe_file(vocabulary, "gpt-2"), tokenizer)
