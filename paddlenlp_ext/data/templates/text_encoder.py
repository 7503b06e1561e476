"""Encode fragments of a text with a tokenizer, and find special tokens and the end of an answer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from paddlenlp_ext.data.rows.errors import InvalidRowError
from paddlenlp_ext.utils.logging import get_logger


def special_token_pattern(tokenizer: Any) -> re.Pattern[str]:
    """Return a regular expression that matches any special token of a tokenizer; longer tokens take precedence."""
    added = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    tokens = sorted(added | set(tokenizer.all_special_tokens), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, tokens)) or r"(?!)")


def end_of_answer(tail: str, special: re.Pattern[str]) -> str:
    """Return the end marker of an answer: `tail` up to and including the last special token.

    If `tail` has no special token, log a warning and return the full text.

    Args:
        tail: text that a template writes after the content of an answer.
        special: regular expression that matches special tokens.
    """
    ends = [match.end() for match in special.finditer(tail)]
    if ends:
        return tail[: ends[-1]]
    get_logger().warning("the chat template writes no special token after an answer: the model does not learn to stop")
    return tail


def stop_token_ids(end: str, special: re.Pattern[str], tokenizer: Any) -> tuple[int, ...]:
    """Return the ids that end generation: special tokens in `end`, and the end-of-sequence token."""
    ids = [tokenizer.convert_tokens_to_ids(token) for token in special.findall(end)]
    if tokenizer.eos_token_id is not None:
        ids.append(int(tokenizer.eos_token_id))
    return tuple(dict.fromkeys(ids))


_ANCHOR = "\n"
NOT_ENCODED = "not encoded"
_SURROGATE = re.compile("[\ud800-\udfff]")


def check_characters(text: str) -> None:
    """Check that a text has no unpaired surrogate, which tokenizers cannot encode.

    Raises:
        InvalidRowError: the text has an unpaired surrogate; the message states its position.
    """
    found = None if text.isascii() else _SURROGATE.search(text)
    if found is not None:
        place = f"character {found.start():,}, after {text[max(found.start() - 40, 0) : found.start()]!r}"
        raise InvalidRowError(
            NOT_ENCODED, f"the text has an unpaired surrogate U+{ord(found[0]):04X} at {place}; remove it"
        )


def _has_backend(tokenizer: Any) -> bool:
    """Return whether transformers passes texts unchanged to a tokenizer of the `tokenizers` library.

    Some subclasses, such as the tokenizer of CodeLlama, change a text before they pass it on.
    """
    from transformers import PreTrainedTokenizerFast as Fast

    methods = ("_encode_plus", "_batch_encode_plus")
    return isinstance(tokenizer, Fast) and all(
        getattr(type(tokenizer), name, None) is getattr(Fast, name, None) for name in methods
    )


class TextEncoder:
    """Encoder of text fragments that adds no special tokens.

    Some SentencePiece tokenizers add a dummy prefix ("▁") to every text. A fragment that continues another text must
    not get this prefix. The encoder therefore encodes a line break followed by the fragment, and removes the ids of the
    line break.

    Attributes:
        prefix_ids: ids of special tokens that the tokenizer adds before a text, such as bos.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._has_backend = _has_backend(tokenizer)
        self._anchor_ids = self._encode([_ANCHOR])[0]
        alone, anchored = self._encode(["x", f"{_ANCHOR}x"])
        self._adds_dummy_prefix = anchored != self._anchor_ids + alone
        self.prefix_ids = self._ids_before_text()

    def encode(self, texts: Sequence[str], continues: Sequence[bool]) -> list[list[int]]:
        """Return the token ids of each fragment.

        Args:
            texts: the fragments.
            continues: whether each fragment continues another text.

        Raises:
            InvalidRowError: the tokenizer cannot encode a fragment.
            ValueError: the tokenizer merges a fragment with the line break before it.
        """
        if not self._adds_dummy_prefix:
            return self._encode(texts)
        anchored = [_ANCHOR + text if joined else text for text, joined in zip(texts, continues, strict=True)]
        encoded = self._encode(anchored)
        length = len(self._anchor_ids)
        for index, joined in enumerate(continues):
            if not joined:
                continue
            if encoded[index][:length] != self._anchor_ids:
                raise ValueError(
                    f"chat_template: the tokenizer cannot encode {texts[index][:40]!r} as the continuation of a text; "
                    'use "none", or the fast version of the tokenizer'
                )
            encoded[index] = encoded[index][length:]
        return encoded

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:
            return []
        try:
            return self._ids(list(texts))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in Rust code is not a subclass of Exception
            if len(texts) > 1:
                return [ids for text in texts for ids in self._encode([text])]
            check_characters(texts[0])
            raise InvalidRowError(
                NOT_ENCODED,
                f"tokenizer {self.tokenizer.name_or_path}: cannot encode a text of {len(texts[0]):,} characters that "
                f"begins with {texts[0][:40]!r}: {error}; change the text, or the regular expressions in "
                "tokenizer.json",
            ) from error

    def _ids(self, texts: list[str]) -> list[list[int]]:
        """Return the token ids of texts, without the offsets and other results that transformers would compute.

        As in a plain call of the tokenizer, texts are neither truncated nor padded. A setting of the backend is changed
        only if necessary, because other threads may use the backend at the same time.
        """
        if not self._has_backend:
            encoded = self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
            return [list(ids) for ids in encoded["input_ids"]]
        backend = self.tokenizer.backend_tokenizer
        if backend.truncation is not None:
            backend.no_truncation()
        if backend.padding is not None:
            backend.no_padding()
        if backend.encode_special_tokens != self.tokenizer.split_special_tokens:
            backend.encode_special_tokens = self.tokenizer.split_special_tokens
        return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]

    def _ids_before_text(self) -> list[int]:
        alone = self._encode(["x"])[0]
        full = list(self.tokenizer("x", return_attention_mask=False)["input_ids"])
        starts = range(len(full) - len(alone) + 1)
        start = next((start for start in starts if full[start : start + len(alone)] == alone), 0)
        return full[:start]
