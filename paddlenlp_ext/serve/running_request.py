"""State of one request while the engine generates its choices.

The engine's thread sends deltas to the event loop through a queue:

    engine's thread    Choice --> queue
    event loop                    queue --> RunningRequest.deltas()
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import replace

import anyio

from paddlenlp_ext.generation import request as generation_request
from paddlenlp_ext.generation.grammar import GrammarError, GrammarState
from paddlenlp_ext.serve.choice_deltas import Choice, Delta
from paddlenlp_ext.serve.engine_thread import EngineFailedError
from paddlenlp_ext.serve.errors import ApiError
from paddlenlp_ext.serve.parse_request import ChatRequest, CompletionRequest, GenerationRequest
from paddlenlp_ext.serve.served_models import ServedModel
from paddlenlp_ext.serve.tokenize_request import ReadRequest
from paddlenlp_ext.serve.tool_call_parser import tool_call_parser
from paddlenlp_ext.utils.logging import get_logger

logger = get_logger("paddlenlp_ext.serve")
_CONTEXT_TOKENS = 8  # enough tokens to decode any character and the space between tokens


class RunningRequest:
    """Choices of one request while the engine generates them; the caller submits the engine requests.

    Args:
        found: the request, with token ids.
        model: the model that the request names.
        client: address of the client.
        timeout: time limit in seconds, starting now.
        grammar: grammar state at the start of each answer; None for free text.

    Attributes:
        engine_requests: one request of the engine for each choice.
        num_prompt_tokens: number of tokens of all prompts.
    """

    def __init__(
        self, found: ReadRequest, model: ServedModel, client: str, timeout: float, grammar: GrammarState | None = None
    ) -> None:
        self._timeout, self._deadline = timeout, time.monotonic() + timeout
        self._loop, self._queue = asyncio.get_running_loop(), asyncio.Queue[Delta]()
        self.num_prompt_tokens = sum(map(len, found.prompts))
        request = found.options
        self._format = request.answer_format
        self.engine_requests: list[generation_request.Request] = []
        for prompt, limit in zip(found.prompts, found.max_new_tokens, strict=True):
            for row in range(request.num_choices):
                choice = self._choice(request, model, prompt)
                engine_request = _engine_request(request, model, choice, prompt, limit, row)
                engine_request.client = client
                engine_request.grammar = None if grammar is None else grammar.copy()
                self.engine_requests.append(engine_request)

    def _choice(self, request: GenerationRequest, model: ServedModel, prompt: list[int]) -> Choice:
        index = len(self.engine_requests)
        if isinstance(request, ChatRequest):  # needs no context: the prompt of a chat ends with special tokens
            parser = tool_call_parser(model.template, request.tool_names, request.max_calls, bool(request.forced_tools))
            return Choice(index, model.decode, request.stops, self._send, tool_calls=parser)
        return Choice(index, model.decode, request.stops, self._send, context=prompt[-_CONTEXT_TOKENS:])

    def _send(self, delta: Delta) -> None:
        """Put a delta into the queue; called from the engine's thread."""
        self._loop.call_soon_threadsafe(self._queue.put_nowait, delta)

    def cancel(self) -> None:
        """Cancel the engine requests for all choices."""
        for request in self.engine_requests:
            request.is_cancelled = True

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Yield the deltas of all choices as they arrive, until all choices have ended.

        Raises:
            ApiError: a choice failed, or the time limit is exceeded.
        """
        num_running = len(self.engine_requests)
        while num_running:
            try:
                with anyio.fail_after(self._deadline - time.monotonic()):
                    delta = await self._queue.get()
            except TimeoutError:
                raise ApiError(503, f"the answer took more than {self._timeout:g} seconds", "timeout") from None
            if isinstance(delta.error, GrammarError) and self._format is not None:
                raise self._format.error(delta.error)
            if delta.error is not None:
                if not isinstance(
                    delta.error, EngineFailedError
                ):  # the engine's thread has logged an EngineFailedError
                    logger.error("generation failed", exc_info=delta.error)
                raise ApiError(500, str(delta.error), "model_error")
            num_running -= delta.finish_reason is not None
            yield delta


def _engine_request(
    request: GenerationRequest, model: ServedModel, choice: Choice, prompt: list[int], limit: int, row: int
) -> generation_request.Request:
    # lm-evaluation-harness drops the last entry of an echoed request, so the EOS token needs an entry, too.
    lists_all_tokens = isinstance(request, CompletionRequest) and request.num_top is not None
    return generation_request.Request(
        prompt=prompt,
        max_new_tokens=limit,
        decoding=replace(request.decoding, max_new_tokens=max(limit, 1), eos_token_ids=model.eos_token_ids),
        row=row,
        adjustments=request.adjustments,
        adapter=model.name,
        num_top=request.num_top,
        on_prompt=choice.on_prompt if lists_all_tokens and request.echo else None,
        on_token=choice.on_token,
        on_end_token=choice.on_end_token if lists_all_tokens else None,
        on_end=choice.on_end,
    )
