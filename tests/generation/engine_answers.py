"""Engine over one model, and requests that record what it calls back."""

from __future__ import annotations

from typing import Any

from paddlenlp_ext.generation.continuous_batching import Engine
from paddlenlp_ext.generation.decoding_options import DecodingOptions
from paddlenlp_ext.generation.request import Request
from paddlenlp_ext.peft.mixed_batches import AdapterGroups


def engine_of(model: Any, **options: int) -> Engine:
    """Return an engine over a model without adapters."""
    return Engine(AdapterGroups(model, {}), **options)


class Answer:
    """Request with what the engine has called back."""

    def __init__(self, prompt, limit, end=(), stop_after=None, **options: Any) -> None:
        own = {
            name: options.pop(name)
            for name in ("num_top", "adjustments", "row", "adapter", "grammar")
            if name in options
        }
        self.tokens: list[int] = []
        self.logprobs: list[Any] = []
        self.prompt_logprobs: list[Any] | None = None
        self.ended: list[Any] = []
        self.stop_after = stop_after
        self.request = Request(
            prompt=prompt,
            max_new_tokens=limit,
            decoding=DecodingOptions(max_new_tokens=max(limit, 1), eos_token_ids=frozenset(end), **options),
            on_token=self.on_token,
            on_end=self.ended.append,
            on_prompt=self.on_prompt if "num_top" in own else None,
            **own,
        )

    def on_token(self, token, logprob) -> bool:
        self.tokens.append(token)
        self.logprobs.append(logprob)
        return len(self.tokens) == self.stop_after

    def on_prompt(self, logprobs) -> None:
        assert self.prompt_logprobs is None
        self.prompt_logprobs = logprobs


def run(engine: Engine, answers: list[Answer], steps_between: int = 0, limit: int = 1000) -> None:
    """Submit the requests one after another, with steps in between, and run the engine to the end in `limit` steps."""
    for answer in answers:
        engine.submit(answer.request)
        for _ in range(steps_between):
            engine.step()
    for _ in range(limit):
        if not engine.step():
            break
    assert [len(answer.ended) for answer in answers] == [1] * len(answers)
    assert engine.num_rows == engine.num_waiting == 0
