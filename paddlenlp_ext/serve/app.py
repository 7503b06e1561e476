"""ASGI application: routes, request limits, and the mapping of errors to HTTP statuses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from paddlenlp_ext.serve.access_control import AccessCheck
from paddlenlp_ext.serve.connection import STATUS_CLIENT_CLOSED, until_disconnected
from paddlenlp_ext.serve.engine_thread import EngineStoppedError, EngineThread, QueueFullError
from paddlenlp_ext.serve.errors import ApiError, invalid
from paddlenlp_ext.serve.requests import GenerationRequest, parse_chat, parse_completion
from paddlenlp_ext.serve.responses import (
    ChatFormat,
    CompletionFormat,
    ResponseFormat,
    TokenTexts,
    error_response,
    full_response,
    model_entry,
)
from paddlenlp_ext.serve.running_request import RunningRequest
from paddlenlp_ext.serve.served_models import ModelSet, ServedModel
from paddlenlp_ext.serve.stream import EventStream, sse_events

_JSON_TYPE = "application/json"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of one request; times in seconds."""

    max_body_bytes: int = 1 << 21
    max_choices: int = 256
    request_timeout: float = 600.0
    transfer_timeout: float = 30.0


class Service:
    """Handlers of the routes.

    Args:
        models: the models.
        engine: the engine's thread.
        limits: limits of one request.
    """

    def __init__(self, models: ModelSet, engine: EngineThread, limits: Limits) -> None:
        self._models, self._engine, self._limits = models, engine, limits
        self._created = int(time.time())
        # A long text would block the event loop, and two threads cannot encode with one tokenizer.
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="encoder")
        self._token_texts = {name: TokenTexts(model.tokenizer) for name, model in models.by_name.items()}

    async def health(self, request: Request) -> Response:
        """Answer 200 while requests are accepted, else 503."""
        if not self._engine.is_running:
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
        parsed = parse_chat(await self._body(request))
        model = self._models.find(parsed.model)
        prompt = await self._encode(model.encode_chat, parsed.conversation)
        form = ChatFormat(model.name, self._token_texts[model.name], parsed.num_top is not None)
        return await self._generate(request, parsed, model, [prompt], form)

    async def completions(self, request: Request) -> Response:
        """Complete strings or token ids."""
        parsed = parse_completion(await self._body(request), self._limits.max_choices)
        model = self._models.find(parsed.model)
        prompts = await self._encode(model.encode_prompts, parsed.prompts)
        echoed: list[tuple[str, Sequence[int]]] = []
        if parsed.echo:
            texts = await self._encode(model.prompt_texts, parsed.prompts)
            echoed = [pair for pair in zip(texts, prompts, strict=True) for _ in range(parsed.num_choices)]
        form = CompletionFormat(model.name, self._token_texts[model.name], parsed.num_top, echoed)
        return await self._generate(request, parsed, model, prompts, form)

    async def _body(self, request: Request) -> bytes:
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
        return bytes(body)

    async def _encode(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run a function that tokenizes in the encoder's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._encoder, function, *arguments)

    async def _generate(
        self,
        request: Request,
        parsed: GenerationRequest,
        model: ServedModel,
        prompts: Sequence[list[int]],
        form: ResponseFormat,
    ) -> Response:
        """Generate all choices and return the response."""
        max_new_tokens = [self._models.max_new_tokens(len(prompt), parsed.max_tokens) for prompt in prompts]
        if len(prompts) * parsed.num_choices > self._limits.max_choices:
            raise invalid("n", f"more than {self._limits.max_choices} answers are requested; send several requests")
        if any(token >= model.vocab_size for token in parsed.adjustments.logit_bias):
            problem = f"a token id is not below {model.vocab_size}, the size of the vocabulary"
            raise invalid("logit_bias", problem)
        running = RunningRequest(parsed, model, prompts, max_new_tokens, self._limits.request_timeout)
        self._engine.submit(running.engine_requests)
        if parsed.stream:
            events = sse_events(running, form, parsed.include_usage)
            return EventStream(events, on_end=running.cancel)
        try:
            response = await until_disconnected(request, full_response(running, form))
        finally:
            running.cancel()
        return response or Response(status_code=STATUS_CLIENT_CLOSED)


async def _on_queue_full(request: Request, error: Exception) -> Response:
    return error_response(ApiError(429, str(error), "queue_full"))


async def _on_engine_stopped(request: Request, error: Exception) -> Response:
    return error_response(ApiError(503, str(error), "unavailable"))


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
    return error_response(ApiError(500, "internal server error; see the log of the server", "internal_error"))


def make_app(models: ModelSet, engine: EngineThread, limits: Limits, api_key: str | None = None) -> ASGIApp:
    """Return the application; it starts the engine's thread, and ends it after the last request."""
    service = Service(models, engine, limits)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        engine.start()
        yield
        await asyncio.to_thread(engine.close)

    routes = [
        Route("/health", service.health),
        Route("/v1/models", service.models),
        Route("/v1/models/{name:path}", service.model),
        Route("/v1/chat/completions", service.chat, methods=["POST"]),
        Route("/v1/completions", service.completions, methods=["POST"]),
    ]
    handlers: dict[Any, Any] = {
        ApiError: _on_api_error,
        QueueFullError: _on_queue_full,
        EngineStoppedError: _on_engine_stopped,
        HTTPException: _on_http_error,
        ClientDisconnect: _on_disconnect,
        Exception: _on_defect,
    }
    return AccessCheck(Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan), api_key)
