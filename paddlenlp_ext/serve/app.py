"""ASGI application: routes, checks of every request, and responses in full or as server-sent events."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import anyio
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from paddlenlp_ext.data.types import InvalidRowError
from paddlenlp_ext.generation import engine
from paddlenlp_ext.serve.choices import Choice, Event
from paddlenlp_ext.serve.errors import ApiError, invalid
from paddlenlp_ext.serve.event_stream import EventStream, disconnection
from paddlenlp_ext.serve.fields import Fields, parse_body
from paddlenlp_ext.serve.models import ModelSet, ServedModel
from paddlenlp_ext.serve.protocol import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    parse_chat,
    parse_completion,
)
from paddlenlp_ext.serve.responses import ChatFormat, CompletionFormat, TokenTexts, model_entry, usage
from paddlenlp_ext.serve.worker import Worker

_JSON_TYPE = "application/json"
_CONTEXT_TOKENS = 8  # enough for any character and the space between tokens
_STATUS_CLIENT_CLOSED = 499  # no client reads this status


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
        # Tokenizers and templates are not safe to use from several threads.
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
        return await self._answer(request, parsed, model, prompts, form, bool(echoed))

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
        form: ChatFormat | CompletionFormat,
        with_prompt: bool = False,
    ) -> Response:
        """Generate all answers and return the response."""
        limits = [self._new_tokens(len(prompt), parsed.max_tokens) for prompt in prompts]
        if len(prompts) * parsed.num_answers > self._limits.max_answers:
            raise invalid("n", f"more than {self._limits.max_answers} answers are requested; send several requests")
        vocab_size = self._models.groups.config.vocab_size
        if any(token >= vocab_size for token in parsed.adjustments.logit_bias):
            raise invalid("logit_bias", f"a token id is not below {vocab_size}, the size of the vocabulary")
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[Event]()

        def send(event: Event) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, event)

        jobs = []
        for number, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
            for row in range(parsed.num_answers):
                # A chat answer is a text of its own, and its prompt ends with special tokens.
                context = prompt[-_CONTEXT_TOKENS:] if isinstance(parsed, CompletionRequest) else ()
                choice = Choice(number * parsed.num_answers + row, model.tokenizer, parsed.stops, send, context)
                job = engine.Request(
                    prompt=prompt,
                    max_new_tokens=limit,
                    decoding=replace(parsed.decoding, max_new_tokens=max(limit, 1), eos_token_ids=model.eos_token_ids),
                    row=row,
                    adjustments=parsed.adjustments,
                    variant=model.name,
                    num_top=parsed.num_top,
                    on_prompt=choice.on_prompt if with_prompt and parsed.num_top is not None else None,
                    on_token=choice.on_token,
                    on_end=choice.on_end,
                )
                jobs.append(job)
        self._worker.submit(jobs)
        events = self._events(jobs, queue)
        num_prompt = sum(map(len, prompts))
        if parsed.stream:
            parts = _stream(events, form, len(jobs), num_prompt, parsed.include_usage)
            return EventStream(parts, self._limits.transfer_timeout)
        return await _unless_disconnected(request, _collect(events, form, len(jobs), num_prompt))

    def _new_tokens(self, num_prompt: int, requested: int | None) -> int:
        """Return the limit of new tokens.

        Raises:
            ApiError: prompt and answer exceed the context.
        """
        longest = self._models.max_total_length
        wanted = 1 if requested is None else requested
        if num_prompt + wanted > longest:
            problem = f"the prompt has {num_prompt} tokens and max_tokens is {wanted}, together more than {longest}"
            raise ApiError(
                400, f"{problem}, the limit of this server; shorten one", "context_length_exceeded", "max_tokens"
            )
        return longest - num_prompt if requested is None else requested

    async def _events(self, jobs: Sequence[engine.Request], queue: asyncio.Queue[Event]) -> AsyncIterator[Event]:
        """Yield events until all answers have ended; on any other end, the answers are cancelled.

        Raises:
            ApiError: an answer failed, or the time is over.
        """
        num_running, deadline = len(jobs), time.monotonic() + self._limits.request_timeout
        try:
            while num_running:
                try:
                    with anyio.fail_after(deadline - time.monotonic()):
                        event = await queue.get()
                except TimeoutError:
                    seconds = self._limits.request_timeout
                    raise ApiError(503, f"the answer took more than {seconds:g} seconds", "timeout") from None
                if event.error is not None:
                    raise _as_api_error(event.error)
                num_running -= event.finish_reason is not None
                yield event
        finally:
            for job in jobs:
                job.is_cancelled = True


def _as_api_error(error: Exception) -> ApiError:
    return error if isinstance(error, ApiError) else ApiError(500, str(error), "model_error")


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


async def _collect(events: AsyncIterator[Event], form: Any, num_choices: int, num_prompt: int) -> Response:
    """Return the response of all answers."""
    by_choice: list[list[Event]] = [[] for _ in range(num_choices)]
    async for event in events:
        by_choice[event.choice].append(event)
    choices = [form.full(choice, own) for choice, own in enumerate(by_choice)]
    num_new = sum(event.num_tokens for own in by_choice for event in own)
    return JSONResponse({**form.head, "object": form.kind, "choices": choices, "usage": usage(num_prompt, num_new)})


async def _unless_disconnected(request: Request, answer: Any) -> Response:
    """Await the answer, but cancel it when the client closes the connection."""
    answering, leaving = asyncio.ensure_future(answer), asyncio.ensure_future(disconnection(request))
    try:
        await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        return answering.result() if answering.done() else Response(status_code=_STATUS_CLIENT_CLOSED)
    finally:
        for task in (answering, leaving):
            task.cancel()


async def _stream(
    events: AsyncIterator[Event], form: Any, num_choices: int, num_prompt: int, include_usage: bool
) -> AsyncIterator[bytes]:
    """Yield the server-sent events of a stream."""
    head = {**form.head, "object": form.part_kind}
    own_usage = {"usage": None} if include_usage else {}
    num_new = 0
    try:
        for choice in range(num_choices):
            for part in form.first_parts(choice):
                yield _sent_event({**head, "choices": [part], **own_usage})
        async for event in events:
            num_new += event.num_tokens
            if event.text or event.logprobs or event.finish_reason or event.prompt_logprobs is not None:
                yield _sent_event({**head, "choices": [form.part(event)], **own_usage})
        if include_usage:
            yield _sent_event({**head, "choices": [], "usage": usage(num_prompt, num_new)})
    except ApiError as error:  # the status is already sent
        yield _sent_event(error.body())
    finally:
        await events.aclose()  # type: ignore[attr-defined]
    yield b"data: [DONE]\n\n"


def _sent_event(value: Mapping[str, Any]) -> bytes:
    return f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


class AccessCheck:
    """Middleware that checks the API key, and without one that the request was meant for this computer.

    A web page can send requests to servers on its visitor's computer under a name of its own.
    """

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self._app, self._expected = app, None if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._error(scope) if scope["type"] == "http" and scope["path"] != "/health" else None
        await (self._app if error is None else _error_response(error))(scope, receive, send)

    def _error(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        if self._expected is None:
            host = headers.get("host", "")
            return None if _is_local(host) else ApiError(403, f"the host {host[:60]!r} is not local", "host_not_local")
        if hmac.compare_digest(headers.get("authorization", "").encode("latin-1"), self._expected):
            return None
        return ApiError(401, "the API key is missing or wrong; send it as Authorization: Bearer KEY", "invalid_api_key")


def _is_local(host: str) -> bool:
    """Return whether the value of a Host header is this computer's own name or address."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


def _error_response(error: ApiError) -> JSONResponse:
    headers = {"retry-after": "1"} if error.status == 429 else {}
    if error.status in (408, 413):  # the rest of the body is not read
        headers["connection"] = "close"
    return JSONResponse(error.body(), error.status, headers)


async def _on_api_error(request: Request, error: Exception) -> Response:
    return _error_response(_as_api_error(error))


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    names = {404: "not_found", 405: "method_not_allowed"}
    message = f"{request.method} {request.url.path[:100]}: {error.detail}"
    body = ApiError(error.status_code, message, names.get(error.status_code, "http_error")).body()
    return JSONResponse(body, error.status_code, error.headers)


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=_STATUS_CLIENT_CLOSED)


def make_app(models: ModelSet, worker: Worker, limits: Limits, api_key: str | None = None) -> ASGIApp:
    """Return the application; it starts the worker, and ends it after the last request."""
    service = Service(models, worker, limits)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        worker.start()
        yield
        await asyncio.to_thread(worker.close, limits.transfer_timeout)

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
    }
    return AccessCheck(Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan), api_key)
