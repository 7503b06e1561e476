"""Write responses in the format of OpenAI's API: chat and text completions, stream chunks and errors."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import JSONResponse, Response

from paddlenlp_ext.generation.logprobs import TokenLogprob
from paddlenlp_ext.serve.choice_deltas import Delta
from paddlenlp_ext.serve.errors import ApiError
from paddlenlp_ext.serve.running_request import RunningRequest

_SENTENCEPIECE_SPACE = "\u2581"
_NO_LOGPROB = -9999.0  # stands for minus infinity, which JSON lacks


class TokenTexts:
    """Cache of the texts of single tokens, including special tokens.

    Args:
        tokenizer: a Hugging Face tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def __getitem__(self, token: int) -> str:
        if token not in self._texts:
            stored = self._tokenizer.convert_ids_to_tokens(token)
            text = self._tokenizer.decode([token], clean_up_tokenization_spaces=False)
            if stored is None:  # the embedding has more rows than the tokenizer has tokens
                text = f"<token {token}>"
            elif str(stored).startswith(_SENTENCEPIECE_SPACE) and not text.startswith(" "):
                text = f" {text}"  # restores the space that the tokenizer strips at the beginning of a text
            self._texts[token] = text
        return self._texts[token]


class ChatFormat:
    """Format of /v1/chat/completions.

    Args:
        model: name of the model.
        token_texts: texts of the model's tokens.
        with_logprobs: include log-probabilities.
    """

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(self, model: str, token_texts: TokenTexts, with_logprobs: bool) -> None:
        self.head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
        self._texts, self._with_logprobs = token_texts, with_logprobs

    def first_chunks(self, choice: int) -> list[dict[str, Any]]:
        """Return the stream entries before the first delta of a choice: one entry with the assistant role."""
        first = {"role": "assistant", "content": ""}
        return [{"index": choice, "delta": first, "logprobs": None, "finish_reason": None}]

    def chunk(self, delta: Delta) -> dict[str, Any]:
        """Return the stream entry of a delta."""
        content: dict[str, Any] = {"content": delta.text} if delta.text else {}
        if delta.tool_calls:
            content["tool_calls"] = [{"index": index, **call.entry} for index, call in enumerate(delta.tool_calls)]
        logprobs = self._logprobs(delta.logprobs) if self._with_logprobs and delta.logprobs else None
        return {"index": delta.choice, "delta": content, "logprobs": logprobs, "finish_reason": delta.finish_reason}

    def full(self, choice: int, deltas: Sequence[Delta]) -> dict[str, Any]:
        """Return the entry of a choice from all its deltas."""
        tokens = [each for delta in deltas for each in delta.logprobs]
        message: dict[str, Any] = {"role": "assistant", "content": "".join(delta.text for delta in deltas)}
        if calls := [call.entry for delta in deltas for call in delta.tool_calls]:
            message |= {"content": message["content"] or None, "tool_calls": calls}
        return {
            "index": choice,
            "message": {**message, "refusal": None},
            "logprobs": self._logprobs(tokens) if self._with_logprobs else None,
            "finish_reason": deltas[-1].finish_reason,
        }

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        content = []
        for each in tokens:
            top = [self._entry(token, value) for token, value in each.top]
            content.append({**self._entry(each.token, each.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _entry(self, token: int, value: float) -> dict[str, Any]:
        text = self._texts[token]
        return {"token": text, "logprob": _finite(value), "bytes": None if "\ufffd" in text else list(text.encode())}


class CompletionFormat:
    """Format of /v1/completions.

    Args:
        model: name of the model.
        token_texts: texts of the model's tokens.
        num_top: number of most likely tokens to list; None: no log-probabilities.
        echoed: text and token ids of each choice's prompt if `echo` is set, else empty.
    """

    kind = chunk_kind = "text_completion"

    def __init__(
        self, model: str, token_texts: TokenTexts, num_top: int | None, echoed: Sequence[tuple[str, Sequence[int]]] = ()
    ) -> None:
        self.head = {"id": f"cmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
        self._texts, self._num_top, self._echoed = token_texts, num_top, echoed
        self._offsets: dict[int, int] = {}

    def first_chunks(self, choice: int) -> list[dict[str, Any]]:
        """Return the stream entries before the first delta: the prompt, if it is echoed without log-probabilities."""
        if not self._echoed or self._num_top is not None:
            return []
        return [{"index": choice, "text": self._echoed[choice][0], "logprobs": None, "finish_reason": None}]

    def chunk(self, delta: Delta) -> dict[str, Any]:
        """Return the stream entry of a delta."""
        text = delta.text if delta.prompt_logprobs is None else self._echoed[delta.choice][0]
        logprobs = None if self._num_top is None else self._logprobs(delta.choice, [delta])
        return {"index": delta.choice, "text": text, "logprobs": logprobs, "finish_reason": delta.finish_reason}

    def full(self, choice: int, deltas: Sequence[Delta]) -> dict[str, Any]:
        """Return the entry of a choice from all its deltas."""
        text = (self._echoed[choice][0] if self._echoed else "") + "".join(delta.text for delta in deltas)
        logprobs = None if self._num_top is None else self._logprobs(choice, deltas)
        return {"index": choice, "text": text, "logprobs": logprobs, "finish_reason": deltas[-1].finish_reason}

    def _logprobs(self, choice: int, deltas: Sequence[Delta]) -> dict[str, Any]:
        tokens: list[int] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        for delta in deltas:
            if delta.prompt_logprobs is not None:  # the first token has no log-probability
                tokens.append(self._echoed[choice][1][0])
                values.append(None)
                tops.append(None)
            for each in (*(delta.prompt_logprobs or ()), *delta.logprobs):
                tokens.append(each.token)
                values.append(_finite(each.logprob))
                tops.append(self._top(each))
        texts, offsets = [self._texts[token] for token in tokens], []
        for text in texts:
            offsets.append(self._offsets.get(choice, 0))
            self._offsets[choice] = offsets[-1] + len(text)
        top_logprobs = tops if self._num_top else None
        return {"tokens": texts, "token_logprobs": values, "top_logprobs": top_logprobs, "text_offset": offsets}

    def _top(self, each: TokenLogprob) -> dict[str, float]:
        """Return a dict from token texts to log-probabilities; of tokens with equal texts, keep the most likely one."""
        found: dict[str, float] = {}
        for token, value in (*each.top, (each.token, each.logprob)):
            found.setdefault(self._texts[token], _finite(value))
        return found


ResponseFormat = ChatFormat | CompletionFormat


async def full_response(running: RunningRequest, form: ResponseFormat) -> Response:
    """Wait until all choices have ended, and return the response.

    Raises:
        ApiError: a choice failed, or the time limit is exceeded.
    """
    by_choice: list[list[Delta]] = [[] for _ in running.engine_requests]
    async for delta in running.deltas():
        by_choice[delta.choice].append(delta)
    num_new = sum(delta.num_tokens for deltas in by_choice for delta in deltas)
    # Encode in a thread, because log-probabilities of thousands of tokens would block the event loop.
    choices = [await asyncio.to_thread(_encode_choice, form, *each) for each in enumerate(by_choice)]
    head, counts = json_bytes({**form.head, "object": form.kind}), json_bytes(usage(running.num_prompt_tokens, num_new))
    body = b'%b,"choices":[%b],"usage":%b}' % (head.removesuffix(b"}"), b",".join(choices), counts)
    return Response(body, media_type="application/json")


def _encode_choice(form: ResponseFormat, choice: int, deltas: Sequence[Delta]) -> bytes:
    return json_bytes(form.full(choice, deltas))


def json_bytes(value: Any) -> bytes:
    """Return a value as compact JSON."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def error_response(error: ApiError, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """Return the response to a failed request, with the headers for the status."""
    own = {"retry-after": "1"} if error.status == 429 else {}
    if error.status in (408, 413, 431):  # close the connection, because the rest of the body is not read
        own["connection"] = "close"
    return JSONResponse(error.body(), error.status, {**(headers or {}), **own})


def usage(num_prompt: int, num_new: int) -> dict[str, int]:
    """Return the token counts of a request."""
    return {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}


def _finite(value: float) -> float:
    return max(value, _NO_LOGPROB)
