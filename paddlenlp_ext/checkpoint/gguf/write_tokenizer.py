"""Convert a tokenizer to GGUF metadata, and check that the written tokenizer returns the same tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer, pre_tokenizers

from paddlenlp_ext.checkpoint.gguf.gguf_file import GgufFile
from paddlenlp_ext.checkpoint.gguf.pre_tokenizers import WORD_RULES, WordRule
from paddlenlp_ext.checkpoint.gguf.read_tokenizer import WORD_MARK, tokenizer_from_gguf
from paddlenlp_ext.checkpoint.gguf.tokenizer_fields import TokenType
from paddlenlp_ext.utils.logging import get_logger

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = get_logger("paddlenlp_ext.checkpoint")

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_END_KEYS = ("eos", "eot", "eom")
_REMEDY = "export the model to another format, or convert the folder with llama.cpp's convert_hf_to_gguf.py"

PROBE = (
    "Don't DON'T we'LL it's I'd've 'quoted' O'Neill l'été\n"
    "1 12 123 1234 12345 123456 1,234.50 3x 4th x86 ²³ ⅫⅣ ١٢٣ ४२ 50% $9 €10\r\n\r\n"
    "  two   three    four\t\ttabs \n \n\n  indented()\n    return [i_1, j] # != <= -> \\n //x;\n\n\n"
    "camelCase HTTPServer iPhone ABCdefGHI aBC. snake_case __init__ path/to/file.txt, a/b/ \n"
    "Ünïcödé Ελληνικά Русский текст ქართული հայերեն עִבְרִית العَرَبِيَّة हिन्दी ไทย 한국어 中文字符，全角！\n"
    "ひらがなカタカナ 混ab合12 𝐀𝟏 ǅ ªº ʰ\n"
    "🙂🚀👩‍👩‍👧 ♥️ …—“x” «y» !!! ?!\n...\n ~`|^ (a) [b]{c} @me #tag &amp; \u00a0nbsp\u3000wide end  "
)
"""Text that each known pre-tokenizer splits differently."""


def tokenizer_metadata(
    tokenizer: PreTrainedTokenizerBase,
    num_rows: int,
    bos: int | None,
    ends: Sequence[int],
    stores_merges: bool = False,
) -> dict[str, Any]:
    """Return the `tokenizer.*` metadata for a model.

    Args:
        tokenizer: the model's tokenizer.
        num_rows: number of embedding rows; rows without a token get an unused token.
        bos: id of bos if the tokenizer does not specify bos.
        ends: ids of the tokens that end an answer.
        stores_merges: see `Architecture`.

    Raises:
        ValueError: the tokenizer is not byte-level BPE or SentencePiece BPE, GGUF has no name for the pre-tokenizer, or
            the embedding has too few rows.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(
            f"tokenizer {type(tokenizer).__name__} has no tokenizer.json, which GGUF needs; save a fast tokenizer"
        )
    parts = json.loads(backend.to_str())
    model = parts["model"]
    if model["type"] != "BPE":
        raise ValueError(f"tokenizers of type {model['type']} cannot be written as GGUF, only BPE; {_REMEDY}")
    is_sentencepiece = bool(model.get("byte_fallback"))
    tokens, types = _vocabulary(backend, parts, is_sentencepiece, num_rows)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    if not is_sentencepiece:
        kind = _byte_level(backend, parts, merges)
    else:
        kind = _with_merges(backend, merges) if stores_merges else _sentencepiece(backend, tokens, merges)
    return {
        **kind,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        **_special_tokens(tokenizer, model, bos, ends),
        **_added_ends(tokenizer),
        **_templates(tokenizer),
    }


def _vocabulary(
    backend: Tokenizer, parts: Mapping[str, Any], is_sentencepiece: bool, num_rows: int
) -> tuple[list[str], list[int]]:
    vocabulary = backend.get_vocab(with_added_tokens=True)
    highest = max(vocabulary.values(), default=-1)
    if highest >= num_rows:
        raise ValueError(
            f"the tokenizer has the id {highest}, but the model's embedding has {num_rows} rows; use the tokenizer "
            "that was saved with the model"
        )
    tokens = [f"[PAD{row}]" for row in range(num_rows)]
    types = [int(TokenType.UNUSED)] * num_rows
    for token, row in vocabulary.items():
        is_byte = is_sentencepiece and _BYTE.fullmatch(token)
        tokens[row], types[row] = token, int(TokenType.BYTE if is_byte else TokenType.NORMAL)
    for added in parts["added_tokens"]:
        row = added["id"]
        types[row] = int(TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED)
        if is_sentencepiece and not added["special"]:
            # llama.cpp matches user-defined tokens before it replaces spaces with word marks.
            tokens[row] = added["content"].replace(WORD_MARK, " ")
    unknown = parts["model"].get("unk_token")
    if is_sentencepiece and unknown is not None:
        types[vocabulary[unknown]] = int(TokenType.UNKNOWN)
    return tokens, types


def _byte_level(backend: Tokenizer, parts: Mapping[str, Any], merges: Sequence[str]) -> dict[str, Any]:
    """Return the metadata of byte-level BPE.

    Raises:
        ValueError: GGUF has no name for the normalizer or for the pre-tokenizer.
    """
    normalizer = (parts.get("normalizer") or {}).get("type")
    if normalizer not in (None, "NFC"):
        raise ValueError(f"a tokenizer with the normalizer {normalizer} cannot be written as GGUF; {_REMEDY}")
    rule = recognize_rule(backend, bool(parts["model"].get("ignore_merges")))
    if rule is None:
        raise ValueError(f"llama.cpp has no name for the way this tokenizer splits text into words; {_REMEDY}")
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": rule.names[0],
        "tokenizer.ggml.merges": list(merges),
    }


def recognize_rule(tokenizer: Tokenizer, ignores_merges: bool) -> WordRule | None:
    """Return the rule that matches the pre-tokenizer of a byte-level BPE tokenizer; None if no rule matches.

    First choice: a rule that splits `PROBE` into the same words as the tokenizer. Second choice: a rule that encodes
    `PROBE` into the same tokens.

    Args:
        tokenizer: the tokenizer; NFC is the only normalizer allowed.
        ignores_merges: whether a word in the vocabulary becomes one token without applying merges.
    """
    splitter = tokenizer.pre_tokenizer
    normalizes = tokenizer.normalizer is not None
    ranked = sorted(WORD_RULES, key=lambda r: (r.ignores_merges != ignores_merges, r.normalizes != normalizes))
    if splitter is not None:
        words = _words(splitter)
        for rule in ranked:
            if _words(rule.pre_tokenizer()) == words:
                return rule
    copy = Tokenizer.from_str(tokenizer.to_str())
    expected = copy.encode(PROBE, add_special_tokens=False).ids
    for rule in ranked:
        copy.pre_tokenizer = rule.pre_tokenizer()
        if copy.encode(PROBE, add_special_tokens=False).ids == expected:
            return rule
    return None


def _words(splitter: pre_tokenizers.PreTokenizer) -> list[str]:
    return [word for word, _ in splitter.pre_tokenize_str(PROBE)]


def _sentencepiece(backend: Tokenizer, tokens: Sequence[str], merges: Sequence[str]) -> dict[str, Any]:
    """Return the metadata of SentencePiece BPE, with scores instead of merges; earlier merges have higher scores."""
    first: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        first.setdefault(merge.replace(" ", ""), rank)
    last = float(len(merges))
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.scores": [-float(first.get(token, last)) for token in tokens],
        "tokenizer.ggml.add_space_prefix": _adds_space(backend),
    }


def _with_merges(backend: Tokenizer, merges: Sequence[str]) -> dict[str, Any]:
    """Return the metadata of SentencePiece BPE with merges.

    Raises:
        ValueError: llama.cpp would return different tokens, because it adds no space before a text, and merges no line
            breaks with other characters.
    """
    if any("\n" in merge and merge.replace(" ", "").strip("\n") for merge in merges) or _adds_space(backend):
        raise ValueError(f"llama.cpp has no tokenizer that adds a space or merges line breaks with letters; {_REMEDY}")
    return {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.add_space_prefix": False,
    }


def _adds_space(backend: Tokenizer) -> bool:
    """Return whether the tokenizer adds a space before every text."""
    tokens = backend.encode("a", add_special_tokens=False).tokens
    return bool(tokens) and tokens[0].startswith(WORD_MARK)


def _special_tokens(
    tokenizer: PreTrainedTokenizerBase, model: Mapping[str, Any], bos: int | None, ends: Sequence[int]
) -> dict[str, int]:
    """Return the metadata with the ids of special tokens; eos, eot and eom are the first three of `ends`."""
    ends = sorted(dict.fromkeys(ends), key=lambda end: end != tokenizer.eos_token_id)  # the tokenizer's eos first
    if len(ends) > len(_END_KEYS):
        logger.warning("GGUF files have at most three end tokens; left out: %s", ends[len(_END_KEYS) :])
    unknown = model.get("unk_token")
    ids = {
        "bos": bos if tokenizer.bos_token_id is None else tokenizer.bos_token_id,
        **dict(zip(_END_KEYS, ends, strict=False)),
        "unknown": tokenizer.convert_tokens_to_ids(unknown) if unknown is not None else None,
        "padding": tokenizer.pad_token_id,
    }
    return {f"tokenizer.ggml.{name}_token_id": index for name, index in ids.items() if isinstance(index, int)}


def _added_ends(tokenizer: PreTrainedTokenizerBase) -> dict[str, bool]:
    """Return whether the tokenizer adds bos before every text, and whether it adds eos after every text."""
    plain, full = (_encode(tokenizer, "a", flag) for flag in (False, True))
    start = next((at for at in range(len(full)) if full[at : at + len(plain)] == plain), 0)
    before, after = full[:start], full[start + len(plain) :]
    adds_bos, adds_eos = before == [tokenizer.bos_token_id], after == [tokenizer.eos_token_id]
    if (before and not adds_bos) or (after and not adds_eos):
        logger.warning(
            "the tokenizer adds %s before and %s after a text, which a GGUF file cannot express; programs that load "
            "the file add these tokens only where the chat template contains them",
            tokenizer.convert_ids_to_tokens(before),
            tokenizer.convert_ids_to_tokens(after),
        )
    return {"tokenizer.ggml.add_bos_token": adds_bos, "tokenizer.ggml.add_eos_token": adds_eos}


def _templates(tokenizer: PreTrainedTokenizerBase) -> dict[str, str | list[str]]:
    template = tokenizer.chat_template
    if not isinstance(template, dict):
        return {} if template is None else {"tokenizer.chat_template": template}
    named = {re.sub(r"\W", "_", name, flags=re.ASCII): text for name, text in template.items() if name != "default"}
    return {
        **({"tokenizer.chat_template": template["default"]} if "default" in template else {}),
        **{f"tokenizer.chat_template.{name}": text for name, text in named.items()},
        **({"tokenizer.chat_templates": sorted(named)} if named else {}),
    }


def check_tokenizer(file: GgufFile, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that a GGUF file's tokenizer and `tokenizer` return the same tokens for `PROBE`, a text in many scripts.

    A difference in a rendered chat is logged as a warning and not raised, because llama.cpp cannot avoid the
    difference: llama.cpp keeps spaces next to special tokens and, for SentencePiece, adds a space after each special
    token.

    Raises:
        ValueError: the two tokenizers return different tokens; the message contains the first difference.
    """
    read = tokenizer_from_gguf(file)
    for text in (*PROBE.splitlines(keepends=True), PROBE, "".join(tokenizer.all_special_tokens)):
        difference = _difference(tokenizer, read, text)
        if difference:
            raise ValueError(
                f"the tokenizer in the GGUF file returns different tokens for {text[:60]!r}: {difference}; {_REMEDY}"
            )
    if isinstance(tokenizer.chat_template, str):
        chat = [{"role": "user", "content": "Hello, world"}]
        text = str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
        difference = _difference(tokenizer, read, text)
        if difference:
            logger.warning("llama.cpp tokenizes the chat %r differently from transformers: %s", text, difference)


def _difference(expected: PreTrainedTokenizerBase, found: PreTrainedTokenizerBase, text: str) -> str | None:
    """Describe the first difference between the tokens of two tokenizers; None if all tokens are equal."""
    left, right = (_encode(each, text) for each in (expected, found))
    if left == right:
        return None
    at = next((i for i, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]), len(right))
    return f"{right[at : at + 3]} instead of {left[at : at + 3]} as tokens {at + 1} to {at + 3}"


def _encode(tokenizer: PreTrainedTokenizerBase, text: str, adds_ends: bool = False) -> list[int]:
    """Encode a text with the backend tokenizer, to avoid transformers' warning about long texts."""
    return tokenizer.backend_tokenizer.encode(text, add_special_tokens=adds_ends).ids
