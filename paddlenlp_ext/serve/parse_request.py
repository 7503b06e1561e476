"""Parse the bodies of /v1/chat/completions and /v1/completions.

Fields that OpenAI's API lacks have the names that vLLM uses, such as `top_k` and `chat_template_kwargs`.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paddlenlp_ext.data.prediction_prompts import parse_prompt
from paddlenlp_ext.data.rows.checked_values import dotted, type_name
from paddlenlp_ext.data.rows.conversation import ASSISTANT, SYSTEM, Conversation
from paddlenlp_ext.data.rows.errors import InvalidRowError
from paddlenlp_ext.data.rows.parse_messages import OPENAI_ROLES
from paddlenlp_ext.generation.decoding_options import DecodingOptions
from paddlenlp_ext.generation.logits_processors import LogitAdjustments
from paddlenlp_ext.serve.errors import ApiError, invalid
from paddlenlp_ext.serve.request_fields import Fields, check_texts, checked_text, parse_body
from paddlenlp_ext.serve.response_format_field import AnswerFormat, parse_answer_format

MAX_TOP_LOGPROBS = 20
MAX_STOPS = 16
_MAX_STOP_CHARS = 1000
_MAX_SEED = 2**63 - 1
_MAX_BIASES = 1024
_GREEDY_BELOW = 1e-3  # at lower temperatures, logits / temperature would overflow
_DEFAULT_COMPLETION_TOKENS = 16
_IDENTIFIERS = ("user", "metadata", "safety_identifier", "prompt_cache_key")
"""Fields that identify the request in OpenAI's logs; accepted without effect."""
_TEXT_PARTS = ("text", "reasoning", "thinking", "tool_call")
_UNSUPPORTED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("service_tier", ("auto", "default"), "remove the field"),
    ("store", (False,), "remove the field"),
    ("modalities", (["text"],), "ask for text only"),
    ("reasoning_effort", (), "set variables of the chat template in chat_template_kwargs"),
    ("verbosity", (), "remove the field"),
    ("audio", (), "remove the field"),
    ("prediction", (), "remove the field"),
    ("web_search_options", (), "remove the field"),
    ("functions", ([],), "use tools"),
    ("function_call", ("auto", "none"), "use tools"),
    ("suffix", ("",), "write the text after the answer into the prompt"),
)


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """Fields that chat requests and completion requests share.

    Attributes:
        model: name of the model.
        max_tokens: maximum number of new tokens; None: as many as the context allows.
        decoding: sampling options, without EOS tokens and token limit.
        adjustments: logit bias and penalties.
        num_choices: number of choices for each prompt.
        stops: stop strings.
        stream: send server-sent events.
        include_usage: send the token counts at the end of a stream.
        num_top: number of most likely tokens to return with log-probabilities; None: no log-probabilities.
        echo: return the prompt before the completion; always false in a chat.
        answer_format: grammar of the answer's text; None for free text.
    """

    model: str
    max_tokens: int | None
    decoding: DecodingOptions
    adjustments: LogitAdjustments
    num_choices: int
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    num_top: int | None
    echo: bool = False
    answer_format: AnswerFormat | None = None


@dataclass(frozen=True, kw_only=True)
class ChatRequest(GenerationRequest):
    """Chat completion request.

    Attributes:
        conversation: the messages and tools.
        max_calls: maximum number of tool calls in an answer; None: no limit.
        forced_tools: tools from which the answer calls at least one; empty: the answer need not call a tool.
    """

    conversation: Conversation
    max_calls: int | None
    forced_tools: tuple[str, ...] = ()

    @property
    def tool_names(self) -> frozenset[str]:
        """Names of the tools that the answer may call."""
        return frozenset(tool["function"]["name"] for tool in self.conversation.tools)


@dataclass(frozen=True, kw_only=True)
class CompletionRequest(GenerationRequest):
    """Completion request; each prompt is a string or token ids."""

    prompts: tuple[str | list[int], ...]


def parse_chat(body: bytes) -> ChatRequest:
    """Parse the body of /v1/chat/completions.

    Raises:
        ApiError: the body is not a JSON object, or a field is missing, unknown, not supported or has an invalid value.
    """
    fields = parse_body(body)
    with_logprobs = fields.flag("logprobs")
    num_top = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS)
    if num_top is not None and not with_logprobs:
        raise invalid("top_logprobs", "has no effect without logprobs; set logprobs to true")
    limits = [fields.integer(name, 1, 2**31) for name in ("max_tokens", "max_completion_tokens")]
    if None not in limits and limits[0] != limits[1]:
        raise invalid("max_tokens", "max_completion_tokens has a different value; send one of the two")
    max_tokens = limits[0] if limits[1] is None else limits[1]
    conversation, choice = _conversation(fields), fields.get("tool_choice")
    is_parallel = fields.flag("parallel_tool_calls", default=True) and not isinstance(choice, dict)
    forced = _forced_tools(choice, [tool["function"]["name"] for tool in conversation.tools])
    common = _common(fields, max_tokens=max_tokens, num_top=(num_top or 0) if with_logprobs else None)
    return ChatRequest(conversation=conversation, max_calls=None if is_parallel else 1, forced_tools=forced, **common)


def parse_completion(body: bytes, max_prompts: int) -> CompletionRequest:
    """Parse the body of /v1/completions.

    Raises:
        ApiError: see `parse_chat`; or there are more than `max_prompts` prompts.
    """
    fields = parse_body(body)
    prompts, echo = _prompts(fields.get("prompt")), fields.flag("echo")
    if len(prompts) > max_prompts:
        raise invalid("prompt", f"there are {len(prompts)} prompts; send at most {max_prompts}")
    max_tokens = fields.integer("max_tokens", 0, 2**31)
    if max_tokens == 0 and not echo:
        raise invalid("max_tokens", "0 returns nothing without echo; set echo to true, or send at least 1")
    num_top, best_of = fields.integer("logprobs", 0, MAX_TOP_LOGPROBS), fields.integer("best_of", 1, 128)
    common = _common(
        fields, max_tokens=_DEFAULT_COMPLETION_TOKENS if max_tokens is None else max_tokens, num_top=num_top
    )
    if best_of not in (None, common["num_choices"]):
        raise invalid("best_of", "only the value of n is supported; leave the field out, or send the value of n")
    return CompletionRequest(prompts=prompts, echo=echo, **common)


def _common(fields: Fields, **own: Any) -> dict[str, Any]:
    """Return the arguments of `GenerationRequest`; called last, because it rejects fields that have not been read."""
    model = fields.text("model")
    if model is None:
        raise _missing("model", "the name of a model from /v1/models")
    for name in _IDENTIFIERS:
        fields.get(name)
    for name, accepted, remedy in _UNSUPPORTED:
        fields.require(name, accepted, remedy)
    stream = fields.flag("stream")
    stream_options = fields.object("stream_options")
    if stream_options is not None and not stream:
        raise invalid("stream_options", "has no effect without a stream; set stream to true")
    include_usage = stream_options is not None and stream_options.flag("include_usage")
    if stream_options is not None:
        stream_options.flag("include_obfuscation")
        stream_options.check_all_read()
    arguments = {
        "model": model,
        "decoding": _decoding(fields),
        "adjustments": LogitAdjustments(
            fields.number("frequency_penalty", 0.0, -2, 2),
            fields.number("presence_penalty", 0.0, -2, 2),
            _biases(fields),
        ),
        "num_choices": fields.integer("n", 1, 128) or 1,
        "stops": _stops(fields.get("stop")),
        "stream": stream,
        "include_usage": include_usage,
        "answer_format": parse_answer_format(fields),
        **own,
    }
    fields.check_all_read()
    return arguments


def _missing(name: str, expected: str) -> ApiError:
    return invalid(name, f"the field is missing; send {expected}", "missing_required_parameter")


def _decoding(fields: Fields) -> DecodingOptions:
    temperature, seed = fields.number("temperature", 1.0, 0, 2), fields.integer("seed", 0, _MAX_SEED)
    is_greedy = temperature < _GREEDY_BELOW
    return DecodingOptions(
        max_new_tokens=1,
        decode_strategy="greedy_search" if is_greedy else "sampling",
        temperature=1.0 if is_greedy else temperature,
        top_p=fields.number("top_p", 1.0, 0, 1),
        top_k=fields.integer("top_k", 0, 2**31) or 0,
        repetition_penalty=fields.number("repetition_penalty", 1.0, 0.01, 100),
        seed=secrets.randbelow(2**31) if seed is None else seed,
    )


def _stops(value: Any) -> tuple[str, ...]:
    stops = [] if value is None else value if isinstance(value, list) else [value]
    if len(stops) > MAX_STOPS:
        raise invalid("stop", f"there are {len(stops)} stop strings; send at most {MAX_STOPS}")
    for stop in stops:
        if not checked_text("stop", stop) or len(stop) > _MAX_STOP_CHARS:
            raise invalid("stop", f"a stop string has {len(stop)} characters; send 1 to {_MAX_STOP_CHARS}")
    return tuple(stops)


def _biases(fields: Fields) -> dict[int, float]:
    given = fields.get("logit_bias") or {}
    if not isinstance(given, dict) or len(given) > _MAX_BIASES:
        raise invalid("logit_bias", f"send an object with at most {_MAX_BIASES} pairs of a token id and a number")
    biases = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 10):
            raise invalid("logit_bias", f"the key {key[:40]!r} is not a token id")
        biases[int(key)] = Fields({key: value}, "logit_bias.").number(key, 0.0, -100, 100)
    return biases


def _conversation(fields: Fields) -> Conversation:
    """Return the conversation to continue; its last message must come from a user or a tool."""
    messages, tools = fields.get("messages"), fields.get("tools") or []
    if messages is None:
        raise _missing("messages", "a list of messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
        raise invalid("messages", "send a list of at least one object with role and content")
    last = messages[-1].get("role")
    kind = OPENAI_ROLES.get(last) if isinstance(last, str) else None
    if kind in (ASSISTANT, SYSTEM):
        raise invalid(
            f"messages.{len(messages) - 1}",
            f"the last message has the role {last!r}; end with a message of a user or tool",
        )
    row: dict[str, Any] = {"messages": [{k: v for k, v in each.items() if v is not None} for each in messages]}
    if not isinstance(tools, list):
        raise invalid("tools", f"the value is {type_name(tools)}; send a list")
    if tools and fields.get("tool_choice") != "none":
        row["tools"] = tools
    if (variables := fields.get("chat_template_kwargs")) is not None:
        row["chat_template_kwargs"] = variables
    check_texts(row, "")
    _check_parts(row["messages"])
    try:
        return parse_prompt(row).conversation
    except InvalidRowError as error:
        path = dotted(error.path) if error.path else "messages"
        raise invalid(path, str(error)) from None


def _forced_tools(choice: Any, tools: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the tools that `tool_choice` forces the answer to call."""
    if choice in (None, "auto", "none"):
        return ()
    if choice == "required":
        if not tools:
            raise invalid("tool_choice", "there are no tools to call; send tools, or set tool_choice to auto")
        return tuple(tools)
    fields = Fields(choice, "tool_choice.") if isinstance(choice, dict) else None
    if fields is None or fields.get("type") != "function":
        raise invalid("tool_choice", 'send auto, none, required, or {"type": "function", "function": {"name": NAME}}')
    function = fields.object("function")
    name = None if function is None else function.text("name")
    if function is None or name is None or name not in tools:
        raise invalid(
            "tool_choice.function.name", f"send the name of a tool: {', '.join(tools)[:200] or 'there are none'}"
        )
    function.check_all_read()
    fields.check_all_read()
    return (name,)


def _check_parts(messages: list[dict[str, Any]]) -> None:
    """Check that no content part of a message is an image, audio or a file."""
    for index, message in enumerate(messages):
        parts = message.get("content")
        for number, part in enumerate(parts if isinstance(parts, list) else ()):
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind not in _TEXT_PARTS:
                problem = f"the part has the type {kind[:40]!r}; the model reads text only, so send parts of type text"
                raise invalid(f"messages.{index}.content.{number}", problem)


def _prompts(value: Any) -> tuple[str | list[int], ...]:
    """Return the prompts in `value`: a string, a list of token ids, or a list of strings and lists of token ids."""
    if value is None:
        raise _missing("prompt", "a string or token ids")
    if isinstance(value, str):
        return (checked_text("prompt", value),)
    if not isinstance(value, list) or not value:
        raise invalid("prompt", "send a string, token ids, or a list of at least one of these")
    if all(type(each) is int for each in value):
        return (value,)
    for index, each in enumerate(value):
        if isinstance(each, list):
            if not each or not all(type(token) is int for token in each):
                raise invalid(f"prompt.{index}", "send at least one token id, each a whole number")
        else:
            checked_text(f"prompt.{index}", each)
    return tuple(value)
