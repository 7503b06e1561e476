"""Convert the tokens of one choice to deltas: text up to a stop string, and tool calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paddlenlp_ext.generation.detokenizer import IncrementalDetokenizer
from paddlenlp_ext.generation.logprobs import TokenLogprob
from paddlenlp_ext.generation.request import STOP
from paddlenlp_ext.serve.stop_strings import StopStrings
from paddlenlp_ext.serve.tool_call_parser import ToolCall, ToolCallParser

TOOL_CALLS = "tool_calls"


@dataclass(frozen=True)
class Delta:
    """New piece of one choice.

    Attributes:
        choice: index of the choice in the response.
        text: text to append.
        logprobs: log-probabilities of the tokens in this delta.
        num_tokens: number of generated tokens in this delta.
        tool_calls: all tool calls of the choice, in the last delta but one; empty in other deltas.
        finish_reason: "stop", "length" or "tool_calls" in the last delta of the choice, else None.
        prompt_logprobs: log-probabilities of the prompt, in the first delta of a choice that echoes the prompt.
        error: error that ended the choice.
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
        """True if a stream can skip the delta, because it has no content."""
        has_content = self.text or self.logprobs or self.tool_calls or self.finish_reason
        return not has_content and self.prompt_logprobs is None


class Choice:
    """Callbacks of the engine for one choice, which turn tokens into deltas; they run in the engine's thread.

    Args:
        index: index of the choice in the response.
        decode: function that returns the text of tokens.
        stops: stop strings.
        send: function that receives the deltas.
        context: last tokens of the prompt if the choice continues the text of the prompt.
        tool_calls: parser of tool calls; None: leave tool calls in the text.
    """

    def __init__(
        self,
        index: int,
        decode: Callable[[Sequence[int]], str],
        stops: Sequence[str],
        send: Callable[[Delta], None],
        context: Sequence[int] = (),
        tool_calls: ToolCallParser | None = None,
    ) -> None:
        self._index, self._send, self._tool_calls = index, send, tool_calls
        self._decoder, self._stops = IncrementalDetokenizer(decode, context), StopStrings(stops)
        self._is_stopped = False

    def on_prompt(self, logprobs: Sequence[TokenLogprob]) -> None:
        """Send the log-probabilities of the prompt."""
        self._send(Delta(self._index, prompt_logprobs=tuple(logprobs)))

    def on_token(self, token: int, logprob: TokenLogprob | None) -> bool:
        """Send the text of a token; return True if the text completes a stop string."""
        text, self._is_stopped = self._stops.add(self._decoder.add(token))
        shown = text if self._tool_calls is None else self._tool_calls.add(text)
        self._send(Delta(self._index, shown, () if logprob is None else (logprob,), num_tokens=1))
        return self._is_stopped

    def on_end_token(self, logprob: TokenLogprob) -> None:
        """Send the log-probability of the EOS token, which has no text and does not count as generated."""
        self._send(Delta(self._index, logprobs=(logprob,)))

    def on_end(self, reason: str | Exception) -> None:
        """Send the text that was held back, the tool calls and the finish reason; after an error, only the error."""
        if isinstance(reason, Exception):
            self._send(Delta(self._index, error=reason))
            return
        text = ""
        if not self._is_stopped:
            text, found = self._stops.add(self._decoder.finish())
            text += "" if found else self._stops.finish()
            reason = STOP if found else reason
        if self._tool_calls is not None:
            shown = self._tool_calls.add(text)
            rest, calls = self._tool_calls.finish()
            text = shown + rest
            if calls:
                self._send(Delta(self._index, text, tool_calls=calls))
                text, reason = "", TOOL_CALLS if reason == STOP else reason
        self._send(Delta(self._index, text, finish_reason=reason))
