"""Sample completions of prompts with the current weights of a model, by continuous batching."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from paddlenlp_ext.config.sections.generation import GenerationConfig
from paddlenlp_ext.generation.continuous_batching import Engine
from paddlenlp_ext.generation.decoding_options import DecodingOptions
from paddlenlp_ext.generation.logprobs import TokenLogprob
from paddlenlp_ext.generation.request import Request


@dataclass
class Completion:
    """Sampled tokens, including the end token, and their log-probabilities at the temperature of sampling."""

    tokens: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)

    def take(self, logprob: TokenLogprob | None) -> None:
        """Append a token."""
        assert logprob is not None, "the request must ask for log-probabilities"
        self.tokens.append(logprob.token)
        self.logps.append(logprob.logprob)

    @property
    def logps_array(self) -> np.ndarray:
        """Log-probabilities of the tokens, float32."""
        return np.array(self.logps, np.float32)


class _SingleModel:
    """Model without named adapters; implements `AdapterModels`."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @property
    def config(self) -> Any:
        return self._model.config

    def group_of(self, adapter: str) -> Hashable:
        return adapter

    def prepare(self, group: Hashable, adapters: Sequence[str]) -> Any:
        return self._model


def sample_completions(
    model: Any,
    prompts: Sequence[tuple[int, Sequence[int]]],
    num_completions: int,
    options: GenerationConfig,
    *,
    end_tokens: frozenset[int],
    max_rows: int,
    seed: int,
    on_completion: Callable[[Completion], None] = lambda completion: None,
) -> list[list[Completion]]:
    """Return sampled completions of each prompt.

    A completion depends on the weights, the prompt and its number, the index of the completion, and the seed.

    Args:
        model: model in evaluation mode.
        prompts: pairs of the number of a prompt, which selects its random numbers, and its tokens.
        num_completions: number of completions of each prompt.
        options: `config.generation` of a run.
        end_tokens: tokens that end a completion.
        max_rows: maximum number of completions that are sampled at the same time.
        seed: random seed.
        on_completion: function called with each completion that has ended.

    Raises:
        ValueError: a prompt leaves no room for a completion in the context of the model, or all logits are NaN.
    """
    engine, errors = Engine(_SingleModel(model), max_rows=max_rows), []
    longest = model.config.longest_answer or model.config.max_context
    found: list[list[Completion]] = []

    def end(completion: Completion, reason: str | Exception) -> None:
        if isinstance(reason, Exception):
            errors.append(reason)
        else:
            on_completion(completion)

    for number, ids in prompts:
        limit = min(options.max_completion_length, longest - len(ids))
        if limit < 1:
            raise ValueError(
                f"prompt {number} has {len(ids)} tokens, and the model's context of {longest} leaves no room for a "
                "completion; lower src_length"
            )
        decoding = DecodingOptions(
            max_new_tokens=limit,
            decode_strategy="greedy_search" if options.top_k == 1 else "sampling",
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            eos_token_ids=end_tokens,
            seed=seed,
        )
        group = [Completion() for _ in range(num_completions)]
        requests = [
            Request(
                prompt=ids,
                max_new_tokens=limit,
                decoding=decoding,
                on_token=lambda _, logprob, completion=completion: completion.take(logprob) is not None,
                on_end=partial(end, completion),
                on_end_token=completion.take,
                row=number * num_completions + index,
                num_top=0,
                logprob_temperature=options.temperature,
            )
            for index, completion in enumerate(group)
        ]
        for start in range(0, num_completions, max_rows):
            first, *siblings = requests[start : start + max_rows]
            first.siblings = siblings
            engine.submit(first)
        found.append(group)
    while engine.step():
        if errors:
            raise errors[0]
    if errors:
        raise errors[0]
    return found
