"""Tokenization version: fixed rows are encoded to the same tokens unless the version is raised."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from paddlenlp_ext.data.readers.base import ParsedBlock
from paddlenlp_ext.data.readers.dataset_files import read_rows
from paddlenlp_ext.data.readers.inflection import read_inflection
from paddlenlp_ext.data.templates.load import load_template
from paddlenlp_ext.data.templates.plain import PlainTemplate
from paddlenlp_ext.data.tokenization.cache_key import TOKENIZATION_VERSION
from paddlenlp_ext.data.tokenization.row_encoder import RowEncoder
from paddlenlp_ext.data.tokenization.truncation import TRUNCATIONS, LengthLimits
from tests.data.tiny_tokenizers import PADDLENLP_CHATML, SPECIAL, TEMPLATES, make_marking_tokenizer

DIGESTS = {4: "46158c1448f7edcf2f854b1703be1042fd67552964b2bf83720f38cb00e45321"}
"""Tokenization version -> digest of the tokens of this file."""

TURNS = (("Was ist 2 + 2?", "vier"), (" Und\n[/INST]? ", "Grüße, 你好 "), ("vier" * 9, "fünf" * 9))
ROWS = (
    {"src": "Was ist 2 + 2?", "tgt": "vier", "context": {"system": "You"}, "id": 3},
    {"src": [question for question, _ in TURNS], "tgt": [answer for _, answer in TURNS]},
    {
        "messages": [
            {"role": "developer", "content": [{"type": "text", "text": "Y"}, {"type": "text", "text": "ou"}]},
            *(
                {"role": role, "content": text}
                for turn in TURNS
                for role, text in zip(("user", "assistant"), turn, strict=True)
            ),
        ]
    },
    {
        "conversations": [
            {"from": who, "value": text} for turn in TURNS[:2] for who, text in zip(("human", "gpt"), turn, strict=True)
        ],
        "system": "I",
    },
    {"instruction": "Sag", "input": "vier", "output": "vier", "history": [["a", "b"]]},
    {"input": "vier", "output": "vier", "label": True},
    {
        "messages": [
            {"role": "user", "content": [{"type": "text", "value": "Was?"}], "loss_weight": 0.0},
            {"role": "assistant", "content": "Das", "weight": 0},
            {"role": "user", "content": "Und?"},
            {"role": "assistant", "content": "vier", "train": True},
            {"role": "user", "content": "Sag"},
            {"role": "assistant", "content": "2", "train": False},
        ]
    },
    {"src": "w", "tgt": "x", "label": False},
    {"src": ["w", "Was?"], "tgt": ["x", "Das"], "label": [0, 1]},
    {"query": "Sag", "response": "vier", "history": [["a", "b"]], "system": "You"},
    {"instruction": "Sag", "query": "w", "output": "vier"},
    {"prompt": "Sag", "completion": " vier"},
    {
        "prompt": [
            {"role": "user", "content": "Was?"},
            {"role": "assistant", "content": "Das"},
            {"role": "user", "content": "Und?"},
        ],
        "completion": [{"role": "assistant", "content": "vier"}],
    },
    {
        "messages": [
            {"role": "user", "content": "Was?"},
            {"role": "user", "content": "Und?"},
            {"role": "assistant", "content": "<think>\nvier\n</think>\n\nDas"},
            {"role": "system", "content": "You"},
            {"role": "user", "content": "Sag"},
            {"role": "assistant", "content": "vier"},
            {"role": "user", "content": "?"},
        ]
    },
    {"text": "Die Antwort: vier", "src": ["2 + ", "2"], "tgt": "</s> vier"},
    {"text": "Die Antwort: vier"},
    {"src": "w" * 99, "tgt": "x"},
    {"src": "w", "tgt": "x" * 99},
    {"src": "w", "tgt": " "},
    {"src": ""},
)
LIMITS = ((64, 128), (24, 40), (8, 12))


def make_byte_tokenizer(adds_bos: bool) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes and a few merges, without training, whose result depends on the library's version."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("v", "i"), ("e", "r"), ("vi", "er"), ("Ġ", "2")]
    words = [*SPECIAL, *alphabet, *("".join(merge) for merge in merges)]
    core = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    if adds_bos:
        core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL[3:])})
    return tokenizer


def all_templates(folder: Path, tokenizer):
    """Yield every kind of template, and whether rows are read as plain text with it."""
    yield PlainTemplate(tokenizer), True
    yield load_template("none", tokenizer), False
    for name, (text, _) in TEMPLATES.items():
        path = folder / f"{name}.jinja"
        path.write_text(text, encoding="utf-8")
        yield load_template(str(path), tokenizer), False
    path = folder / "chat_template.json"
    path.write_text(json.dumps(PADDLENLP_CHATML), encoding="utf-8")
    yield load_template(str(path), tokenizer), False


def digest_of_tokens(folder: Path) -> str:
    """Return a hash of the token arrays and statistics of `ROWS`, over all templates, tokenizers and limits."""
    lines, array = folder / "rows.jsonl", folder / "rows.json"
    lines.write_text("\n\n".join(map(json.dumps, ROWS)), encoding="utf-8")
    array.write_text(json.dumps(ROWS, indent=1, ensure_ascii=False), encoding="utf-8-sig")
    rows = (*read_rows(lines), *read_rows(array))
    digest = hashlib.sha256()

    def add(rows, files, template, limits, autoregressive) -> None:
        encoded = RowEncoder(template, limits, autoregressive, tuple(files))(ParsedBlock((), 1.0, tuple(rows)))
        store, stats = encoded.arrays, encoded.stats
        if not len(store):
            digest.update(b"no row is left")
            return
        for name in ("tokens", "loss_mask", "offsets", "locations", "answers"):
            digest.update(getattr(store, name).tobytes())
        later = ("examples", "unknown_fields", "num_lost_target_tokens")  # counted since, and no part of the tokens
        counts = {name: value for name, value in stats.to_json().items() if name not in later}
        digest.update(json.dumps(counts, sort_keys=True).encode())

    tokenizers = [make_byte_tokenizer(adds_bos=False), make_byte_tokenizer(adds_bos=True), make_marking_tokenizer()]
    for tokenizer in tokenizers:
        for template, autoregressive in all_templates(folder, tokenizer):
            for truncation in TRUNCATIONS:
                for src_length, max_length in LIMITS:
                    limits = LengthLimits(src_length, max_length, truncation)
                    add(rows, [str(lines), str(array)], template, limits, autoregressive)
    words = list(read_inflection("dev"))[:50]
    add(words, [words[0].location.file], load_template("none", tokenizers[0]), LengthLimits(64, 128, "right"), False)
    return digest.hexdigest()


def test_tokenization_of_fixed_rows_gives_the_recorded_digest(tmp_path):
    found = digest_of_tokens(tmp_path)
    if found != DIGESTS.get(TOKENIZATION_VERSION):
        pytest.fail(
            f"tokenization version {TOKENIZATION_VERSION} gave other tokens for these rows; undo the change, or raise "
            "TOKENIZATION_VERSION in paddlenlp_ext/data/tokenization/cache_key.py and "
            f"record the new digest in DIGESTS: {found!r}"
        )
