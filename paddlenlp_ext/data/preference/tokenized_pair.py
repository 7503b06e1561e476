"""Tokenized row of preference data: a prompt and one or two answers, and its documents in a batch.

Example for DPO: the prompt `p q s`, the chosen answer `c d e` and the rejected answer `r t`, with a shared prompt and
as separate rows:

    sharing the prompt                     as separate rows

    document           0   | 1     | 2     0             | 1
    parent             -   | 0     | 0     -             | -
    input_ids          p q | s c d | s r   p q s c d     | p q s r
    labels             - - | c d e | r t   - - c d e     | - - r t
    position_ids       0 1 | 2 3 4 | 2 3   0 1 2 3 4     | 0 1 2 3
    answer             - - | 0 0 0 | 1 1   - - 0 0 0     | - - 1 1

The last token of the prompt predicts the first token of both answers, but a position has only one label. So each
answer has a copy of the token, and the shared document ends before the token.

A reward model scores the last token of each answer, so `scores_last_tokens` adds a position for the token:

    document           0   | 1       | 2
    input_ids          p q | s c d e | s r t
    labels             - - | c d e - | r t -
    scored                 |       * |     *
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paddlenlp_ext.data.tokenization.encoded_row import Document, EncodedRow
from paddlenlp_ext.utils.labels import IGNORED_LABEL


@dataclass(frozen=True)
class TokenizedPair(EncodedRow):
    """Tokenized prompt with a pair of answers, or with one rated answer.

    Attributes:
        tokens: int32 [L], the tokens of the prompt, followed by the tokens of every answer.
        loss_mask: bool [L], true for target tokens.
        answer_starts: index of the first token of each answer; at least 1.
        is_desirable: for each answer, True if the answer is chosen or rated as good. A pair is (True, False).
        share_prompt: whether both answers attend to a single copy of the prompt; False: each answer has a copy.
        scores_last_tokens: whether the last token of each answer gets a position, so that a reward model can score it.
        margin: minimum difference between the rewards of a pair, for a reward model.
    """

    answer_starts: tuple[int, ...]
    is_desirable: tuple[bool, ...]
    share_prompt: bool = True
    scores_last_tokens: bool = False
    margin: float = 0.0

    @property
    def prompt(self) -> np.ndarray:
        """Tokens before the answers, int32 [P]."""
        return self.tokens[: self.answer_starts[0]]

    @property
    def answers(self) -> list[tuple[np.ndarray, np.ndarray]]:
        ends = (*self.answer_starts[1:], len(self.tokens))
        spans = [slice(start, end) for start, end in zip(self.answer_starts, ends, strict=True)]
        return [(self.tokens[span], self.loss_mask[span]) for span in spans]

    @property
    def length(self) -> int:
        """Number of positions of the row in a batch."""
        num_answers = len(self.answer_starts)
        length = num_positions(self.answer_starts[0], len(self.tokens), num_answers, self.share_prompt)
        return length + num_answers if self.scores_last_tokens else length

    @property
    def documents(self) -> tuple[Document, ...]:
        if self.share_prompt and len(self.answer_starts) > 1:
            return self._branches()
        return tuple(self._answer_document(self.prompt, number) for number in range(len(self.answer_starts)))

    @property
    def parts(self) -> list[tuple[str, np.ndarray, np.ndarray]]:
        """Name, tokens and loss mask of the prompt and of each answer, for a preview."""
        names = ("chosen", "rejected") if len(self.answer_starts) > 1 else ("good" if self.is_desirable[0] else "bad",)
        answers = [(name, *answer) for name, answer in zip(names, self.answers, strict=True)]
        return [("prompt", self.prompt, np.zeros(len(self.prompt), bool)), *answers]

    def _answer_document(self, prompt: np.ndarray, number: int) -> Document:
        """Return the document of an answer; `prompt` is the part of the prompt in this document, at least one token.

        The last token of the answer has no label, and has a position only if it is scored.
        """
        tokens, loss_mask = self.answers[number]
        labels = np.full(len(prompt) + len(tokens), IGNORED_LABEL, np.int64)
        labels[len(prompt) - 1 : -1] = np.where(loss_mask, tokens, IGNORED_LABEL)
        input_ids = np.concatenate([prompt, tokens])
        end = len(input_ids) if self.scores_last_tokens else -1
        return Document(input_ids[:end], labels[:end], answer=number)

    def _branches(self) -> tuple[Document, ...]:
        shared = self.prompt[:-1]
        documents = []
        if len(shared):
            documents.append(Document(shared, np.full(len(shared), IGNORED_LABEL, np.int64)))
        for number in range(len(self.answer_starts)):
            branch = self._answer_document(self.prompt[-1:], number)
            parent = 0 if len(shared) else None
            documents.append(Document(branch.input_ids, branch.labels, len(shared), parent, number))
        return tuple(documents)


def num_positions(prompt_length: int, num_tokens: int, num_answers: int, share_prompt: bool) -> int:
    """Return the number of positions of a row in a batch, without the last tokens of answers.

    Args:
        prompt_length: number of tokens of the prompt.
        num_tokens: number of tokens of the prompt and of all answers.
        num_answers: number of answers.
        share_prompt: see `TokenizedPair`.
    """
    num_prompts = 1 if share_prompt else num_answers
    return num_tokens - prompt_length + num_prompts * (prompt_length - 1)
