"""Attack a server from one address, and measure the requests of a client at another address. Linux only.

    python -m tests.stress.attack_server                                       # tiny model, every attack at once
    python -m tests.stress.attack_server unread echo --model smollm2-135m-instruct --requests 100

The server runs on this computer. The attackers use the address 127.0.0.2. Rounds without and with attacks alternate.
The script prints the latencies of the other client and of /health, and after each round the server's memory and number
of file descriptors.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import http.client
import json
import multiprocessing
import os
import random
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from tests.common.server_process import server_process
from tests.stress.wide_bodies import CHAT, COMPLETIONS, wide_bodies

ATTACKER, CLIENT = "127.0.0.2", "127.0.0.1"
_TIMEOUT, _PAUSE = 600.0, 0.01
"""Seconds after which a request fails, and between two requests of a thread."""


@dataclass(frozen=True)
class Target:
    """Server under attack.

    Attributes:
        port: port of the server.
        model: name of the model.
        context: maximum number of tokens of a prompt and its answer.
        ends: tokens that end an answer.
        num_entries: number of entries in the fields of wide bodies.
    """

    port: int
    model: str
    context: int
    ends: tuple[int, ...]
    num_entries: int = 100_000

    def completion(self, prompt: Any, max_tokens: int, **options: Any) -> bytes:
        """Return the body of a greedy completion that does not end before the limit."""
        biases = {str(token): -100 for token in self.ends}
        body = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        return json.dumps({**body, "logit_bias": biases, **options}).encode()

    def endless(self, **options: Any) -> bytes:
        """Return the body of a completion that fills the context."""
        return self.completion([65, 66], self.context - 2, **options)

    def connect(self, source: str) -> http.client.HTTPConnection:
        """Return a connection from an address."""
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=_TIMEOUT, source_address=(source, 0))

    def send(self, source: str, path: str, body: bytes) -> http.client.HTTPConnection:
        """Send a request, and return its connection."""
        connection = self.connect(source)
        connection.request("POST", path, body, {"content-type": "application/json"})
        return connection

    def post(self, source: str, path: str, body: bytes) -> tuple[int, bytes]:
        """Send a request, and return the status and the body of the response."""
        with contextlib.closing(self.send(source, path, body)) as connection:
            reply = connection.getresponse()
            return reply.status, reply.read()


@functools.cache
def _keys_body() -> bytes:
    names = ", ".join(f'"{index}": 0' for index in range(40_000))
    return f'{{{names}, "39999": 0}}'.encode()


def _keys(target: Target, stop: Event) -> None:
    target.post(ATTACKER, CHAT, _keys_body())


@functools.cache
def _messages_body(model: str) -> bytes:
    messages = [{"role": "system", "content": f"{index}"} for index in range(15_000)]
    return json.dumps({"model": model, "messages": [*messages, {"role": "user", "content": "a"}]}).encode()


def _messages(target: Target, stop: Event) -> None:
    connection = target.send(ATTACKER, CHAT, _messages_body(target.model))
    if random.random() < 0.5:
        connection.getresponse().read()
    connection.close()


def _unread(target: Target, stop: Event) -> None:
    connection = target.send(ATTACKER, COMPLETIONS, target.endless(stream=True, logprobs=5))
    stop.wait(20)
    connection.close()


def _echo(target: Target, stop: Event) -> None:
    prompt = [65 + index % 26 for index in range(target.context - 1)]
    target.post(ATTACKER, COMPLETIONS, target.completion(prompt, 1, echo=True, logprobs=5))


def _many(target: Target, stop: Event) -> None:
    target.post(ATTACKER, COMPLETIONS, target.endless(n=16))


def _leave(target: Target, stop: Event) -> None:
    target.send(ATTACKER, COMPLETIONS, target.endless(n=4)).close()


_wide_bodies = functools.cache(lambda model, count: list(wide_bodies(model, count)))


def _wide(target: Target, stop: Event) -> None:
    _, path, body = random.choice(_wide_bodies(target.model, target.num_entries))
    target.post(ATTACKER, path, body)


def _headers(target: Target, stop: Event) -> None:
    with socket.create_connection(("127.0.0.1", target.port), 10, (ATTACKER, 0)) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 100_000 + b"\r\n\r\n")
        connection.recv(65536)


Attack = Callable[[Target, Event], None]
ATTACKS: dict[str, tuple[Attack, int]] = {
    "keys": (_keys, 2),
    "messages": (_messages, 6),
    "unread": (_unread, 16),
    "echo": (_echo, 2),
    "many": (_many, 4),
    "leave": (_leave, 1),
    "wide": (_wide, 4),
    "headers": (_headers, 1),
}
"""Name -> one request of the attack, and the number of threads that repeat it."""


@contextmanager
def attacked(target: Target, names: list[str]) -> Iterator[Any]:
    """Run attacks in another process during the block; yield the shared number of requests."""
    context = multiprocessing.get_context("fork")
    stop, count = context.Event(), context.Value("q", 0)
    process = context.Process(target=_attack, args=(target, names, stop, count), daemon=True)
    process.start()
    try:
        yield count
    finally:
        stop.set()
        process.join(10)
        process.kill()
        process.join()


def _attack(target: Target, names: list[str], stop: Event, count: Any) -> None:
    def repeat(attack: Attack) -> None:
        while not stop.is_set():
            with count.get_lock():
                count.value += 1
            with contextlib.suppress(OSError, http.client.HTTPException):  # refused or reset, as it should be
                attack(target, stop)
            stop.wait(_PAUSE)

    for name in names:
        attack, num_threads = ATTACKS[name]
        for _ in range(num_threads):
            threading.Thread(target=repeat, args=(attack,), daemon=True).start()
    stop.wait()
    os._exit(0)


def ask(target: Target, num_tokens: int = 48) -> tuple[float, str]:
    """Return the latency of a greedy completion in seconds, and its text."""
    body = target.completion("Once upon a time", num_tokens)
    started = time.perf_counter()
    status, reply = target.post(CLIENT, COMPLETIONS, body)
    assert status == 200, reply
    return time.perf_counter() - started, json.loads(reply)["choices"][0]["text"]


def health(target: Target) -> float:
    """Return the latency of /health in seconds."""
    started = time.perf_counter()
    with contextlib.closing(target.connect(CLIENT)) as connection:
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200
    return time.perf_counter() - started


def resources(pid: int) -> tuple[float, int]:
    """Return the memory of the server in MiB, and its number of descriptors."""
    kinds = {
        name.split()[0]: int(name.split()[1]) for name in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    }
    return kinds["Pss:"] / 1024, len(os.listdir(f"/proc/{pid}/fd"))


def percentile(values: list[float], share: float) -> float:
    """Return the smallest value that is not below `share` of all values."""
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


@dataclass
class Latencies:
    """Latencies in seconds of the other client, idle and under attack, and of /health under attack."""

    idle: list[float]
    attacked: list[float]
    health: list[float]

    def report(self) -> str:
        """Return a table of the medians, the 99th percentiles and the ratio to idle."""
        idle = percentile(self.idle, 0.99)
        lines = [f"{'':12}{'requests':>10}{'median':>10}{'p99':>10}{'p99/idle':>10}"]
        for name, values in (("idle", self.idle), ("attacked", self.attacked), ("/health", self.health)):
            p99 = percentile(values, 0.99)
            ratio = f"{p99 / idle:10.2f}" if values is not self.health else ""
            lines.append(f"{name:12}{len(values):10}{percentile(values, 0.5):9.3f}s{p99:9.3f}s{ratio}")
        return "\n".join(lines)


def run(target: Target, pid: int, names: list[str], num_requests: int, num_rounds: int) -> Latencies:
    """Alternate idle and attacked rounds; print the server's resources before the first and after each round."""
    if "wide" in names:
        _wide_bodies(target.model, target.num_entries)  # inherited by the attackers
    found, expected = Latencies([], [], []), ask(target)[1]
    print("before: {:.0f} MiB, {} descriptors".format(*resources(pid)))
    for number in range(num_rounds):
        for _ in range(num_requests // num_rounds):
            found.idle.append(ask(target)[0])
        with attacked(target, names) as count:
            while count.value < sum(ATTACKS[name][1] for name in names):
                time.sleep(0.1)
            for _ in range(num_requests // num_rounds):
                seconds, text = ask(target)
                assert text == expected, "the answer changed under attack"
                found.attacked.append(seconds)
                found.health.append(health(target))
            sent = count.value
        _settle(target)
        memory, descriptors = resources(pid)
        print(f"round {number + 1}: {sent} requests of the attackers; {memory:.0f} MiB, {descriptors} descriptors")
    return found


def _settle(target: Target) -> None:
    """Wait until the server answers as if idle: three requests in a row, and no connection of an attacker."""
    time.sleep(2)
    for _ in range(3):
        ask(target)


@contextmanager
def chosen_server(model: str | None) -> Iterator[tuple[Target, int]]:
    """Start the server of a model, or of the tiny model of the tests; yield the target and the process id."""
    words = ["--max_body_bytes", str(1 << 24), "--transfer_timeout", "5"]
    if model is not None:
        with server_process(model, *words, "--served_model_name", "base", "--max_total_length", "4096") as (
            process,
            port,
        ):
            yield Target(port, "base", 4096, ends=(0, 2)), process.pid
        return
    from tests.serve.tiny_server import write_models

    with tempfile.TemporaryDirectory() as folder:
        write_models(Path(folder))
        with server_process(str(Path(folder) / "base"), *words) as (process, port):
            yield Target(port, "base", 256, ends=(256,)), process.pid


def main(arguments: list[str]) -> int:
    """Attack a server; return 1 if the 99th percentile of the other client is more than twice its idle figure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("attacks", nargs="*", help=f"names of attacks, by default all: {', '.join(ATTACKS)}")
    parser.add_argument("--model", help="model folder or name; unset: the tiny model of the tests")
    parser.add_argument("--requests", type=int, default=1000, help="number of requests without and with attacks")
    parser.add_argument("--rounds", type=int, default=4, help="number of rounds without and with attacks")
    options = parser.parse_args(arguments)
    with chosen_server(options.model) as (target, pid):
        found = run(target, pid, options.attacks or list(ATTACKS), options.requests, options.rounds)
    print(found.report())
    return int(percentile(found.attacked, 0.99) > 2 * percentile(found.idle, 0.99))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
