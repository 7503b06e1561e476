"""ASGI application: routes, request limits, and the mapping of errors to HTTP statuses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
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
from paddlenlp_ext.serve.client_disconnects import STATUS_CLIENT_CLOSED, until_disconnected
from paddlenlp_ext.serve.engine_thread import EngineStoppedError, EngineThread, QueueFullError
from paddlenlp_ext.serve.errors import ApiError
from paddlenlp_ext.serve.parse_request import ChatRequest
from paddlenlp_ext.serve.request_reader_processes import Read, ReaderProcesses
from paddlenlp_ext.serve.responses import (
    ChatFormat,
    CompletionFormat,
    ResponseFormat,
    TokenTexts,
    error_response,
    full_response,
)
from paddlenlp_ext.serve.running_request import RunningRequest
from paddlenlp_ext.serve.served_models import ModelCatalog
from paddlenlp_ext.serve.server_sent_events import EventStream, sse_events
from paddlenlp_ext.serve.tokenize_request import ReadRequest, RequestReader

_JSON_TYPE = "application/json"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits for one request; times are in seconds."""

    max_body_bytes: int = 1 << 21
    request_timeout: float = 600.0
    transfer_timeout: float = 10.0


class Service:
    """Handlers of the routes.

    Args:
        catalog: the models.
        readers: processes that read requests.
        engine: the engine's thread.
        limits: limits of one request.
    """

    def __init__(self, catalog: ModelCatalog, readers: ReaderProcesses, engine: EngineThread, limits: Limits) -> None:
        self._models, self._readers, self._engine, self._limits = catalog, readers, engine, limits
        self._created = int(time.time())
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._token_texts = {name: TokenTexts(model.tokenizer) for name, model in catalog.by_name.items()}

    async def health(self, request: Request) -> Response:
        """Return status 200 while requests are accepted, else 503."""
        if not self._engine.is_running:
            raise ApiError(503, "the engine is not running", "unavailable")
        return JSONResponse({"status": "ok"})

    async def models(self, request: Request) -> Response:
        """List the models."""
        entries = [self._models.entry(name, self._created) for name in self._models.by_name]
        return JSONResponse({"object": "list", "data": entries})

    async def model(self, request: Request) -> Response:
        """Describe one model."""
        found = self._models.find(request.path_params["name"])
        return JSONResponse(self._models.entry(found.name, self._created))

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        return await self._answer(request, RequestReader.read_chat)

    async def completions(self, request: Request) -> Response:
        """Continue the prompts of a request, which are strings or lists of token ids."""
        return await self._answer(request, RequestReader.read_completion)

    async def _answer(self, request: Request, read: Read) -> Response:
        body, client = await self._body(request), _client_of(request)
        found = await until_disconnected(request, self._readers.read(client, read, body))
        if found is None:
            return Response(status_code=STATUS_CLIENT_CLOSED)
        del body  # frees the memory, because the answer may take minutes
        return await self._generate(request, found, client)

    async def _body(self, request: Request) -> bytes:
        """Read the body within the limits of size and time."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != _JSON_TYPE:
            raise ApiError(415, f"the content type is {kind[:60]!r}; send {_JSON_TYPE}", "unsupported_media_type")
        limit = self._limits.max_body_bytes
        too_large = ApiError(413, f"the body has more than {limit} bytes; send a smaller body", "body_too_large")
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
            problem = f"the body was not received within {self._limits.transfer_timeout:g} seconds"
            raise ApiError(408, problem, "timeout") from None
        return bytes(body)

    async def _generate(self, request: Request, found: ReadRequest, client: str) -> Response:
        """Generate all choices and return the response."""
        model, options, grammar = self._models.by_name[found.options.model], found.options, None
        if options.answer_format is not None:
            loop = asyncio.get_running_loop()
            grammar = await loop.run_in_executor(self._compiler, model.compile, options.answer_format)
        running = RunningRequest(found, model, client, self._limits.request_timeout, grammar)
        form = _format(found, self._token_texts[model.name])
        self._engine.submit(running.engine_requests)
        if options.stream:
            events = sse_events(running, form, options.include_usage)
            return EventStream(events, on_end=running.cancel)
        try:
            response = await until_disconnected(request, full_response(running, form))
        finally:
            running.cancel()
        return response or Response(status_code=STATUS_CLIENT_CLOSED)


def _client_of(request: Request) -> str:
    """Return the address of the client; clients with different addresses take turns."""
    return "" if request.client is None else request.client.host


def _format(found: ReadRequest, texts: TokenTexts) -> ResponseFormat:
    options = found.options
    if isinstance(options, ChatRequest):
        return ChatFormat(options.model, texts, options.num_top is not None)
    pairs = zip(found.prompt_texts, found.prompts, strict=True) if options.echo else ()
    echoed = [pair for pair in pairs for _ in range(options.num_choices)]
    return CompletionFormat(options.model, texts, options.num_top, echoed)


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


def make_app(
    catalog: ModelCatalog,
    readers: ReaderProcesses,
    engine: EngineThread,
    limits: Limits,
    api_key: str | None = None,
) -> ASGIApp:
    """Return the application, which starts the engine's thread at startup and ends the thread at shutdown."""
    service = Service(catalog, readers, engine, limits)

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
