"""The choice of the next token for the rows of a batch."""

from __future__ import annotations

from collections.abc import Sequence

import paddle

from paddlenlp_ext.generate import sampling
from paddlenlp_ext.generate.options import DecodingOptions


class TokenChooser:
    """Chooses the next token of each row; holds the rows' random streams."""

    def __init__(self, options: DecodingOptions) -> None:
        self._options = options
        self._sampler = sampling.RowSampler(options.seed)

    def choose(self, logits_BV: paddle.Tensor, rows: Sequence[int], seen_ids: Sequence[Sequence[int]]) -> list[int]:
        """Token ids for the rows of a batch.

        Args:
            logits_BV: [B, V], any float type.
            rows: the number of each row among all prompts, which picks its random stream.
            seen_ids: each row's prompt and generated tokens.
        """
        options = self._options
        is_greedy = options.decode_strategy == "greedy_search"
        if is_greedy and options.repetition_penalty == 1.0:
            return paddle.argmax(logits_BV, axis=-1).tolist()
        logits = logits_BV.astype("float32").numpy()
        logits = sampling.apply_repetition_penalty(logits, seen_ids, options.repetition_penalty)
        if is_greedy:
            return sampling.greedy(logits).tolist()
        logits = sampling.apply_temperature(logits, options.temperature)
        logits = sampling.keep_top_p(sampling.keep_top_k(logits, options.top_k), options.top_p)
        return self._sampler.draw(logits, rows).tolist()
