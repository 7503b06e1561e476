"""Text of one answer, computed from its tokens as they arrive, and its end at a stop text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paddlenlp_ext.generation.logprobs import TokenLogprob
from paddlenlp_ext.generation.text_decoder import TextDecoder


class StopTexts:
    """Search of stop texts in a text that arrives in parts; a part that may begin a stop text is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._held = stops, ""

    def add(self, text: str) -> tuple[str, bool]:
        """Return the text that can be shown, up to the first stop text; and True if one was found."""
        self._held += text
        found = [index for index in map(self._held.find, self._stops) if index >= 0]
        if found:
            shown, self._held = self._held[: min(found)], ""
            return shown, True
        overlap = max((self._overlap(stop) for stop in self._stops), default=0)
        cut = len(self._held) - overlap
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown, False

    def finish(self) -> str:
        """Return the text that is held back."""
        held, self._held = self._held, ""
        return held

    def _overlap(self, stop: str) -> int:
        """Return the length of the longest end of the held text that begins `stop`."""
        longest = min(len(self._held), len(stop) - 1)
        return next((size for size in range(longest, 0, -1) if stop.startswith(self._held[-size:])), 0)


@dataclass(frozen=True)
class Event:
    """New part of an answer.

    Attributes:
        choice: number of the answer.
        text: text that can be shown.
        logprobs: log-probabilities of the tokens that became complete since the last event.
        num_tokens: number of generated tokens in this event.
        finish_reason: "stop" or "length" in the last event of the answer, else None.
        prompt_logprobs: log-probabilities of the prompt, in the first event of an answer that returns it.
        error: error that ended the answer.
    """

    choice: int
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    num_tokens: int = 0
    finish_reason: str | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    error: Exception | None = None

    @property
    def is_empty(self) -> bool:
        """True if a client need not receive the event."""
        return not (self.text or self.logprobs or self.finish_reason) and self.prompt_logprobs is None


class Choice:
    """Receiver of the engine's calls for one answer; they become events, sent from the engine's thread.

    Args:
        number: number of the answer.
        decode: function from tokens to their text.
        stops: texts at which the answer ends.
        send: takes the events.
        context: last tokens of the text that is continued.
    """

    def __init__(
        self,
        number: int,
        decode: Callable[[Sequence[int]], str],
        stops: Sequence[str],
        send: Callable[[Event], None],
        context: Sequence[int] = (),
    ) -> None:
        self._number, self._send = number, send
        self._decoder, self._stops = TextDecoder(decode, context), StopTexts(stops)
        self._is_stopped = False

    def on_prompt(self, logprobs: Sequence[TokenLogprob]) -> None:
        """Send the log-probabilities of the prompt."""
        self._send(Event(self._number, prompt_logprobs=tuple(logprobs)))

    def on_token(self, token: int, logprob: TokenLogprob | None) -> bool:
        """Send the text of a token; return True if it completes a stop text."""
        shown, self._is_stopped = self._stops.add(self._decoder.add(token))
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
            reason = "stop" if found else reason
        self._send(Event(self._number, text, finish_reason=reason))
