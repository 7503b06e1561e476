"""Check chats, streams, tools, log-probabilities and structured answers with openai, litellm, LangChain and instructor.

`check_server_in_openai.py` calls it. The clients' answers need not make sense, because the model is small; they must
have the requested form.
"""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import instructor
import jsonschema
import litellm
import openai
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict, Field

from tests.common.json_schemas import closed, random_schema

KEY, MAX_TOKENS = "unused", 200
MESSAGES: list[Any] = [{"role": "user", "content": "Ada Lovelace is 36 years old. Describe her as JSON."}]


class Strict(BaseModel):
    """A model without other properties, which a small model would write until the token limit."""

    model_config = ConfigDict(extra="forbid")


class Address(Strict):
    """An address."""

    city: str = Field(max_length=12)
    zip_code: str | None = Field(pattern=r"^\d{5}$")


class Person(Strict):
    """A person."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=150)
    job: Literal["writer", "engineer"]
    address: Address


class Add(Strict):
    """Add two numbers."""

    a: int = Field(ge=0, le=99)
    b: int = Field(ge=0, le=99)


def check_clients(url: str, model: str) -> None:
    """Run all checks against a server whose OpenAI API is at `url`."""
    client = openai.OpenAI(base_url=url, api_key=KEY)
    for check in (check_openai, check_random_schemas, check_litellm, check_langchain, check_instructor):
        check(client, url, model)
        print(f"{check.__name__}: all answers have the requested form", flush=True)


def check_openai(client: openai.OpenAI, url: str, model: str) -> None:
    request: dict[str, Any] = {"model": model, "messages": MESSAGES, "max_tokens": MAX_TOKENS}
    parsed = client.chat.completions.parse(**request, response_format=Person, n=2, logprobs=True)
    assert all(isinstance(choice.message.parsed, Person) and choice.logprobs.content for choice in parsed.choices)
    with client.chat.completions.stream(**request, response_format=Person) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Person)
    tool = openai.pydantic_function_tool(Add)
    for choice in ("required", {"type": "function", "function": {"name": "Add"}}):
        called = client.chat.completions.parse(**request, tools=[tool], tool_choice=choice, parallel_tool_calls=False)
        (call,) = called.choices[0].message.tool_calls
        assert isinstance(call.function.parsed_arguments, Add)
    with client.chat.completions.stream(
        **request, tools=[tool], tool_choice="required", parallel_tool_calls=False
    ) as stream:  # a small model would write calls until the token limit
        streamed = stream.get_final_completion().choices[0].message.tool_calls
    assert streamed and all(isinstance(each.function.parsed_arguments, Add) for each in streamed)
    result = {"role": "tool", "tool_call_id": call.id, "content": "5"}
    messages = [*MESSAGES, called.choices[0].message.model_dump(exclude_none=True, exclude={"parsed"}), result]
    assert client.chat.completions.create(**{**request, "messages": messages}, tools=[tool]).choices[0].finish_reason
    free = client.chat.completions.create(**request, response_format={"type": "json_object"}, temperature=0)
    assert free.choices[0].finish_reason == "length" or isinstance(json.loads(free.choices[0].message.content), dict)
    extra = {"structured_outputs": {"regex": r"[A-Z][a-z]{2,9}\."}}
    word = client.chat.completions.create(**request, extra_body=extra).choices[0].message.content
    assert word.endswith(".") and word[:-1].isalpha()
    try:
        client.chat.completions.create(**request, extra_body={"structured_outputs": {"regex": "("}})
    except openai.BadRequestError as error:
        assert error.param == "structured_outputs.regex"
    else:
        raise AssertionError("an invalid pattern is accepted")


def check_random_schemas(client: openai.OpenAI, url: str, model: str) -> None:
    """Ask for 100 random schemas, eight at a time; every answer must be complete and valid.

    A model may write digits of a number without end, so an answer that reaches the token limit is asked for again.
    """
    rng = random.Random(7)
    schemas = [closed(random_schema(rng)) for _ in range(100)]

    def ask(schema: dict[str, Any]) -> int:
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
        request = {"model": model, "messages": MESSAGES, "max_tokens": 400, "response_format": form}
        for seed in range(1, 6):
            choice = client.chat.completions.create(**request, seed=seed).choices[0]
            if choice.finish_reason == "stop":
                jsonschema.validate(json.loads(choice.message.content), schema)
                return seed
        raise AssertionError(f"no answer to {schema} is complete")

    with ThreadPoolExecutor(8) as pool:
        num_requests = sum(pool.map(ask, schemas))
    print(f"{len(schemas)} answers to random schemas are complete and valid, after {num_requests} requests")


def check_litellm(client: openai.OpenAI, url: str, model: str) -> None:
    request: dict[str, Any] = {"model": f"openai/{model}", "api_base": url, "api_key": KEY, "messages": MESSAGES}
    request["max_tokens"] = MAX_TOKENS
    plain = litellm.completion(**{**request, "max_tokens": 5}, logprobs=True, top_logprobs=2)
    assert plain.choices[0].message.content and len(plain.choices[0].logprobs.content[0].top_logprobs) == 2
    free = list(litellm.completion(**{**request, "max_tokens": 5}, stream=True))
    assert "".join(part.choices[0].delta.content or "" for part in free)
    parts = list(litellm.completion(**request, stream=True, response_format=Person))
    Person.model_validate_json("".join(part.choices[0].delta.content or "" for part in parts))
    Person.model_validate_json(litellm.completion(**request, response_format=Person).choices[0].message.content)
    tools = [openai.pydantic_function_tool(Add)]
    (call,) = (
        litellm.completion(**request, tools=tools, tool_choice="required", parallel_tool_calls=False)
        .choices[0]
        .message.tool_calls
    )
    Add.model_validate_json(call.function.arguments)
    parts = list(
        litellm.completion(**request, tools=tools, tool_choice="required", parallel_tool_calls=False, stream=True)
    )
    (streamed,) = litellm.stream_chunk_builder(parts).choices[0].message.tool_calls[:1]
    Add.model_validate_json(streamed.function.arguments)


def check_langchain(client: openai.OpenAI, url: str, model: str) -> None:
    chat = ChatOpenAI(model=model, base_url=url, api_key=KEY, max_tokens=MAX_TOKENS, max_retries=0)
    question = MESSAGES[0]["content"]
    short = ChatOpenAI(model=model, base_url=url, api_key=KEY, max_tokens=5, logprobs=True).invoke(question)
    assert short.content and short.response_metadata["logprobs"]["content"]
    assert "".join(part.text for part in chat.bind(max_tokens=5).stream(question))
    for method in ("json_schema", "function_calling"):
        assert isinstance(chat.with_structured_output(Person, method=method).invoke(question), Person)
    for choice in ("required", "Add"):
        bound = chat.bind_tools([Add], tool_choice=choice, parallel_tool_calls=False)
        answer = bound.invoke("2 + 3?")
        (call,) = answer.tool_calls
        Add.model_validate(call["args"])
        *_, (streamed, *_) = (calls for part in bound.stream("2 + 3?") if (calls := part.tool_call_chunks))
        assert streamed["args"]
        conversation = [HumanMessage("2 + 3?"), answer, ToolMessage("5", tool_call_id=call["id"])]
        assert chat.bind(max_tokens=5).invoke(conversation).response_metadata["finish_reason"]


def check_instructor(client: openai.OpenAI, url: str, model: str) -> None:
    request: dict[str, Any] = {"model": model, "messages": MESSAGES, "max_tokens": MAX_TOKENS, "max_retries": 0}
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        structured = instructor.from_openai(client, mode=mode)
        person, raw = structured.chat.completions.create_with_completion(
            **request, response_model=Person, logprobs=True, top_logprobs=2
        )
        assert isinstance(person, Person) and len(raw.choices[0].logprobs.content[0].top_logprobs) == 2
        plain = structured.chat.completions.create(**{**request, "max_tokens": 5}, response_model=None)
        assert plain.choices[0].message.content
        *_, last = structured.chat.completions.create_partial(**request, response_model=Person)
        Person.model_validate(last.model_dump())
