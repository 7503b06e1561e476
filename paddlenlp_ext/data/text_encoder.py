"""Text to token ids, so that pieces encoded one by one join into what the model meets when it generates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_ANCHOR = "\n"


class TextEncoder:
    """Encodes pieces of a text without special tokens of its own accord.

    A prompt ends where generation begins, so prompt and answer are encoded apart: the model then learns to continue
    exactly the ids it is given later. Some SentencePiece tokenizers put a word mark before every text they encode;
    a piece that continues a text must not get one. Such tokenizers are recognised once, and continuing pieces are
    then encoded behind a line break whose ids are taken off again.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._anchor_ids = self._encode([_ANCHOR])[0]
        alone, behind = self._encode(["x", f"{_ANCHOR}x"])
        self._marks_beginnings = behind != self._anchor_ids + alone
        self.prefix_ids = self._ids_before_text()

    def encode(self, texts: Sequence[str], continues: Sequence[bool]) -> list[list[int]]:
        """Ids of every piece; `continues` says which pieces stand behind other text.

        Raises:
            ValueError: the tokenizer joins a piece with the line break before it.
        """
        if not self._marks_beginnings:
            return self._encode(texts)
        anchored = [_ANCHOR + text if behind else text for text, behind in zip(texts, continues, strict=True)]
        encoded = self._encode(anchored)
        length = len(self._anchor_ids)
        for index, behind in enumerate(continues):
            if not behind:
                continue
            if encoded[index][:length] != self._anchor_ids:
                raise ValueError(
                    f"this tokenizer cannot encode {texts[index][:40]!r} as the continuation of a text; "
                    'set chat_template to "none" or use the fast version of the tokenizer'
                )
            encoded[index] = encoded[index][length:]
        return encoded

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:
            return []
        encoded = self.tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)
        return [list(ids) for ids in encoded["input_ids"]]

    def _ids_before_text(self) -> list[int]:
        """Special ids that the tokenizer itself puts before a text, such as a beginning-of-sequence token."""
        alone = self._encode(["x"])[0]
        whole = list(self.tokenizer("x", return_attention_mask=False)["input_ids"])
        starts = range(len(whole) - len(alone) + 1)
        start = next((start for start in starts if whole[start : start + len(alone)] == alone), 0)
        return whole[:start]
