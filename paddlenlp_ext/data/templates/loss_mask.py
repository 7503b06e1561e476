"""Token ids and loss mask of rendered turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    def tokens(self) -> list[int]:
        return [*self.prompt, *(token for ids in self.lead for token in ids), *self.answer]

    @property
    def loss_mask(self) -> list[bool]:
        is_target = self.text.is_target
        mask = [False] * len(self.prompt)
        for ids, lead in zip(self.lead, self.text.lead, strict=True):
            mask += [is_target and lead.is_target] * len(ids)
        return mask + [is_target] * len(self.answer)


def join_turns(turns: Sequence[EncodedTurn]) -> tuple[list[int], list[bool]]:
    """Concatenate the tokens and the loss masks of turns."""
    tokens: list[int] = []
    loss_mask: list[bool] = []
    for turn in turns:
        tokens += turn.tokens
        loss_mask += turn.loss_mask
    return tokens, loss_mask
