"""Beam search with the scores, the length penalty and the stopping rule of the transformers library.

Each step extends all beams of a row by one token, and keeps the `num_beams` continuations with the highest scores. The
score of a beam is the sum of its log-probabilities. A continuation that ends at an end token leaves the beams, and its
final score is the sum divided by length^`length_penalty`, where the length includes the end token.

A row ends when its beams reach the token limit. A row also ends when it has `num_beams` ended continuations and no
running beam would have a higher final score than the worst ended continuation.

Shapes: B rows, N beams per row, V vocab.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from paddlenlp_ext.generation.decoding_options import DecodingOptions
from paddlenlp_ext.generation.logits_processors import Logits, apply_repetition_penalty, exclude_early_ends, on_host
from paddlenlp_ext.generation.prefill_and_decode import GenerationModel, Row, prefill, step

_UNUSED = np.float32(-1e9)  # initial score of all beams except the first, because all beams start with the same tokens


class Beams:
    """Running and ended beams of one row.

    Attributes:
        row: the row. When the row ends, its `generated` tokens are set to the best continuation.
        running: generated tokens of each running beam.
    """

    def __init__(self, row: Row, options: DecodingOptions) -> None:
        self.row, self._options = row, options
        self.running: list[list[int]] = [[] for _ in range(options.num_beams)]
        self._scores_N = np.full(options.num_beams, _UNUSED)
        self._scores_N[0] = 0
        self._ended: list[tuple[float, list[int]]] = []

    def advance(self, log_probs_NV: Logits) -> list[int]:
        """Extend the beams by one token.

        Args:
            log_probs_NV: log-probabilities of the next token of each running beam.

        Returns:
            For each new running beam, the index of the previous beam that it extends.
        """
        options, num_beams = self._options, self._options.num_beams
        totals = (log_probs_NV + self._scores_N[:, None]).reshape(-1)
        num_candidates = min(max(2, 1 + len(options.eos_token_ids)) * num_beams, len(totals))
        best = np.argpartition(-totals, num_candidates - 1)[:num_candidates]
        best = best[np.lexsort((best, -totals[best]))]
        length = len(self.running[0]) + 1
        parents, running, scores = [], [], []
        for rank, index in enumerate(best):
            parent, token = divmod(int(index), log_probs_NV.shape[1])
            ends = token in options.eos_token_ids
            tokens = self.running[parent] + ([] if ends else [token])
            if not ends:
                parents.append(parent)
                running.append(tokens)
                scores.append(totals[index])
            if rank < num_beams and (ends or length == self.row.limit):
                self._ended.append((float(totals[index] / np.float32(length**options.length_penalty)), tokens))
        self._ended = sorted(self._ended, key=lambda pair: -pair[0])[:num_beams]
        self.running, self._scores_N = running[:num_beams], np.array(scores[:num_beams], np.float32)
        if length == self.row.limit or not self._can_improve(length):
            self.row.generated, self.row.ended = self._ended[0][1], True
        return parents[:num_beams]

    def _can_improve(self, length: int) -> bool:
        if len(self._ended) < self._options.num_beams:
            return True
        best_running = float(self._scores_N[0] / np.float32(length**self._options.length_penalty))
        return best_running > self._ended[-1][0]


def beam_search(model: GenerationModel, rows: Sequence[Row], options: DecodingOptions) -> Iterator[Row]:
    """Decode a batch of rows; yield each row when it ends."""
    num_beams = options.num_beams
    groups = [Beams(row, options) for row in rows]
    cache, logits_BV = prefill(model, [row.prompt for row in rows])
    cache.select_rows([index for index in range(len(rows)) for _ in range(num_beams)])
    logits = np.repeat(on_host(logits_BV), num_beams, axis=0)
    while groups:
        log_probs = _log_probs(logits, groups, options)
        kept, remaining = [], []
        for index, group in enumerate(groups):
            lines = slice(index * num_beams, (index + 1) * num_beams)
            parents = group.advance(log_probs[lines])
            if group.row.ended:
                yield group.row
                continue
            remaining.append(group)
            kept += [index * num_beams + parent for parent in parents]
        groups = remaining
        if not groups:
            return
        cache.select_rows(kept)
        beams = [beam for group in groups for beam in group.running]
        logits = on_host(step(model, [beam[-1:] for beam in beams], cache))[:, -1]
        if cache.is_stale:
            sequences = [group.row.prompt + beam for group in groups for beam in group.running]
            cache, logits_BV = prefill(model, sequences, len(beams[0]))
            logits = on_host(logits_BV)


def _log_probs(logits: Logits, groups: Sequence[Beams], options: DecodingOptions) -> Logits:
    """Return the log-probabilities of the next token of every beam.

    Like the transformers library, beam search applies the repetition penalty to log-probabilities instead of logits.
    """
    shifted = logits - logits.max(axis=1, keepdims=True)
    log_probs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    pairs = [(group.row.prompt + beam, len(beam)) for group in groups for beam in group.running]
    log_probs = apply_repetition_penalty(log_probs, [tokens for tokens, _ in pairs], options.repetition_penalty)
    return exclude_early_ends(log_probs, [length for _, length in pairs], options.min_new_tokens, options.eos_token_ids)
