"""Token ids and loss mask of rendered turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from paddlenlp_ext.data.templates.rendered_turns import RenderedTurn


@dataclass(frozen=True)
class EncodedTurn:
    """Token ids of a turn.

    Attributes:
        prompt: token ids of the prompt.
        answer: token ids of the answer, including the end token.
        text: text of the turn.
        lead: token ids of each text between prompt and answer.
    """

    prompt: list[int]
    answer: list[int]
    text: RenderedTurn
    lead: tuple[list[int], ...] = ()

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.answer) + sum(map(len, self.lead))

    @property
    def generation_start(self) -> int:
        """Index of the first token that the model generates."""
        leads = zip(self.lead, self.text.lead, strict=True)
        return len(self.prompt) + sum(len(ids) for ids, lead in leads if lead.is_prompt)

    @property
    def pieces(self) -> list[tuple[list[int], bool]]:
        """Token ids of prompt, leads and answer, and whether they are targets."""
        is_target = self.text.is_target
        leads = [(ids, is_target and lead.is_target) for ids, lead in zip(self.lead, self.text.lead, strict=True)]
        return [(self.prompt, False), *leads, (self.answer, is_target)]

    @property
    def num_targets(self) -> int:
        return sum(len(ids) for ids, is_target in self.pieces if is_target)


def join_turns(turns: Sequence[EncodedTurn]) -> tuple[list[int], list[bool]]:
    """Concatenate the tokens and the loss masks of turns."""
    tokens: list[int] = []
    loss_mask: list[bool] = []
    for ids, is_target in chain.from_iterable(turn.pieces for turn in turns):
        tokens += ids
        loss_mask += [is_target] * len(ids)
    return tokens, loss_mask


def join_in_arrays(turns: Sequence[EncodedTurn]) -> tuple[np.ndarray, np.ndarray]:
    """Return the result of `join_turns` as arrays: tokens int32 [L], loss mask bool [L]."""
    pieces = [piece for turn in turns for piece in turn.pieces]
    length = sum(len(ids) for ids, _ in pieces)
    tokens = np.fromiter(chain.from_iterable(ids for ids, _ in pieces), np.int32, length)
    loss_mask, end = np.zeros(length, bool), 0
    for ids, is_target in pieces:
        start, end = end, end + len(ids)
        if is_target:
            loss_mask[start:end] = True
    return tokens, loss_mask
