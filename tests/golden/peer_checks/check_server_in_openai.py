"""Check the server with clients of OpenAI's API, and with lm-evaluation-harness on the task of `export_for_openai.py`.

Runs in an environment with the packages of requirements-lm-eval.txt. PYTHON is the interpreter of this project,
and starts the server:

    python -m tests.golden.peer_checks.check_server_in_openai OUT PYTHON
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": "unused"}
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "true"  # otherwise litellm downloads its list of prices

import openai
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from tests.golden.peer_checks.check_structured_clients import check_clients

NAME, MAX_DIFFERENCE = "model", 2e-4


def main() -> None:
    out, python = Path(sys.argv[1]), sys.argv[2]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    words = ["--model_name_or_path", str(out / "model"), "--port", url.rpartition(":")[2]]
    server = subprocess.Popen([python, "-m", "paddlenlp_ext.serve", *words])
    try:
        wait_for(f"{url}/health", server)
        check_openai(openai.OpenAI(base_url=f"{url}/v1"))
        check_clients(f"{url}/v1", NAME)
        check_lm_eval(out, url)
    finally:
        server.terminate()
        code = server.wait(90)
    assert code == 0, f"the server ended with code {code}"
    print("openai, litellm, LangChain, instructor and lm-evaluation-harness agree with the server")


def wait_for(url: str, server: subprocess.Popen) -> None:
    while server.poll() is None:
        try:
            with urllib.request.urlopen(url):
                return
        except OSError:
            time.sleep(0.2)
    raise AssertionError(f"the server ended with code {server.returncode}")


def check_openai(client: openai.OpenAI) -> None:
    """Chat, stream, ask for log-probabilities, several answers, and errors."""
    assert [model.id for model in client.models.list()] == [NAME]
    request = {
        "model": NAME,
        "messages": [{"role": "user", "content": "Say hello."}],
        "max_tokens": 12,
        "temperature": 0,
    }
    full = client.chat.completions.create(**request, logprobs=True, top_logprobs=3)
    choice = full.choices[0]
    assert full.usage.completion_tokens >= len(choice.logprobs.content) > 0
    assert all(entry.top_logprobs[0].token == entry.token for entry in choice.logprobs.content), (
        "greedy tokens are best"
    )
    assert "".join(entry.token for entry in choice.logprobs.content) == choice.message.content
    parts = list(client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert text == choice.message.content and parts[-1].usage == full.usage
    parts = list(client.chat.completions.create(**request, logprobs=True, top_logprobs=3, stream=True))
    streamed = [entry for part in parts for each in part.choices if each.logprobs for entry in each.logprobs.content]
    assert [entry.token for entry in streamed] == [entry.token for entry in choice.logprobs.content]
    several = client.chat.completions.create(**{**request, "temperature": 1}, n=3, seed=1)
    assert len({each.message.content for each in several.choices}) > 1
    echoed = client.completions.create(
        model=NAME, prompt="The sea is", max_tokens=3, echo=True, logprobs=2, temperature=0
    )
    assert echoed.choices[0].text.startswith("The sea is") and echoed.choices[0].logprobs.token_logprobs[0] is None
    for change, error in (
        ({"model": "none"}, openai.NotFoundError),
        ({"temperature": 9}, openai.BadRequestError),
        ({"max_tokens": 10**6}, openai.BadRequestError),
    ):
        try:
            client.chat.completions.create(**{**request, **change})
        except error as found:
            assert found.body["message"], found
        else:
            raise AssertionError(f"{change} is no error")


def check_lm_eval(out: Path, url: str) -> None:
    """Compare the log-likelihoods of each choice, and whether it is greedy, with those computed directly."""
    arguments = f"model={NAME},base_url={url}/v1/completions,tokenizer={out / 'model'},tokenizer_backend=huggingface"
    results = simple_evaluate(
        model="local-completions",
        model_args=f"{arguments},num_concurrent=4,max_length=512",
        tasks=["local_choice"],
        task_manager=TaskManager(include_path=str(out / "task"), include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )
    samples = sorted(results["samples"]["local_choice"], key=lambda sample: sample["doc_id"])
    found = [response for sample in samples for response in sample["filtered_resps"]]
    expected = json.loads((out / "expected.json").read_text())
    largest = max(abs(own[0] - other[0]) for own, other in zip(found, expected, strict=True))
    print(f"{len(found)} log-likelihoods, largest difference {largest:.1e}; {results['results']['local_choice']}")
    assert largest < MAX_DIFFERENCE
    assert [bool(own[1]) for own in found] == [other[1] for other in expected]


if __name__ == "__main__":
    main()
