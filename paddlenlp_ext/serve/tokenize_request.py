"""Convert the body of a request to token ids; runs in the processes of request_reader_processes.py.

body --> GenerationRequest --> model --> prompts as token ids --> check of the context
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paddlenlp_ext.serve.errors import ApiError, invalid
from paddlenlp_ext.serve.parse_request import ChatRequest, GenerationRequest, parse_chat, parse_completion
from paddlenlp_ext.serve.response_format_field import AnswerFormat
from paddlenlp_ext.serve.served_models import ModelCatalog, ServedModel
from paddlenlp_ext.serve.tool_call_parser import answer_or_calls

_MAX_ECHOED_LOGPROBS = 1 << 20
"""Maximum number of log-probabilities of prompt tokens in a response, about 130 MB in memory."""


@dataclass(frozen=True)
class ReadRequest:
    """Request whose prompts are token ids.

    Attributes:
        options: the fields of the request; messages and prompts are removed.
        prompts: token ids of each prompt.
        max_new_tokens: maximum number of new tokens after each prompt.
        prompt_texts: text of each prompt if the request has `echo`, otherwise empty.
    """

    options: GenerationRequest
    prompts: Sequence[list[int]]
    max_new_tokens: Sequence[int]
    prompt_texts: Sequence[str] = ()


@dataclass(frozen=True)
class RequestReader:
    """Reader of request bodies.

    Attributes:
        catalog: the served models.
        max_choices: maximum number of choices per request.
    """

    catalog: ModelCatalog
    max_choices: int

    def read_chat(self, body: bytes) -> ReadRequest:
        """Read the body of /v1/chat/completions.

        Raises:
            ApiError: the body or a field is invalid, the model is unknown, or the prompt exceeds the context.
        """
        parsed = parse_chat(body)
        model = self.catalog.find(parsed.model)
        prompts = [model.encode_chat(parsed.conversation)]
        parsed = replace(parsed, answer_format=_chat_format(parsed, model))
        limits = self._limits(parsed, model, prompts)
        parsed = replace(parsed, conversation=replace(parsed.conversation, messages=()))
        return ReadRequest(parsed, prompts, limits)

    def read_completion(self, body: bytes) -> ReadRequest:
        """Read the body of /v1/completions.

        Raises:
            ApiError: see `read_chat`; or the response would have too many log-probabilities.
        """
        parsed = parse_completion(body, self.max_choices)
        model = self.catalog.find(parsed.model)
        prompts = model.encode_prompts(parsed.prompts)
        limits = self._limits(parsed, model, prompts)
        texts = model.prompt_texts(parsed.prompts) if parsed.echo else ()
        if parsed.echo and parsed.num_top is not None:
            num_logprobs = sum(map(len, prompts)) * parsed.num_choices * (1 + parsed.num_top)
            limit = max(_MAX_ECHOED_LOGPROBS, self.catalog.max_total_length * (1 + parsed.num_top))
            if num_logprobs > limit:
                problem = f"the response would have {num_logprobs} log-probabilities of prompts; the maximum is {limit}"
                raise invalid("logprobs", f"{problem}; send several requests")
        return ReadRequest(replace(parsed, prompts=()), prompts, limits, texts)

    def _limits(self, parsed: GenerationRequest, model: ServedModel, prompts: Sequence[list[int]]) -> list[int]:
        """Return the maximum number of new tokens after each prompt; check the size and the grammar of the request."""
        limits = [_max_new_tokens(len(prompt), parsed.max_tokens, self.catalog.max_total_length) for prompt in prompts]
        if len(prompts) * parsed.num_choices > self.max_choices:
            raise invalid("n", f"more than {self.max_choices} answers are requested; send several requests")
        if any(token >= model.vocab_size for token in parsed.adjustments.logit_bias):
            problem = f"a token id is not below {model.vocab_size}, the size of the vocabulary"
            raise invalid("logit_bias", problem)
        if parsed.answer_format is not None:  # only a check: processes cannot exchange compiled grammars
            model.compile(parsed.answer_format)
        return limits


def _max_new_tokens(num_prompt: int, requested: int | None, max_total_length: int) -> int:
    """Return the maximum number of new tokens after a prompt of `num_prompt` tokens.

    Raises:
        ApiError: prompt and answer exceed the context.
    """
    if num_prompt + (1 if requested is None else requested) > max_total_length:
        limit = f"the limit of prompt and answer together is {max_total_length}"
        problem = f"the prompt has {num_prompt} tokens; {limit}; shorten the prompt"
        if requested is not None:
            problem = f"the prompt has {num_prompt} tokens and max_tokens is {requested}; {limit}; reduce one of them"
        raise ApiError(400, problem, "context_length_exceeded", "max_tokens")
    return max_total_length - num_prompt if requested is None else requested


def _chat_format(parsed: ChatRequest, model: ServedModel) -> AnswerFormat | None:
    """Return the format of an answer, which may consist of tool calls; None for free text."""
    form, tools = parsed.answer_format, parsed.conversation.tools
    answer = None if form is None else form.grammar
    try:
        grammar = answer_or_calls(model.template, tools, parsed.max_calls, parsed.forced_tools, answer)
    except ValueError as error:
        raise invalid("tools", str(error)) from None
    return form if grammar is answer or grammar is None else AnswerFormat("tools", grammar)
