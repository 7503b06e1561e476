"""Tokenizers from `qwen.tiktoken`, against byte-pair encoding as tiktoken defines it."""

from __future__ import annotations

import base64
import collections
import itertools
import json
import unicodedata
from pathlib import Path

import pytest

from paddlenlp_ext.checkpoint.gguf.pre_tokenizers import word_rule
from paddlenlp_ext.checkpoint.tiktoken_file import TIKTOKEN_FILE, tokenizer_from_tiktoken
from paddlenlp_ext.checkpoint.tokenizer import load_tokenizer

CORPUS = "the theme of the thesis: 이것은 them, then there 12345 cafe\u0301 café! naïve — наши дни\n\n  the end\t" * 3
TEXTS = [CORPUS, "Then, there\u2019s a the\u0301me 77 — они ", "<|im_start|>user\nthe<|im_end|>\n", "🙂 \x00\x01 ends "]


def joined(parts: list[bytes], pair: tuple[bytes, bytes]) -> list[bytes]:
    result: list[bytes] = []
    for part in parts:
        if result and (result[-1], part) == pair:
            result[-1] += part
        else:
            result.append(part)
    return result


def words_of(text: str) -> list[bytes]:
    """Return the words of a text; the split is tested with the GGUF tokenizers."""
    rule = word_rule("qwen2")
    normal = unicodedata.normalize("NFC", text)
    return [normal[a:b].encode() for _, (a, b) in rule.pre_tokenizer().pre_tokenize_str(normal)]


def make_ranks() -> dict[bytes, int]:
    """Return the bytes and 30 merges of the most frequent pairs of the corpus."""
    words = [[bytes([byte]) for byte in word] for word in words_of(CORPUS)]
    tokens = [bytes([byte]) for byte in range(255, -1, -1)]
    for _ in range(30):
        counts = collections.Counter(pair for word in words for pair in itertools.pairwise(word))
        pair = max(counts, key=lambda each: (counts[each], each))
        tokens += [pair[0] + pair[1]] * (pair[0] + pair[1] not in tokens)
        words = [joined(word, pair) for word in words]
    return {token: rank for rank, token in enumerate(tokens)}


def encode_word(word: bytes, ranks: dict[bytes, int]) -> list[int]:
    """Merge the pair with the lowest rank, leftmost first, until no pair has a rank."""
    parts = [bytes([byte]) for byte in word]
    while len(parts) > 1:
        found = [(ranks.get(a + b, len(ranks)), index) for index, (a, b) in enumerate(itertools.pairwise(parts))]
        rank, index = min(found)
        if rank == len(ranks):
            break
        parts[index : index + 2] = [parts[index] + parts[index + 1]]
    return [ranks[part] for part in parts]


def write(folder: Path, ranks: dict[bytes, int]) -> Path:
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items())
    (folder / TIKTOKEN_FILE).write_text("".join(lines))
    return folder


def test_tokenizer_from_tiktoken_has_the_ids_of_byte_pair_encoding_by_rank(tmp_path: Path):
    ranks = make_ranks()
    tokenizer = tokenizer_from_tiktoken(write(tmp_path, ranks))
    special = {token: len(ranks) + index for index, token in enumerate(("<|endoftext|>", "<|im_start|>", "<|im_end|>"))}
    for text in TEXTS:
        expected, rest = [], text
        while rest:
            ends = [(rest.index(token), token) for token in special if token in rest]
            place, token = min(ends, default=(len(rest), ""))
            expected += [each for word in words_of(rest[:place]) for each in encode_word(word, ranks)]
            expected += [special[token]] if token else []
            rest = rest[place + len(token) :]
        assert tokenizer.encode(text) == expected
        assert tokenizer.decode(expected) == unicodedata.normalize("NFC", text)
    assert tokenizer.eos_token_id == len(ranks) and len(tokenizer) == len(ranks) + 208
    assert min(len(encode_word(word, ranks)) for word in words_of(CORPUS) if len(word) > 4) < 4


def test_load_tokenizer_reads_the_tiktoken_file_of_a_folder_with_the_config_of_remote_code(tmp_path: Path):
    write(tmp_path, make_ranks())
    auto_map = {"AutoTokenizer": ["tokenization_qwen.QWenTokenizer", None]}
    config = {"tokenizer_class": "QWenTokenizer", "auto_map": auto_map, "model_max_length": 8192}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode(CORPUS)) == unicodedata.normalize("NFC", CORPUS)
    assert tokenizer.pad_token == "<|endoftext|>"
    tokenizer.save_pretrained(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").encode(CORPUS) == tokenizer.encode(CORPUS)


def test_load_tokenizer_of_another_tiktoken_file_raises(tmp_path: Path):
    (tmp_path / "hy.tiktoken").write_text("IQ== 0")
    with pytest.raises(ValueError, match=r"hy\.tiktoken is not supported, only qwen\.tiktoken; add the model's tok"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda lines: [*lines[:3], b"!!! 3", *lines[4:]],
            r"qwen\.tiktoken:4: expected a token in base64 and its rank",
        ),
        (lambda lines: [*lines[:3], *lines[4:]], r"qwen\.tiktoken:4: a repeated, empty or misplaced token"),
        (lambda lines: [*lines[:3], b"IQ==", *lines[4:]], r"qwen\.tiktoken:4: expected a token"),
        (lambda lines: lines[:200], "no token for the byte 0; download the file again"),
    ],
)
def test_tokenizer_from_tiktoken_with_a_damaged_file_raises(tmp_path: Path, damage, message: str):
    file = write(tmp_path, make_ranks()) / TIKTOKEN_FILE
    file.write_bytes(b"\n".join(damage(file.read_bytes().splitlines())))
    with pytest.raises(ValueError, match=message):
        tokenizer_from_tiktoken(tmp_path)
