"""Pack 4-bit and 8-bit codes into int32 words, as in GPTQ, AWQ and compressed-tensors.

word j = sum over i of code[j * n + order[i]] << (bits * i),   n = 32 / bits
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def pack_words(codes_RC: np.ndarray, bits: int, order: Sequence[int] | None = None) -> np.ndarray:
    """Pack the codes of each row into int32 words.

    Args:
        codes_RC: codes, uint8 [R, C].
        bits: bits per code.
        order: order of the codes in a word, from the lowest bits: the i-th code comes from column `order[i]` of the
            word's columns; None: ascending columns.

    Returns:
        Words, int32 [R, ceil(C * bits / 32)]; missing codes of the last word are 0.
    """
    per_word = 32 // bits
    padded = np.pad(codes_RC, ((0, 0), (0, -codes_RC.shape[1] % per_word)))
    codes_RWn = padded.reshape(len(padded), -1, per_word).astype(np.uint32)
    words_RW = np.zeros(codes_RWn.shape[:2], np.uint32)
    for index, position in enumerate(order or range(per_word)):
        words_RW |= codes_RWn[:, :, position] << np.uint32(bits * index)
    return words_RW.view(np.int32)


def unpack_words(words_RW: np.ndarray, bits: int, count: int, order: Sequence[int] | None = None) -> np.ndarray:
    """Unpack the first `count` codes of each row, uint8 [R, count]; the inverse of `pack_words`."""
    per_word = 32 // bits
    words_RW = np.ascontiguousarray(words_RW).view(np.uint32)
    codes_RWn = np.empty((*words_RW.shape, per_word), np.uint8)
    for index, position in enumerate(order or range(per_word)):
        codes_RWn[:, :, position] = (words_RW >> np.uint32(bits * index)) & np.uint32(2**bits - 1)
    return codes_RWn.reshape(len(words_RW), -1)[:, :count]
