"""Responses of OpenAI's interface: chat and text completions, in full or as the chunks of a stream, and errors."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import JSONResponse

from paddlenlp_ext.generation.logprobs import TokenLogprob
from paddlenlp_ext.serve.choice_deltas import Event
from paddlenlp_ext.serve.errors import ApiError

_SENTENCEPIECE_SPACE = "\u2581"
_NO_LOGPROB = -9999.0  # JSON has no infinity


class TokenTexts:
    """Texts of single tokens, special ones included."""

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
                text = f" {text}"  # removed at the beginning of a text
            self._texts[token] = text
        return self._texts[token]


class ChatFormat:
    """Form of /v1/chat/completions.

    Args:
        model: name of the model.
        token_texts: texts of its tokens.
        with_logprobs: write log-probabilities.
    """

    kind, part_kind = "chat.completion", "chat.completion.chunk"

    def __init__(self, model: str, token_texts: TokenTexts, with_logprobs: bool) -> None:
        self.head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
        self._texts, self._with_logprobs = token_texts, with_logprobs

    def first_parts(self, choice: int) -> list[dict[str, Any]]:
        """Return the entries of a stream before the first event of an answer."""
        delta = {"role": "assistant", "content": ""}
        return [{"index": choice, "delta": delta, "logprobs": None, "finish_reason": None}]

    def part(self, event: Event) -> dict[str, Any]:
        """Return the entry of a stream for an event."""
        delta: dict[str, Any] = {"content": event.text} if event.text else {}
        if event.tool_calls:
            delta["tool_calls"] = [{"index": index, **call.entry} for index, call in enumerate(event.tool_calls)]
        logprobs = self._logprobs(event.logprobs) if self._with_logprobs and event.logprobs else None
        return {"index": event.choice, "delta": delta, "logprobs": logprobs, "finish_reason": event.finish_reason}

    def full(self, choice: int, events: Sequence[Event]) -> dict[str, Any]:
        """Return the entry of an answer from all its events."""
        tokens = [each for event in events for each in event.logprobs]
        message: dict[str, Any] = {"role": "assistant", "content": "".join(event.text for event in events)}
        if calls := [call.entry for event in events for call in event.tool_calls]:
            message |= {"content": message["content"] or None, "tool_calls": calls}
        return {
            "index": choice,
            "message": {**message, "refusal": None},
            "logprobs": self._logprobs(tokens) if self._with_logprobs else None,
            "finish_reason": events[-1].finish_reason,
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
    """Form of /v1/completions.

    Args:
        model: name of the model.
        token_texts: texts of its tokens.
        num_top: number of most likely tokens; None: no log-probabilities.
        echoed: text and token ids of the prompt of each answer, if it is returned; else empty.
    """

    kind = part_kind = "text_completion"

    def __init__(
        self, model: str, token_texts: TokenTexts, num_top: int | None, echoed: Sequence[tuple[str, Sequence[int]]] = ()
    ) -> None:
        self.head = {"id": f"cmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
        self._texts, self._num_top, self._echoed = token_texts, num_top, echoed
        self._offsets: dict[int, int] = {}

    def first_parts(self, choice: int) -> list[dict[str, Any]]:
        """Return the entries of a stream before the first event of an answer: the prompt, without log-probabilities."""
        if not self._echoed or self._num_top is not None:
            return []
        return [{"index": choice, "text": self._echoed[choice][0], "logprobs": None, "finish_reason": None}]

    def part(self, event: Event) -> dict[str, Any]:
        """Return the entry of a stream for an event."""
        text = event.text if event.prompt_logprobs is None else self._echoed[event.choice][0]
        logprobs = None if self._num_top is None else self._logprobs(event.choice, [event])
        return {"index": event.choice, "text": text, "logprobs": logprobs, "finish_reason": event.finish_reason}

    def full(self, choice: int, events: Sequence[Event]) -> dict[str, Any]:
        """Return the entry of an answer from all its events."""
        text = (self._echoed[choice][0] if self._echoed else "") + "".join(event.text for event in events)
        logprobs = None if self._num_top is None else self._logprobs(choice, events)
        return {"index": choice, "text": text, "logprobs": logprobs, "finish_reason": events[-1].finish_reason}

    def _logprobs(self, choice: int, events: Sequence[Event]) -> dict[str, Any]:
        tokens: list[int] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        for event in events:
            if event.prompt_logprobs is not None:  # nothing predicts the first token
                tokens.append(self._echoed[choice][1][0])
                values.append(None)
                tops.append(None)
            for each in (*(event.prompt_logprobs or ()), *event.logprobs):
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
        """Return the log-probabilities by text; of tokens with the same text, the most likely one."""
        found: dict[str, float] = {}
        for token, value in (*each.top, (each.token, each.logprob)):
            found.setdefault(self._texts[token], _finite(value))
        return found


ResponseFormat = ChatFormat | CompletionFormat


def error_response(error: ApiError, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """Return the response of an error, with further headers of its status."""
    own = {"retry-after": "1"} if error.status == 429 else {}
    if error.status in (408, 413):  # the rest of the body is not read
        own["connection"] = "close"
    return JSONResponse(error.body(), error.status, {**(headers or {}), **own})


def usage(num_prompt: int, num_new: int) -> dict[str, int]:
    """Return the numbers of tokens of a request."""
    return {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}


def model_entry(name: str, base: str, created: int) -> dict[str, Any]:
    """Return the entry of a model in /v1/models."""
    parent = None if name == base else base
    return {"id": name, "object": "model", "created": created, "owned_by": "paddlenlp-ext", "parent": parent}


def _finite(value: float) -> float:
    return max(value, _NO_LOGPROB)
