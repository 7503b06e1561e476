"""ASGI application: routes, checks of requests, and the work of the engine for each of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import anyio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from paddlenlp_ext.data.rows.errors import InvalidRowError
from paddlenlp_ext.generation import request as generation_request
from paddlenlp_ext.serve.access_control import AccessCheck
from paddlenlp_ext.serve.choice_deltas import Choice, Event
from paddlenlp_ext.serve.connection import STATUS_CLIENT_CLOSED, EventStream, until_disconnected
from paddlenlp_ext.serve.engine_thread import Worker
from paddlenlp_ext.serve.errors import ApiError, invalid
from paddlenlp_ext.serve.request_fields import Fields, parse_body
from paddlenlp_ext.serve.requests import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    parse_chat,
    parse_completion,
)
from paddlenlp_ext.serve.responses import (
    ChatFormat,
    CompletionFormat,
    ResponseFormat,
    TokenTexts,
    error_response,
    model_entry,
)
from paddlenlp_ext.serve.running_request import Answers
from paddlenlp_ext.serve.served_models import ModelSet, ServedModel
from paddlenlp_ext.serve.tool_call_parser import call_text

_JSON_TYPE = "application/json"
_CONTEXT_TOKENS = 8  # enough for any character and the space between tokens


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a request; times in seconds."""

    max_body_bytes: int = 1 << 21
    max_answers: int = 256
    request_timeout: float = 600.0
    transfer_timeout: float = 30.0


class Service:
    """Handlers of the routes.

    Args:
        models: the models.
        worker: the engine's thread.
        limits: limits of a request.
    """

    def __init__(self, models: ModelSet, worker: Worker, limits: Limits) -> None:
        self._models, self._worker, self._limits = models, worker, limits
        self._created = int(time.time())
        # A long text would block the event loop, and two threads cannot encode with one tokenizer.
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="encoder")
        self._token_texts = {name: TokenTexts(model.tokenizer) for name, model in models.by_name.items()}

    async def health(self, request: Request) -> Response:
        """Answer 200 while requests are accepted, else 503."""
        if not self._worker.is_running:
            raise ApiError(503, "the engine does not run", "unavailable")
        return JSONResponse({"status": "ok"})

    async def models(self, request: Request) -> Response:
        """List the models."""
        entries = [model_entry(name, self._models.base, self._created) for name in self._models.by_name]
        return JSONResponse({"object": "list", "data": entries})

    async def model(self, request: Request) -> Response:
        """Describe one model."""
        found = self._models.find(request.path_params["name"])
        return JSONResponse(model_entry(found.name, self._models.base, self._created))

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        parsed = parse_chat(await self._fields(request))
        model = self._models.find(parsed.model)
        prompt = await self._encode(_encode_chat, model, parsed)
        form = ChatFormat(model.name, self._token_texts[model.name], parsed.num_top is not None)
        return await self._answer(request, parsed, model, [prompt], form)

    async def completions(self, request: Request) -> Response:
        """Continue texts or token ids."""
        parsed = parse_completion(await self._fields(request), self._limits.max_answers)
        model = self._models.find(parsed.model)
        prompts = await self._encode(_encode_prompts, model, parsed, self._models.groups.config.vocab_size)
        echoed: list[tuple[str, Sequence[int]]] = []
        if parsed.echo:
            texts = await self._encode(_prompt_texts, model, parsed)
            echoed = [pair for pair in zip(texts, prompts, strict=True) for _ in range(parsed.num_answers)]
        form = CompletionFormat(model.name, self._token_texts[model.name], parsed.num_top, echoed)
        return await self._answer(request, parsed, model, prompts, form)

    async def _fields(self, request: Request) -> Fields:
        """Read the body within the limits of size and time."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != _JSON_TYPE:
            raise ApiError(415, f"the content type is {kind[:60]!r}; send {_JSON_TYPE}", "unsupported_media_type")
        limit = self._limits.max_body_bytes
        too_large = ApiError(413, f"the body has more than {limit} bytes; send less", "body_too_large")
        if int(request.headers.get("content-length") or 0) > limit:
            raise too_large
        body = bytearray()
        try:
            with anyio.fail_after(self._limits.transfer_timeout):
                async for part in request.stream():
                    body += part
                    if len(body) > limit:
                        raise too_large
        except TimeoutError:
            raise ApiError(408, "the body was not received in time", "timeout") from None
        return parse_body(bytes(body))

    async def _encode(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run a function that tokenizes in the thread for it."""
        return await asyncio.get_running_loop().run_in_executor(self._encoder, function, *arguments)

    async def _answer(
        self,
        request: Request,
        parsed: GenerationRequest,
        model: ServedModel,
        prompts: Sequence[list[int]],
        form: ResponseFormat,
    ) -> Response:
        """Generate all answers and return the response."""
        limits = [self._new_tokens(len(prompt), parsed.max_tokens) for prompt in prompts]
        if len(prompts) * parsed.num_answers > self._limits.max_answers:
            raise invalid("n", f"more than {self._limits.max_answers} answers are requested; send several requests")
        vocab_size = self._models.groups.config.vocab_size
        if any(token >= vocab_size for token in parsed.adjustments.logit_bias):
            raise invalid("logit_bias", f"a token id is not below {vocab_size}, the size of the vocabulary")
        answers = Answers(form, sum(map(len, prompts)), self._limits.request_timeout)
        for prompt, limit in zip(prompts, limits, strict=True):
            for row in range(parsed.num_answers):
                choice = _choice(parsed, model, len(answers.jobs), answers.send, prompt)
                answers.jobs.append(_job(parsed, model, choice, prompt, limit, row))
        self._worker.submit(answers.jobs)
        if parsed.stream:
            parts = answers.parts(parsed.include_usage)
            return EventStream(parts, self._limits.transfer_timeout, on_end=answers.cancel)
        try:
            response = await until_disconnected(request, answers.full())
        finally:
            answers.cancel()
        return response or Response(status_code=STATUS_CLIENT_CLOSED)

    def _new_tokens(self, num_prompt: int, requested: int | None) -> int:
        """Return the limit of new tokens.

        Raises:
            ApiError: prompt and answer exceed the context.
        """
        longest = self._models.max_total_length
        if num_prompt + (1 if requested is None else requested) > longest:
            limit = f"the limit of prompt and answer together is {longest}"
            problem = f"the prompt has {num_prompt} tokens; {limit}; shorten the prompt"
            if requested is not None:
                problem = f"the prompt has {num_prompt} tokens and max_tokens is {requested}; {limit}; reduce one"
            raise ApiError(400, problem, "context_length_exceeded", "max_tokens")
        return longest - num_prompt if requested is None else requested


def _choice(
    parsed: GenerationRequest, model: ServedModel, number: int, send: Callable[[Event], None], prompt: list[int]
) -> Choice:
    """Return the receiver of one answer's tokens."""
    if isinstance(parsed, ChatRequest):  # a text of its own: its prompt ends with special tokens
        calls = call_text(model.template, parsed.tool_names, parsed.max_calls)
        return Choice(number, model.decode, parsed.stops, send, calls=calls)
    return Choice(number, model.decode, parsed.stops, send, context=prompt[-_CONTEXT_TOKENS:])


def _job(
    parsed: GenerationRequest, model: ServedModel, choice: Choice, prompt: list[int], limit: int, row: int
) -> generation_request.Request:
    """Return the engine's request for one answer."""
    # lm-evaluation-harness drops the entry after the prompt, which must exist when the model ends there.
    lists_all_tokens = isinstance(parsed, CompletionRequest) and parsed.num_top is not None
    return generation_request.Request(
        prompt=prompt,
        max_new_tokens=limit,
        decoding=replace(parsed.decoding, max_new_tokens=max(limit, 1), eos_token_ids=model.eos_token_ids),
        row=row,
        adjustments=parsed.adjustments,
        adapter=model.name,
        num_top=parsed.num_top,
        on_prompt=choice.on_prompt if lists_all_tokens and parsed.echo else None,
        on_token=choice.on_token,
        on_end_token=choice.on_end_token if lists_all_tokens else None,
        on_end=choice.on_end,
    )


def _encode_chat(model: ServedModel, parsed: ChatRequest) -> list[int]:
    try:
        return model.template.encode_prompt(parsed.conversation)
    except ValueError as error:
        path = ".".join(map(str, error.path)) if isinstance(error, InvalidRowError) else ""
        raise invalid(path or "messages", str(error)) from None


def _encode_prompts(model: ServedModel, parsed: CompletionRequest, vocab_size: int) -> list[list[int]]:
    encoded = []
    for prompt in parsed.prompts:
        ids = list(model.tokenizer(prompt, verbose=False)["input_ids"]) if isinstance(prompt, str) else prompt
        if not ids:
            raise invalid("prompt", "it is empty; send at least one token")
        if not 0 <= min(ids) <= max(ids) < vocab_size:
            found = f"token ids from {min(ids)} to {max(ids)}"
            raise invalid("prompt", f"there are {found}, but the vocabulary has {vocab_size} tokens")
        encoded.append(ids)
    return encoded


def _prompt_texts(model: ServedModel, parsed: CompletionRequest) -> list[str]:
    options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    return [each if isinstance(each, str) else model.tokenizer.decode(each, **options) for each in parsed.prompts]


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    message = f"{request.method} {request.url.path[:100]}: {error.detail}"
    return error_response(ApiError(error.status_code, message, code), error.headers)


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=STATUS_CLIENT_CLOSED)


async def _on_defect(request: Request, error: Exception) -> Response:
    return error_response(ApiError(500, "the server has a defect; see its log", "internal_error"))


def make_app(models: ModelSet, worker: Worker, limits: Limits, api_key: str | None = None) -> ASGIApp:
    """Return the application; it starts the worker, and ends it after the last request."""
    service = Service(models, worker, limits)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        worker.start()
        yield
        await asyncio.to_thread(worker.close)

    routes = [
        Route("/health", service.health),
        Route("/v1/models", service.models),
        Route("/v1/models/{name:path}", service.model),
        Route("/v1/chat/completions", service.chat, methods=["POST"]),
        Route("/v1/completions", service.completions, methods=["POST"]),
    ]
    handlers: dict[Any, Any] = {
        ApiError: _on_api_error,
        HTTPException: _on_http_error,
        ClientDisconnect: _on_disconnect,
        Exception: _on_defect,
    }
    return AccessCheck(Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan), api_key)
