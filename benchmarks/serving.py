"""Load test of the server: tokens per second and latency of 1, 8 and 64 clients, errors and mixed-up answers.

    python -m benchmarks.serving [--model smollm2-135m-instruct --seconds 120 --clients 1,8,64 --new 32]

The server runs in a separate process. Each client sends one greedy request after another, and streams every second
answer. Every answer is compared with the answer of `generate`, which is computed first. A wrong answer that equals the
answer to another request counts as mixed up. Other wrong answers count as different, because rounding depends on the
batch size. Clients share the processor with the server.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from paddlenlp_ext import configure_runtime

configure_runtime()  # before Paddle is imported

import numpy as np

from benchmarks.measure import report
from paddlenlp_ext import AutoModelForCausalLM, AutoTokenizer
from paddlenlp_ext.utils.run_command import run_command

SUBJECTS = ("the sea", "bread", "a bicycle", "the moon", "tea", "an old tree", "chess", "rain")
TASKS = (
    "Name three facts about {}.",
    "Explain {} to a child.",
    "Write a short poem about {}.",
    "Why do people like {}?",
)
PROMPTS = tuple(task.format(subject) for task in TASKS for subject in SUBJECTS)


@dataclass
class Results:
    """Results of all clients of a run; times in seconds."""

    latencies: list[float] = field(default_factory=list)
    first_tokens: list[float] = field(default_factory=list)
    tokens: int = 0
    errors: list[str] = field(default_factory=list)
    mixed_up: int = 0
    different: int = 0


async def post(port: int, body: dict) -> tuple[int, bytes, float]:
    """Send a chat request; return the status, the body, and the time at which the first token arrives."""
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n"
    writer.write(f"{head}Content-Type: application/json\r\nConnection: close\r\n\r\n".encode() + data)
    await writer.drain()
    status = int((await reader.readline()).split()[1])
    is_chunked = False
    while (line := await reader.readline()) not in (b"\r\n", b""):
        is_chunked |= line.lower().startswith(b"transfer-encoding: chunked")
    parts, first = [], None
    while True:
        size = int(await reader.readline(), 16) if is_chunked else -1
        part = await (reader.readexactly(size + 2) if is_chunked else reader.read())
        first = first or time.perf_counter()
        if not is_chunked or size == 0:
            parts.append(b"" if is_chunked else part)
            break
        parts.append(part[:-2])
        if size and b'"content":""' in part:  # the first event of a stream has no token
            first = None
    writer.close()
    return status, b"".join(parts), first or time.perf_counter()


async def client(number: int, args: argparse.Namespace, port: int, expected: Sequence[str], until: float, out: Results):
    """Send one request after another until `until` (seconds of `time.perf_counter`)."""
    turn = number
    while time.perf_counter() < until:
        index, stream = turn % len(PROMPTS), bool(turn % 2)
        turn += 1
        body = {"model": args.name, "messages": [{"role": "user", "content": PROMPTS[index]}], "temperature": 0}
        body |= {"max_tokens": args.new, "stream": stream}
        if stream:
            body["stream_options"] = {"include_usage": True}
        began = time.perf_counter()
        try:
            status, data, first = await post(port, body)
            if status != 200:
                raise ValueError(f"status {status}: {data[:200]!r}")
            text, tokens = _read(data, stream)
        except (OSError, ValueError, KeyError, asyncio.IncompleteReadError) as error:
            out.errors.append(repr(error))
            continue
        out.latencies.append(time.perf_counter() - began)
        if stream:
            out.first_tokens.append(first - began)
        out.tokens += tokens
        if text != expected[index]:
            out.mixed_up += text in expected
            out.different += text not in expected


def _read(data: bytes, stream: bool) -> tuple[str, int]:
    """Return the text and the number of tokens of a response."""
    if not stream:
        answer = json.loads(data)
        return answer["choices"][0]["message"]["content"], answer["usage"]["completion_tokens"]
    *events, done = data.decode().removesuffix("\n\n").split("\n\n")
    if done != "data: [DONE]":
        raise ValueError(f"the stream ends with {done!r}")
    values = [json.loads(event.removeprefix("data: ")) for event in events]
    text = "".join(value["choices"][0]["delta"].get("content", "") for value in values[:-1])
    return text, values[-1]["usage"]["completion_tokens"]


async def run_clients(num_clients: int, args: argparse.Namespace, port: int, expected: Sequence[str]) -> dict:
    """Run the clients; return their figures."""
    out, began = Results(), time.perf_counter()
    until = began + args.seconds
    await asyncio.gather(*(client(number, args, port, expected, until, out) for number in range(num_clients)))
    seconds = time.perf_counter() - began
    for error in out.errors[:5]:
        print(f"error: {error}", file=sys.stderr)
    percentiles = {
        f"{name}_p{p}_s": round(float(np.percentile(values, p)), 3) if values else None
        for name, values in (("latency", out.latencies), ("first_token", out.first_tokens))
        for p in (50, 90, 99)
    }
    figures = {
        "clients": num_clients,
        "requests": len(out.latencies),
        "tokens_per_second": round(out.tokens / seconds, 1),
    }
    return {
        **figures,
        **percentiles,
        "errors": len(out.errors),
        "mixed_up": out.mixed_up,
        "different": out.different,
    }


def expected_answers(args: argparse.Namespace) -> list[str]:
    """Return the greedy answers of `generate`."""
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=args.dtype)
    ids = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for prompt in PROMPTS
    ]
    ends = {*model.eos_token_ids, tokenizer.eos_token_id}
    rows = model.generate(ids, max_new_tokens=args.new, eos_token_id=sorted(ends), batch_size=8)
    return [tokenizer.decode(row, skip_special_tokens=True) for row in rows]


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--seconds", type=float, default=120, help="seconds of the test with each number of clients")
    parser.add_argument("--clients", default="1,8,64", help="list of client counts, tested one after another")
    parser.add_argument("--new", type=int, default=32, help="number of new tokens of each answer")
    parser.add_argument("--max_batch_size", type=int, default=16)
    args = parser.parse_args(argv)
    args.name = "model"

    expected = expected_answers(args)
    words = ["--model_name_or_path", args.model, "--served_model_name", args.name]
    words += ["--dtype", args.dtype, "--max_batch_size", str(args.max_batch_size)]
    with running_server(words) as port:
        asyncio.run(run_clients(1, argparse.Namespace(**{**vars(args), "seconds": 1}), port, expected))  # warm up
        runs = [asyncio.run(run_clients(int(number), args, port, expected)) for number in args.clients.split(",")]
    for figures in runs:
        report("serving", {**vars(args), **figures}, "paddlepaddle")
    by_clients = {figures["clients"]: figures["tokens_per_second"] for figures in runs}
    if {1, 8} <= by_clients.keys():
        print(f"tokens/s of 8 clients over 1: {by_clients[8] / by_clients[1]:.2f}")


@contextlib.contextmanager
def running_server(words: Sequence[str]) -> Iterator[int]:
    """Yield the port of a server with these arguments; end it with SIGTERM and print its exit code."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([sys.executable, "-m", "paddlenlp_ext.serve", *words, "--port", str(port)])
    try:
        _wait_for(port, server)
        yield port
    finally:
        server.terminate()
        print(f"exit code of the server after SIGTERM: {server.wait(90)}")


def _wait_for(port: int, server: subprocess.Popen) -> None:
    while server.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health"):
                return
        except OSError:
            time.sleep(0.2)
    raise ValueError(f"the server ended with code {server.returncode}")


if __name__ == "__main__":
    run_command(main)
