"""Timing, memory and environment (device, versions, commit) of every benchmark, without Paddle or PyTorch."""

from __future__ import annotations

import datetime
import importlib.metadata
import itertools
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

# the published speeds of this project are for the shape of SmolLM2-135M
SMOLLM2_SHAPE = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_QWEN2_5 = {
    **SMOLLM2_SHAPE,
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
}
SHAPES = {
    "smollm2": SMOLLM2_SHAPE,
    "0.5b": {
        **_QWEN2_5,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
    },
    "1.5b": {
        **_QWEN2_5,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "head_dim": 128,
    },
    "qwen3.5-0.8b": {
        "model_type": "qwen3_5_text",
        "architectures": ["Qwen3_5ForCausalLM"],
        "vocab_size": 248320,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        "tie_word_embeddings": True,
        "attention_bias": False,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
}
"""Shapes of SmolLM2-135M, Qwen2.5-0.5B and Qwen2.5-1.5B with the vocabulary of SmolLM2, and of Qwen3.5-0.8B."""


def random_documents(documents: int, length: int, vocab_size: int = SMOLLM2_SHAPE["vocab_size"]) -> np.ndarray:
    """Return token ids [documents, length], equal in every program."""
    return np.random.default_rng(0).integers(0, vocab_size, (documents, length))


def random_pairs(
    pairs: int, prompt: int, answer: int, vocab_size: int = SMOLLM2_SHAPE["vocab_size"]
) -> list[dict[str, list[int]]]:
    """Return pairs of answers as token ids, equal in every program; lengths are 75 % to 125 % of the given length."""
    generator = np.random.default_rng(0)
    rows = []
    for _ in range(pairs):
        sizes = [int(size * generator.uniform(0.75, 1.25)) for size in (prompt, answer, answer)]
        ids = [generator.integers(0, vocab_size, max(1, size)).tolist() for size in sizes]
        rows.append(dict(zip(("prompt_ids", "chosen_ids", "rejected_ids"), ids, strict=True)))
    return rows


def num_pair_tokens(pair: dict[str, list[int]]) -> int:
    """Return the number of tokens of a pair as two sequences, each with its prompt; all programs count this number."""
    return 2 * len(pair["prompt_ids"]) + len(pair["chosen_ids"]) + len(pair["rejected_ids"])


def time_steps(step: Callable[[], object], count: int, tokens: int) -> dict[str, object]:
    """Run an untimed step of `tokens` tokens and `count` timed steps; return the result of `tokens_per_second`."""
    step()
    seconds = []
    for _ in range(count):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return tokens_per_second([tokens] * count, seconds)


def decoding_seconds(generate: Callable[[int], object], new: int, repeats: int) -> dict[str, float]:
    """Return the median seconds of a prompt with its first token, and of each of `new` further decoding steps.

    Args:
        generate: function that processes the prompts and generates the given number of tokens for each prompt.
        new: number of steps.
        repeats: number of times that both calls are timed, after an untimed call.
    """
    generate(2)
    prompt, steps = [], []
    for _ in range(repeats):
        start = time.perf_counter()
        generate(1)
        first = time.perf_counter()
        generate(1 + new)
        prompt.append(first - start)
        steps.append((time.perf_counter() - first - prompt[-1]) / new)
    return {"prompt": statistics.median(prompt), "step": statistics.median(steps)}


def tokens_per_second(tokens: Sequence[int], seconds: Sequence[float]) -> dict[str, object]:
    """Return the median over steps of tokens per second, and the rate of each step."""
    rates = [count / time for count, time in zip(tokens, seconds, strict=True)]
    return {
        "tokens_per_second": round(statistics.median(rates), 1),
        "tokens": list(tokens),
        "seconds": [round(time, 4) for time in seconds],
    }


def sample_rates(samples: int, ends: Sequence[float], mean_lengths: Sequence[float]) -> dict[str, object]:
    """Return rates of steps that sample completions and train on them; the first step is not timed.

    Args:
        samples: completions of a step.
        ends: time at which each step ended, in seconds.
        mean_lengths: mean number of tokens of a completion, for each step.
    """
    seconds = [end - start for start, end in itertools.pairwise(ends)]
    tokens = [round(samples * length) for length in mean_lengths[1:]]
    return {
        "samples_per_second": round(statistics.median(samples / time for time in seconds), 2),
        **tokens_per_second(tokens, seconds),
    }


def peak_memory_gb() -> float:
    """Return the peak resident memory of this process in GB (10^9 bytes).

    Read from /proc where it exists: getrusage also counts the memory that the parent had when it started this process.
    """
    status = Path("/proc/self/status")
    for line in status.read_text().splitlines() if status.exists() else ():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def environment(*packages: str) -> dict[str, str]:
    """Return date, processor with number of logical cores, versions of Python and the named packages, and commit."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    describe = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(describe, capture_output=True, text=True, cwd=Path(__file__).parent, check=False).stdout
    return {
        "date": datetime.date.today().isoformat(),
        "processor": f"{names[0]}, {len(names)} cores" if names else platform.machine(),
        "python": platform.python_version(),
        **{package: importlib.metadata.version(package) for package in packages},
        "commit": commit.strip(),
    }


def report(name: str, figures: dict[str, object], *packages: str, peak_gb: float | None = None) -> None:
    """Print one JSON line: the figures, the peak memory (by default this process's), and the environment."""
    peak_gb = peak_memory_gb() if peak_gb is None else peak_gb
    line = {"benchmark": name, **figures, "peak_memory_gb": round(peak_gb, 2), **environment(*packages)}
    json.dump(line, sys.stdout)
    sys.stdout.write("\n")
