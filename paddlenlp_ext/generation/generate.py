"""Batched generation: sort prompts by length into batches and decode step by step with a key-value cache.

Shapes: B batch, S positions of the prompts, D hidden, V vocab.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import paddle
from paddle import nn

from paddlenlp_ext.generation import sampling
from paddlenlp_ext.generation.kv_cache import KVCache
from paddlenlp_ext.generation.options import DecodingOptions, as_token_set
from paddlenlp_ext.generation.sampling import ALL_NAN_LOGITS


class TokenChooser:
    """Selection of the next token of each row, with one random generator per row."""

    def __init__(self, options: DecodingOptions) -> None:
        self._options = options
        self._sampler = sampling.RowSampler(options.seed)

    def choose(self, logits_BV: paddle.Tensor, rows: Sequence[int], seen_ids: Sequence[Sequence[int]]) -> list[int]:
        """Return the next token id of each row of a batch.

        Args:
            logits_BV: [B, V], any float type.
            rows: index of each row among all prompts, which selects its random generator.
            seen_ids: prompt and generated tokens of each row.
        """
        options = self._options
        is_greedy = options.decode_strategy == "greedy_search"
        if is_greedy and options.repetition_penalty == 1.0:
            return paddle.argmax(logits_BV, axis=-1).numpy().tolist()
        logits = logits_BV.astype("float32").numpy()
        logits = sampling.apply_repetition_penalty(logits, seen_ids, options.repetition_penalty)
        if is_greedy:
            return sampling.greedy(logits).tolist()
        logits = sampling.apply_temperature(logits, options.temperature)
        logits = sampling.keep_top_p(sampling.keep_top_k(logits, options.top_k), options.top_p)
        return self._sampler.draw(logits, rows).tolist()


_COMPACTION_THRESHOLD = 0.25  # fraction of finished rows at which they are removed from the batch


class Decoder(Protocol):
    """Interface of a model for generation: `models.causal_lm.CausalLM`, or a PEFT model around one."""

    @property
    def config(self) -> Any:
        """Configuration of the decoder."""
        ...

    @property
    def eos_token_ids(self) -> list[int]:
        """Token ids at which generation ends."""
        ...

    def hidden_states(
        self, input_ids: paddle.Tensor, position_ids: paddle.Tensor | None = None, *, cache: KVCache | None = None
    ) -> paddle.Tensor:
        """Return the hidden states [B, S, D], the input of lm_head."""
        ...

    def logits(self, hidden: paddle.Tensor) -> paddle.Tensor:
        """Return logits [..., V] for hidden states [..., D]."""
        ...


@dataclass
class _Row:
    """State of one prompt: its generated tokens and whether it has ended."""

    number: int
    prompt: list[int]
    limit: int
    generated: list[int] = field(default_factory=list)
    ended: bool = False

    def take(self, token: int, end_tokens: frozenset[int]) -> bool:
        """Append a token unless it ends the row; return True if it was appended."""
        if token in end_tokens:
            self.ended = True
            return False
        self.generated.append(token)
        self.ended = len(self.generated) >= self.limit
        return True


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    decode_strategy: str = "greedy_search",
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    repetition_penalty: float = 1.0,
    eos_token_id: int | Sequence[int] | None = None,
    seed: int = 0,
    batch_size: int = 8,
    max_total_length: int | None = None,
    first_row: int = 0,
    on_token: Callable[[int, int], None] | None = None,
    on_row: Callable[[int, list[int]], None] | None = None,
) -> list[list[int]]:
    """Continue each prompt; return only the new tokens, in the order of `prompts`.

    The tokens of a row depend on its prompt, its number and the seed, not on the other rows of its batch. The token
    that ends a row is not returned: a row shorter than its limit ended at an end token. The model runs in evaluation
    mode without gradients; afterwards the former mode of each layer is restored.

    Args:
        model: the decoder.
        prompts: lists of at least one token id, without padding.
        max_new_tokens: maximum number of new tokens per row.
        decode_strategy: "greedy_search" (temperature, top_k and top_p are not used) or "sampling".
        temperature: divisor of the logits; lower is more deterministic.
        top_k: sample from this many most likely tokens; 0: from all.
        top_p: sample from the most likely tokens whose probabilities together reach this value.
        repetition_penalty: values above 1 make tokens that a row has seen less likely, with both strategies.
        eos_token_id: token or tokens that end a row; None lets every row reach its limit.
        seed: seed of the sampling.
        batch_size: rows decoded together.
        max_total_length: maximum number of tokens of a prompt and its continuation together; None: no limit.
        first_row: number of `prompts[0]`, for callers that divide their prompts among several calls.
        on_token: called with (row, token) for each new token.
        on_row: called with (row, tokens) when a row has ended.

    Raises:
        ValueError: an option is out of range, a prompt is empty, fills `max_total_length` or has a token outside the
            vocabulary, or all logits of a row are NaN.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
    options = DecodingOptions(
        max_new_tokens=max_new_tokens,
        decode_strategy=decode_strategy,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        repetition_penalty=repetition_penalty,
        eos_token_ids=as_token_set(eos_token_id),
        seed=seed,
        max_total_length=max_total_length,
    )
    rows = _make_rows(prompts, first_row, options, vocab_size=model.config.vocab_size)
    longest_first = sorted(rows, key=lambda row: -len(row.prompt))
    chooser = TokenChooser(options)
    with paddle.no_grad(), _evaluation_mode(model):
        for first in range(0, len(rows), batch_size):
            batch = longest_first[first : first + batch_size]
            for row, token in _decode(model, batch, chooser, options.eos_token_ids):
                if token is not None and on_token is not None:
                    on_token(row.number, token)
                if row.ended and on_row is not None:
                    on_row(row.number, row.generated)
    return [row.generated for row in rows]


def _make_rows(
    prompts: Sequence[Sequence[int]], first_row: int, options: DecodingOptions, vocab_size: int
) -> list[_Row]:
    rows = []
    for number, prompt in enumerate(prompts, start=first_row):
        if len(prompt) == 0:
            raise ValueError(f"prompt {number} is empty; generation needs at least one token to start from")
        if not 0 <= min(prompt) <= max(prompt) < vocab_size:
            found = f"token ids from {min(prompt)} to {max(prompt)}"
            raise ValueError(f"prompt {number} has {found}, but the vocabulary has {vocab_size} tokens")
        limit = options.max_new_tokens
        if options.max_total_length is not None:
            limit = min(limit, options.max_total_length - len(prompt))
        if limit < 1:
            total = f"max_total_length {options.max_total_length}"
            raise ValueError(f"prompt {number} has {len(prompt)} tokens; {total} leaves no room for more")
        rows.append(_Row(number, [int(token) for token in prompt], limit))
    return rows


def _decode(
    model: Decoder, rows: list[_Row], chooser: TokenChooser, end_tokens: frozenset[int]
) -> Iterator[tuple[_Row, int | None]]:
    """Decode one batch until all rows end; yield (row, token) for each token, (row, None) for an end token."""
    cache, logits_BV = _prefill(model, rows)
    while True:
        active = [index for index, row in enumerate(rows) if not row.ended]
        if len(active) < len(rows):
            logits_BV = paddle.index_select(logits_BV, paddle.to_tensor(active), axis=0)
        unfinished = [rows[index] for index in active]
        seen_ids = [row.prompt + row.generated for row in unfinished]
        tokens = chooser.choose(logits_BV, [row.number for row in unfinished], seen_ids)
        for row, token in zip(unfinished, tokens, strict=True):
            yield row, token if row.take(token, end_tokens) else None
        active = [index for index, row in enumerate(rows) if not row.ended]
        if not active:
            return
        if len(active) <= (1 - _COMPACTION_THRESHOLD) * len(rows):
            rows = [rows[index] for index in active]
            cache.select_rows(active)
        logits_BV = _step(model, rows, cache)
        if cache.is_stale:
            cache, logits_BV = _prefill(model, rows)


def _prefill(model: Decoder, rows: list[_Row]) -> tuple[KVCache, paddle.Tensor]:
    """Run the left-padded rows through the model; return a cache and the logits [B, V] of their last positions.

    All rows share one forward pass, because dynamic rope scales every position by the longest row of a pass.
    """
    sequences = [row.prompt + row.generated for row in rows]
    width = max(len(sequence) for sequence in sequences)
    padding = [width - len(sequence) for sequence in sequences]
    cache = KVCache(padding, prompt_end=width - max(len(row.generated) for row in rows))
    ids_BS = np.array([[0] * pad + ids for pad, ids in zip(padding, sequences, strict=True)], dtype=np.int64)
    positions_BS = np.maximum(np.arange(width)[None, :] - np.array(padding)[:, None], 0)
    positions_BS = paddle.to_tensor(positions_BS)
    hidden_BSD = model.hidden_states(paddle.to_tensor(ids_BS), position_ids=positions_BS, cache=cache)
    logits_BV = model.logits(hidden_BSD[:, -1])
    if bool(paddle.isnan(logits_BV).all(axis=-1).any()):  # argmax would return token 0 again and again
        raise ValueError(ALL_NAN_LOGITS)
    return cache, logits_BV


def _step(model: Decoder, rows: list[_Row], cache: KVCache) -> paddle.Tensor:
    """Run each row's newest token through the model (0 for ended rows, unused); return the logits [B, V]."""
    ids_B1 = paddle.to_tensor(np.array([[row.generated[-1] if row.generated else 0] for row in rows], dtype=np.int64))
    positions_B1 = cache.length - cache.key_starts.unsqueeze(1)
    return model.logits(model.hidden_states(ids_B1, position_ids=positions_B1, cache=cache)[:, -1])


@contextmanager
def _evaluation_mode(model: Decoder) -> Iterator[None]:
    layers = model.sublayers(include_self=True) if isinstance(model, nn.Layer) else []
    modes = [layer.training for layer in layers]
    for layer in layers:
        layer.training = False
    try:
        yield
    finally:
        for layer, was_training in zip(layers, modes, strict=True):
            layer.training = was_training
