"""Requests to the engine of continuous batching, and the state of running requests.

Shapes: V vocab.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paddlenlp_ext.generation.decoding_options import DecodingOptions
from paddlenlp_ext.generation.grammar import GrammarState
from paddlenlp_ext.generation.logits_processors import (
    LogitAdjustments,
    ModelLogits,
    apply_temperature,
    on_host,
)
from paddlenlp_ext.generation.logprobs import TokenLogprob, token_logprobs
from paddlenlp_ext.generation.sampling import TokenChooser, most_likely

STOP, LENGTH = "stop", "length"
"""Finish reasons of a request: STOP after an end token, at the end of the grammar, or if `on_token` returned True;
LENGTH at the token limit."""
COST_WITH_LOGPROBS = 8
"""Cost of a prompt token whose log-probability is returned. The cost of any other prompt token is 1."""
_COST_OF_SHORT_PROMPT = 1024
"""Maximum cost of a prompt that counts as one request in the load of a client (client_shares.py)."""


@dataclass(kw_only=True, eq=False)
class Request:
    """Generation request: a prompt, its options, and callbacks for the results.

    Attributes:
        prompt: token ids of the prompt, at least one.
        max_new_tokens: maximum number of new tokens; 0 to compute only the log-probabilities of the prompt.
        decoding: sampling options, and the end tokens.
        row: index of the request among requests with the same seed; the index selects the random generator.
        adjustments: penalties and biases of single tokens.
        grammar: grammar state at the start of the answer, which changes while the request runs; None without a
            grammar.
        adapter: name of the adapter; an unknown name selects the base model.
        client: name of the client; the engine shares its time among the clients.
        num_top: number of most likely tokens whose log-probabilities are returned at each position; None: `on_token`
            gets no log-probabilities.
        on_prompt: function called once with the log-probabilities of all prompt tokens except the first; None to skip
            their computation.
        on_token: function called with each new token; returns True to end the request.
        on_end_token: function called with the log-probability of the end token; None to skip its computation.
        on_end: function called once at the end with STOP, LENGTH or an exception.
        logprob_temperature: divisor of the logits from which the returned log-probabilities of new tokens are computed.
        siblings: requests with the same prompt, adapter and client, which join the batch after the prefill of this
            request and copy its keys and values. Until then, cancelling this request removes its siblings too.
        is_cancelled: flag that any thread may set to remove the request. No callback is called afterwards.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    decoding: DecodingOptions
    on_token: Callable[[int, TokenLogprob | None], bool]
    on_end: Callable[[str | Exception], None]
    on_prompt: Callable[[list[TokenLogprob]], None] | None = None
    on_end_token: Callable[[TokenLogprob], None] | None = None
    row: int = 0
    adjustments: LogitAdjustments = field(default_factory=LogitAdjustments)
    grammar: GrammarState | None = None
    adapter: str = ""
    client: str = ""
    num_top: int | None = None
    logprob_temperature: float = 1.0
    siblings: Sequence[Request] = ()
    is_cancelled: bool = False

    @property
    def cost_per_prompt_token(self) -> int:
        """Time of a prompt token, relative to a prompt token without log-probabilities."""
        return 1 if self.on_prompt is None else COST_WITH_LOGPROBS

    @property
    def prefill_load(self) -> int:
        """Load of the prefill, as a number of requests with short prompts (client_shares.py)."""
        return math.ceil(len(self.prompt) * self.cost_per_prompt_token / _COST_OF_SHORT_PROMPT)


class RunningRow:
    """State of a request in the batch.

    Attributes:
        tokens: prompt and new tokens.
        ended: finish reason or error; None while the row runs.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.tokens = list(request.prompt)
        self.chooser = TokenChooser(request.decoding)
        self.prompt_logprobs: list[TokenLogprob] = []
        self.ended: str | Exception | None = None
        decoding = request.decoding
        is_plain = decoding.decode_strategy == "greedy_search" and decoding.repetition_penalty == 1.0
        may_end = decoding.min_new_tokens == 0
        is_free = request.adjustments == LogitAdjustments() and request.grammar is None
        self.takes_most_likely = is_plain and may_end and is_free

    @property
    def number(self) -> int:
        """Index that selects the random generator of the row."""
        return self.request.row

    @property
    def num_generated(self) -> int:
        """Number of new tokens."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def grammar(self) -> GrammarState | None:
        """Position in the grammar of the answer; None without a grammar."""
        return self.request.grammar

    def take(self, logits_1V: ModelLogits, most_likely: int | None) -> None:
        """Choose the next token, append it unless it is an end token, and call the callbacks of the request.

        Args:
            logits_1V: logits of the row.
            most_likely: most likely token if `takes_most_likely` is set, otherwise None.
        """
        request, token = self.request, most_likely
        if token is None:
            adjusted_1V = request.adjustments.apply(logits_1V, self.tokens[len(request.prompt) :])
            token = self.chooser.choose(adjusted_1V, [self])[0]
        if token in request.decoding.eos_token_ids:
            if request.on_end_token is not None:
                request.on_end_token(self._logprob(logits_1V, token))
            self.ended = STOP
            return
        self.tokens.append(token)
        if self.grammar is not None:
            self.grammar.advance(token)
        logprob = None if request.num_top is None else self._logprob(logits_1V, token)
        if request.on_token(token, logprob) or (self.grammar is not None and self.grammar.is_complete):
            self.ended = STOP
        elif self.num_generated >= request.max_new_tokens:
            self.ended = LENGTH

    def _logprob(self, logits_1V: ModelLogits, token: int) -> TokenLogprob:
        logits = apply_temperature(on_host(logits_1V), self.request.logprob_temperature)
        return token_logprobs(logits, [token], self.request.num_top or 0)[0]


def take_tokens(rows: Sequence[RunningRow], logits_BV: ModelLogits) -> None:
    """Choose the next token of each row; an exception ends only the row that raised it."""
    best_B = most_likely(logits_BV) if any(row.takes_most_likely for row in rows) else []
    for index, row in enumerate(rows):
        try:
            row.take(logits_BV[index : index + 1], best_B[index] if row.takes_most_likely else None)
        except Exception as error:
            row.ended = error
