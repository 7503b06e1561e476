"""Write OUT/model, a folder of SmolLM2, and OUT/task, a multiple-choice task with the log-likelihoods computed here.

`check_server_in_openai.py` compares them with those of lm-evaluation-harness through the server.

    python -m tests.golden.peer_checks.export_for_openai OUT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from paddlenlp_ext import configure_runtime

configure_runtime()  # before Paddle is imported

import paddle

from paddlenlp_ext import AutoModelForCausalLM, AutoTokenizer

MODEL = "smollm2-135m-instruct"
TEMPLATE = """\
{%- if tools %}<|im_start|>system
Call functions as <tool_call>{"name": ..., "arguments": ...}</tool_call>. Functions: {{ tools | tojson }}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or "" }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""ChatML with tools, which the template of the model lacks."""
QUESTIONS = (
    ("The capital of France is", ("Paris", "Rome", "a banana")),
    ("Water freezes at a temperature of", ("0 degrees Celsius", "90 degrees Celsius", "three kilograms")),
    ("Bees make", ("honey", "steel", "a long and very detailed list of the kings of Norway")),
    ("2 + 2 =", ("4", "5", "22")),
    ("The opposite of hot is", ("cold", "warm", "Tuesday")),
    ("Grün ist eine", ("Farbe", "Zahl", "早")),
)
TASK = """\
task: local_choice
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: 0
metric_list:
  - metric: acc
metadata:
  version: 1
"""


@paddle.no_grad()
def main() -> None:
    out = Path(sys.argv[1]).resolve()
    (out / "task").mkdir(parents=True, exist_ok=True)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(MODEL), AutoTokenizer.from_pretrained(MODEL)
    tokenizer.chat_template = TEMPLATE
    model.save_pretrained(out / "model")
    tokenizer.save_pretrained(out / "model")
    expected = []
    for question, choices in QUESTIONS:
        start = len(tokenizer(question)["input_ids"])
        for choice in choices:
            ids = tokenizer(f"{question} {choice}")["input_ids"]
            lines = paddle.nn.functional.log_softmax(
                model(paddle.to_tensor([ids]))[0].astype("float64"), axis=-1
            ).numpy()
            pairs = [(lines[index - 1], ids[index]) for index in range(start, len(ids))]
            is_greedy = all(line.argmax() == token for line, token in pairs)
            expected.append([float(sum(line[token] for line, token in pairs)), is_greedy])
    rows = [json.dumps({"question": question, "choices": choices}) for question, choices in QUESTIONS]
    (out / "task" / "rows.jsonl").write_text("\n".join(rows) + "\n")
    (out / "task" / "local_choice.yaml").write_text(TASK.format(file=out / "task" / "rows.jsonl"))
    (out / "expected.json").write_text(json.dumps(expected))


if __name__ == "__main__":
    main()
