"""Build a transformers fast tokenizer from the vocabulary file of Qwen 1, `qwen.tiktoken`.

    IQ== 0          base64 of the bytes of a token, and its rank
    IsK9 1234

Byte-pair encoding merges the adjacent tokens whose joined bytes have the lowest rank. The ids of special tokens start
after the highest rank. Text is split into words as in Qwen2, whose tokenizer has the same ids. The code in the model's
repository is not run.
"""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import AddedToken, pre_tokenizers

from paddlenlp_ext.checkpoint.gguf.read_tokenizer import as_transformers_tokenizer, byte_level_bpe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TIKTOKEN_FILE = "qwen.tiktoken"
_END = "<|endoftext|>"
_SPECIAL = (_END, "<|im_start|>", "<|im_end|>", *(f"<|extra_{index}|>" for index in range(205)))
_MAX_TOKEN_BYTES = 512


def tokenizer_from_tiktoken(folder: Path) -> PreTrainedTokenizerFast:
    """Build the tokenizer of a folder with `TIKTOKEN_FILE`. The end-of-text token is `<|endoftext|>`.

    Raises:
        ValueError: the file is missing or damaged.
    """
    if not (folder / TIKTOKEN_FILE).is_file():
        names = ", ".join(sorted(file.name for file in folder.glob("*.tiktoken")))
        raise ValueError(f"{folder}: {names} is not supported, only {TIKTOKEN_FILE}; add the model's tokenizer.json")
    ranks = _read_ranks(folder / TIKTOKEN_FILE)
    letters = _letters()
    written = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges = [(written[left], written[right]) for left, right in _merges(ranks)]
    tokenizer = byte_level_bpe("qwen2", {written[token]: rank for token, rank in ranks.items()}, merges)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    return as_transformers_tokenizer(tokenizer, eos_token=_END)


def _read_ranks(file: Path) -> dict[bytes, int]:
    """Return the rank of each token, in the order of the ranks 0, 1, 2, ...

    Raises:
        ValueError: a line is invalid, ranks are missing, or a byte has no token.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        try:
            encoded, rank = line.split()
            token = base64.b64decode(encoded, validate=True)
            is_next = int(rank) == len(ranks) and token not in ranks
        except (ValueError, binascii.Error) as error:
            raise ValueError(
                f"{file}:{number}: expected a token in base64 and its rank; download the file again"
            ) from error
        if not is_next or not 0 < len(token) <= _MAX_TOKEN_BYTES:
            raise ValueError(f"{file}:{number}: a repeated, empty or misplaced token; download the file again")
        ranks[token] = len(ranks)
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise ValueError(f"{file}: no token for the byte {missing[0]}; download the file again")
    return ranks


def _merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Return all pairs of tokens that merge into another token, sorted by the rank of the merged token."""
    pairs = [
        (rank, ranks[token[:cut]], ranks[token[cut:]], token[:cut], token[cut:])
        for token, rank in ranks.items()
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
    return [(left, right) for *_, left, right in sorted(pairs)]


def _letters() -> list[str]:
    """Return, for each byte 0 to 255, its printable character in vocabularies of byte-level tokenizers."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in kept]
    letters = {byte: chr(byte) for byte in kept} | {byte: chr(256 + index) for index, byte in enumerate(others)}
    assert set(letters.values()) == set(pre_tokenizers.ByteLevel.alphabet())
    return [letters[byte] for byte in range(256)]
