"""Choice of the next token of each row from its logits.

Shapes: B batch, V vocab.
"""

from __future__ import annotations

from collections.abc import Sequence

import paddle

from paddlenlp_ext.generation import sampling
from paddlenlp_ext.generation.options import DecodingOptions
from paddlenlp_ext.ops.linear import in_dtype


def most_likely(logits_BV: paddle.Tensor) -> list[int]:
    """Return the most likely token id of each row; ties go to the lowest id."""
    if logits_BV.place.is_cpu_place():  # NumPy's argmax takes microseconds a row there, and Paddle's a millisecond
        # NumPy has no bfloat16: Paddle returns its bits as integers, in which -1 exceeds 1.
        return sampling.greedy(in_dtype(logits_BV, paddle.float32).numpy()).tolist()
    return paddle.argmax(logits_BV, axis=-1).numpy().tolist()


class TokenChooser:
    """Selection of the next token of each row, with one random generator per row."""

    def __init__(self, options: DecodingOptions) -> None:
        self._options = options
        self._sampler = sampling.RowSampler(options.seed)

    def choose(
        self,
        logits_BV: paddle.Tensor,
        rows: Sequence[int],
        seen_ids: Sequence[Sequence[int]],
        num_generated: Sequence[int],
    ) -> list[int]:
        """Return the next token id of each row of a batch.

        Args:
            logits_BV: [B, V], any float type.
            rows: index of each row among all prompts, which selects its random generator.
            seen_ids: prompt and generated tokens of each row.
            num_generated: number of generated tokens of each row.
        """
        options = self._options
        is_greedy = options.decode_strategy == "greedy_search"
        if is_greedy and options.repetition_penalty == 1.0 and min(num_generated) >= options.min_new_tokens:
            return most_likely(logits_BV)
        logits = logits_BV.astype("float32").numpy()
        logits = sampling.apply_repetition_penalty(logits, seen_ids, options.repetition_penalty)
        logits = sampling.exclude_early_ends(logits, num_generated, options.min_new_tokens, options.eos_token_ids)
        if is_greedy:
            return sampling.greedy(logits).tolist()
        logits = sampling.apply_temperature(logits, options.temperature)
        logits = sampling.keep_top_p(sampling.keep_top_k(logits, options.top_k), options.top_p)
        return self._sampler.draw(logits, rows).tolist()
