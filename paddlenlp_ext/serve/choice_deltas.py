"""Events of one answer: its text up to a stop text, and its calls of tools, from tokens as they arrive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paddlenlp_ext.generation.detokenizer import IncrementalDetokenizer
from paddlenlp_ext.generation.logprobs import TokenLogprob
from paddlenlp_ext.generation.request import STOP
from paddlenlp_ext.serve.stop_strings import StopTexts
from paddlenlp_ext.serve.tool_call_parser import CallText, ToolCall

TOOL_CALLS = "tool_calls"


@dataclass(frozen=True)
class Event:
    """New part of an answer.

    Attributes:
        choice: number of the answer.
        text: text that can be shown.
        logprobs: log-probabilities of the tokens that became complete since the last event.
        num_tokens: number of generated tokens in this event.
        tool_calls: calls of tools, in the last event but one of an answer that has some.
        finish_reason: "stop", "length" or "tool_calls" in the last event of the answer, else None.
        prompt_logprobs: log-probabilities of the prompt, in the first event of an answer that returns it.
        error: error that ended the answer.
    """

    choice: int
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    num_tokens: int = 0
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: str | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    error: Exception | None = None

    @property
    def is_empty(self) -> bool:
        """True if a client need not receive the event."""
        is_shown = self.text or self.logprobs or self.tool_calls or self.finish_reason
        return not is_shown and self.prompt_logprobs is None


class Choice:
    """Receiver of the engine's calls for one answer; they become events, sent from the engine's thread.

    Args:
        number: number of the answer.
        decode: function from tokens to their text.
        stops: texts at which the answer ends.
        send: takes the events.
        context: last tokens of the text that is continued.
        calls: reader of calls of tools; None: calls are part of the text.
    """

    def __init__(
        self,
        number: int,
        decode: Callable[[Sequence[int]], str],
        stops: Sequence[str],
        send: Callable[[Event], None],
        context: Sequence[int] = (),
        calls: CallText | None = None,
    ) -> None:
        self._number, self._send, self._calls = number, send, calls
        self._decoder, self._stops = IncrementalDetokenizer(decode, context), StopTexts(stops)
        self._is_stopped = False

    def on_prompt(self, logprobs: Sequence[TokenLogprob]) -> None:
        """Send the log-probabilities of the prompt."""
        self._send(Event(self._number, prompt_logprobs=tuple(logprobs)))

    def on_token(self, token: int, logprob: TokenLogprob | None) -> bool:
        """Send the text of a token; return True if it completes a stop text."""
        text, self._is_stopped = self._stops.add(self._decoder.add(token))
        shown = text if self._calls is None else self._calls.add(text)
        self._send(Event(self._number, shown, () if logprob is None else (logprob,), num_tokens=1))
        return self._is_stopped

    def on_end_token(self, logprob: TokenLogprob) -> None:
        """Send the log-probability of the end token, which has no text and does not count as generated."""
        self._send(Event(self._number, logprobs=(logprob,)))

    def on_end(self, reason: str | Exception) -> None:
        """Send the end of the answer."""
        if isinstance(reason, Exception):
            self._send(Event(self._number, error=reason))
            return
        text = ""
        if not self._is_stopped:
            text, found = self._stops.add(self._decoder.finish())
            text += "" if found else self._stops.finish()
            reason = STOP if found else reason
        if self._calls is not None:
            shown = self._calls.add(text)
            rest, calls = self._calls.finish()
            text = shown + rest
            if calls:
                self._send(Event(self._number, text, tool_calls=calls))
                text, reason = "", TOOL_CALLS if reason == STOP else reason
        self._send(Event(self._number, text, finish_reason=reason))
