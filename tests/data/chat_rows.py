"""Conversations for the tests of chat templates, and what of them is learned under each template.

`EXPECTED` has a line for each row. Under each template, the digits are the answers that are targets, by their number in
the row; `|` separates examples, and `-` means that the template does not write the row.
"""

from __future__ import annotations

import json
from typing import Any

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Forecast of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
FUNCTION = {"name": "weather", "arguments": {"city": "Rome"}}
CALL = {"type": "function", "id": "7", "function": FUNCTION}
TEXT_CALL = {"function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
THINK = "<think>\n{}\n</think>\n\n{}"


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def result(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text}


def answer(text: str, thought: str | None = None, **fields: Any) -> dict[str, Any]:
    reasoning = {} if thought is None else {"reasoning_content": thought}
    return {"role": "assistant", "content": text, **reasoning, **fields}


def call(thought: str | None = None, text: str | None = None, calls: int = 1, **fields: Any) -> dict[str, Any]:
    return answer(text, thought, tool_calls=[CALL] * calls, **fields)


def row(*messages: dict[str, Any], tools: bool = False, **fields: Any) -> dict[str, Any]:
    return {"messages": list(messages), **({"tools": [TOOL]} if tools else {}), **fields}


Q1, Q2, Q3 = user("What is 2 + 2?"), user("And 3 + 3?"), user("And 4 + 4?")
A1, A2, A3 = answer("four"), answer("six"), answer("eight")
T1, T2, T3 = answer("four", "Two and two."), answer("six", "Three and three."), answer("eight", "Four\n\nand four.")
SUN, RAIN = result("sunny"), result("rain")
FUNCTION_CALL = {"from": "function_call", "value": json.dumps(FUNCTION)}

ROWS: dict[str, dict[str, Any]] = {
    "one": row(Q1, A1),
    "two": row(Q1, A1, Q2, A2),
    "three": row(Q1, A1, Q2, A2, Q3, A3),
    "system_one": row(system("Be brief."), Q1, A1),
    "system_two": row(Q1, A1, Q2, A2, system="Be brief."),
    "thought": row(Q1, T1),
    "thought_lines": row(Q1, T3),
    "thought_system": row(system("Be brief."), Q1, T1),
    "thoughts_two": row(Q1, T1, Q2, T2),
    "thoughts_three": row(Q1, T1, Q2, T2, Q3, T3),
    "thought_first": row(Q1, T1, Q2, A2),
    "thought_second": row(Q1, A1, Q2, T2),
    "inline": row(Q1, answer(THINK.format("Two and two.", "four"))),
    "inline_two": row(Q1, answer(THINK.format("One.", "four")), Q2, answer(THINK.format("Two.", "six"))),
    "inline_and_field": row(Q1, answer(THINK.format("Two and two.", "four"), "Two and two.")),
    "inline_empty": row(Q1, answer(THINK.format("", "four"))),
    "no_thinking": row(Q1, A1, enable_thinking=False),
    "no_thinking_two": row(Q1, A1, Q2, A2, chat_template_kwargs={"enable_thinking": False}),
    "thinking": row(Q1, T1, enable_thinking=True),
    "thinking_two": row(Q1, A1, Q2, A2, enable_thinking=True),
    "call": row(Q1, call(), SUN, A1, tools=True),
    "call_thoughts": row(Q1, call("Ask."), SUN, T1, tools=True),
    "call_thought": row(Q1, call("Ask."), SUN, A1, tools=True),
    "answer_thought": row(Q1, call(), SUN, T1, tools=True),
    "call_content": row(Q1, call(text="Let me see."), SUN, A1, tools=True),
    "call_as_text": row(Q1, answer("", tool_calls=[TEXT_CALL]), SUN, A1, tools=True),
    "two_calls": row(Q1, call(calls=2), SUN, RAIN, A1, tools=True),
    "two_steps": row(Q1, call(), SUN, call(), RAIN, A1, tools=True),
    "two_steps_thoughts": row(Q1, call("Ask."), SUN, call("Again."), RAIN, T1, tools=True),
    "call_then_turn": row(Q1, call(), SUN, A1, Q2, A2, tools=True),
    "turn_then_call": row(Q1, A1, Q2, call(), SUN, A2, tools=True),
    "two_turns_of_calls": row(Q1, call("Ask."), SUN, T1, Q2, call("Again."), RAIN, T2, tools=True),
    "call_last": row(Q1, call(), tools=True),
    "call_last_thought": row(Q1, call("Ask."), tools=True),
    "tools_unused": row(Q1, A1, Q2, A2, tools=True),
    "result_quoted": row(Q1, call(), result('{"sky": "clear"}\n'), A1, tools=True),
    "sharegpt": {"conversations": [{"from": "human", "value": "What?"}, {"from": "gpt", "value": "That."}] * 2},
    "sharegpt_call": {
        "conversations": [
            {"from": "human", "value": "Rome?"},
            FUNCTION_CALL,
            {"from": "observation", "value": "sunny"},
            {"from": "gpt", "value": "It is sunny."},
        ],
        "tools": json.dumps([TOOL["function"]]),
    },
    "alpaca": {"instruction": "And 3 + 3?", "output": "six", "history": [["What is 2 + 2?", "four"]]},
    "src_tgt": {"src": ["Was ist das?", "Und 你好?"], "tgt": ["Grüße", "你好!"]},
    "first_is_context": row(Q1, answer("four", weight=0), Q2, A2),
    "last_is_context": row(Q1, A1, Q2, answer("six", weight=0)),
    "system_later": row(Q1, A1, system("Be brief."), Q2, A2),
    "two_questions": row(Q1, Q2, A2),
    "question_last": row(Q1, A1, Q2),
    "spaces": row(user("  What?\n"), answer("  four \n")),
}

TEMPLATES = ("qwen2_5", "qwen3", "qwen3_5", "gemma3", "llama3_2", "gptoss", "smollm3")
EXPECTED = """
                    qwen2_5  qwen3    qwen3_5  gemma3  llama3_2  gptoss   smollm3
one                 1        1        1        1       1         1        1
two                 12       1|2      1|2      12      12        1|2      12
three               123      1|2|3    1|2|3    123     123       1|2|3    123
system_one          1        1        1        1       1         1        1
system_two          12       1|2      1|2      12      12        1|2      12
thought             -        1        1        -       -         1        1
thought_lines       -        1        1        -       -         1        1
thought_system      -        1        1        -       -         1        1
thoughts_two        -        1|2      1|2      -       -         1|2      12
thoughts_three      -        1|2|3    1|2|3    -       -         1|2|3    123
thought_first       -        1|2      1|2      -       -         1|2      12
thought_second      -        1|2      1|2      -       -         1|2      12
inline              1        1        1        1       1         1        1
inline_two          12       1|2      1|2      12      12        1|2      12
inline_and_field    1        1        1        1       1         1        1
inline_empty        1        1        1        1       1         1        1
no_thinking         -        1        1        -       -         -        1
no_thinking_two     -        1|2      1|2      -       -         -        12
thinking            -        1        1        -       -         -        1
thinking_two        -        1|2      1|2      -       -         -        12
call                12       1|2      12       -       12        12       -
call_thoughts       -        12       12       -       -         1|2      -
call_thought        -        12       12       -       -         1|2      -
answer_thought      -        1|2      12       -       -         12       -
call_content        12       1|2      12       -       -         1|2      -
call_as_text        12       1|2      12       -       12        12       -
two_calls           12       1|2      12       -       -         -        -
two_steps           123      1|2|3    123      -       123       123      -
two_steps_thoughts  -        123      123      -       -         12|3     -
call_then_turn      123      1|2|3    12|3     -       123       2|13     -
turn_then_call      123      1|2|3    1|23     -       123       1|23     -
two_turns_of_calls  -        12|34    12|34    -       -         1|2|3|4  -
call_last           1        1        1        -       1         1        -
call_last_thought   -        1        1        -       -         1        -
tools_unused        12       1|2      1|2      -       12        1|2      -
result_quoted       12       1|2      12       -       12        12       -
sharegpt            12       1|2      1|2      12      12        1|2      12
sharegpt_call       12       1|2      12       -       12        12       -
alpaca              12       1|2      1|2      12      12        1|2      12
src_tgt             12       1|2      1|2      12      12        1|2      12
first_is_context    2        2        2        2       2         2        2
last_is_context     1        1        1        1       1         1        1
system_later        12       1|2      -        -       12        -        -
two_questions       1        1        1        -       1         1        1
question_last       1        1        1        1       1         1        1
spaces              1        1        1        1       1         1        1
"""


def expected(template: str, name: str) -> list[list[int]] | None:
    """Return the numbers of the answers that each example of a row teaches; None if the row is refused."""
    lines = [line.split() for line in EXPECTED.strip().splitlines()]
    assert tuple(lines[0]) == TEMPLATES
    cells = {line[0]: line[1:] for line in lines[1:]}[name]
    cell = cells[TEMPLATES.index(template)]
    return None if cell == "-" else [[int(digit) for digit in part] for part in cell.split("|")]


def written_answers(name: str) -> list[tuple[str, str, int]]:
    """Return thought, content and number of calls of each answer of a row."""
    given = ROWS[name]
    if "src" in given:
        return [("", text, 0) for text in given["tgt"]]
    if "instruction" in given:
        return [("", text, 0) for text in (*(turn[1] for turn in given["history"]), given["output"])]
    if "conversations" in given:
        answers = [item for item in given["conversations"] if item["from"] in ("gpt", "function_call")]
        return [("", "", 1) if item["from"] == "function_call" else ("", item["value"], 0) for item in answers]
    found = []
    for message in given["messages"]:
        if message["role"] == "assistant":
            before, closed, content = (message["content"] or "").rpartition("</think>\n\n")
            thought = message.get("reasoning_content") or before.removeprefix("<think>").strip("\n")
            text = content if closed else message["content"] or ""
            found.append((thought, text, len(message.get("tool_calls", []))))
    return found


QWEN_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
XML_CALL = "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>"


def answer_text(template: str, thought: str, content: str, calls: int) -> str:
    """Return the target text of an answer, with its end token."""
    inline = f"<think>\n{thought}\n</think>\n\n" if thought else ""
    if template in ("qwen2_5", "qwen3"):
        between = "\n" if content and calls else ""
        return f"{inline}{content}{between}{chr(10).join([QWEN_CALL] * calls)}<|im_end|>"
    if template == "qwen3_5":
        between = "\n\n" if content and calls else ""
        # The generation prompt ends with the beginning of the thought.
        before = f"{thought}\n</think>\n\n" if thought else ""
        return f"{before}{content.strip()}{between}{chr(10).join([XML_CALL] * calls)}<|im_end|>"
    if template == "gemma3":
        return f"{inline}{content.strip()}<end_of_turn>"
    if template == "llama3_2":
        called = '{"name": "weather", "parameters": {"city": "Rome"}}' * calls
        return f"{inline}{content.strip()}{called}<|eot_id|>"
    if template == "smollm3":  # it marks the header and the line break after the answer, too
        return f"<|im_start|>assistant\n{inline}{content}<|im_end|>\n"
    assert template == "gptoss"
    thought = thought or (content if calls else "")
    analysis = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant" if thought else ""
    if calls:
        return f'{analysis} to=functions.weather<|channel|>commentary json<|message|>{{"city": "Rome"}}<|call|>'
    return f"{analysis}<|channel|>final<|message|>{content}<|return|>"
