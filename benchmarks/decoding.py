"""Speed of prompt processing and decoding on the CPU, compared with transformers and llama.cpp on the same cores.

    python -m benchmarks.decoding [--models smollm2 0.5b --batches 1 8 --prompt 64 --new 64 --repeats 5 --threads 2]

The programs run one at a time, each in a separate process, with random prompts and greedy decoding without an end
token. Formats: bf16; int8 (weight_only_int8, and Q8_0 in llama.cpp); nf4 (Q4_0 in llama.cpp). transformers runs in
bf16. The peers are in separate environments: `make .venv-peers/installed-torch .venv-llama-cpp/installed`; the
latter compiles llama.cpp for this processor (10 minutes). Models and GGUF files are written to build/decoding once.

`bandwidth` is the rate at which a step reads the stored weights, divided by the measured memory bandwidth.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import SHAPES, decoding_seconds, environment, random_documents

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "decoding"
ALGOS = {"bf16": None, "int8": "weight_only_int8", "nf4": "nf4"}
GGUF_TYPES = {"bf16": "bf16", "int8": "q8_0", "nf4": "q4_0"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--models", nargs="+", choices=["smollm2", "0.5b"], default=["smollm2", "0.5b"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--formats", nargs="+", choices=[*ALGOS], default=[*ALGOS])
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    for peer in _PEERS:
        default = str(ROOT / f".venv-{peer}" / "bin" / "python")
        parser.add_argument(f"--{peer}", default=default, help=f"Python with {_PEERS[peer]}")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    args = parser.parse_args()
    if args.worker is not None:
        print(json.dumps(run_ours(json.loads(args.worker))))
        return
    bandwidth = memory_bandwidth(args.threads)
    print(f"memory bandwidth: {bandwidth / 1e9:.1f} GB/s with {args.threads} threads")
    print("| model | format | batch | program | prompt tokens/s | decode tokens/s | times llama.cpp | bandwidth |")
    print("|---|---|---|---|---|---|---|---|")
    for model in args.models:
        files = {name: prepare(model, name) for name in ("folder", *(GGUF_TYPES[each] for each in args.formats))}
        for form in args.formats:
            for batch in args.batches:
                case = {"batch": batch, "format": form, **{key: vars(args)[key] for key in _SHARED}}
                print_rows(
                    model, case, measure(case, files, vars(args)), bandwidth, stored_bytes(files["folder"], form)
                )
    print(json.dumps({**vars(args), **environment("paddlepaddle")}))


_SHARED = ("prompt", "new", "repeats", "threads")
_PEERS = {"peers": "transformers", "llama-cpp": "llama.cpp"}
"""Name of an environment, without `.venv-` -> peer that runs in it."""


def measure(case: dict[str, Any], files: dict[str, Path], pythons: dict[str, str]) -> dict[str, dict[str, float]]:
    """Return the times, in seconds, of every program that supports the format."""
    folder, gguf = str(files["folder"]), str(files[GGUF_TYPES[case["format"]]])
    commands = {
        "paddlenlp_ext": ([sys.executable, "-m", "benchmarks.decoding", "--worker"], folder),
        "transformers": ([pythons["peers"], "-m", "benchmarks.peers.decoding"], folder),
        "llama.cpp": ([pythons["llama_cpp"], "-m", "benchmarks.peers.decoding_llama_cpp"], gguf),
    }
    if case["format"] != "bf16":
        del commands["transformers"]
    return {name: run({**case, "model": path}, command) for name, (command, path) in commands.items()}


def run(case: dict[str, Any], command: Sequence[Any]) -> dict[str, float]:
    """Run a worker with the number of threads of all programs; return the last line of its output."""
    threads = {name: str(case["threads"]) for name in ("MKL_NUM_THREADS", "OMP_NUM_THREADS")}
    done = subprocess.run(
        [*map(str, command), json.dumps(case)], cwd=ROOT, env={**os.environ, **threads}, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def run_ours(case: dict[str, Any]) -> dict[str, float]:
    """Return the times of this package, in seconds."""
    from paddlenlp_ext import AutoModelForCausalLM, configure_runtime

    configure_runtime()
    from paddlenlp_ext.quantization.config import QuantizationConfig

    algo = ALGOS[case["format"]]
    quantization = None if algo is None else QuantizationConfig(algo=algo)
    model = AutoModelForCausalLM.from_pretrained(case["model"], dtype="bfloat16", quantization_config=quantization)
    prompts = random_documents(case["batch"], case["prompt"]).tolist()

    def generate(count: int) -> None:
        rows = model.generate(prompts, max_new_tokens=count, eos_token_id=None, batch_size=case["batch"])
        assert [len(row) for row in rows] == [count] * case["batch"]

    return decoding_seconds(generate, case["new"], case["repeats"])


def print_rows(
    model: str, case: dict[str, Any], results: dict[str, dict[str, float]], bandwidth: float, num_bytes: float
) -> None:
    """Print a line of the table for every program."""
    batch, slowest = case["batch"], results["llama.cpp"]["step"]
    for program, seconds in results.items():
        rates = f"{batch * case['prompt'] / seconds['prompt']:.0f} | {batch / seconds['step']:.1f}"
        share = f"{num_bytes / seconds['step'] / bandwidth:.0%}" if program == "paddlenlp_ext" else ""
        ratio = slowest / seconds["step"]
        print(f"| {model} | {case['format']} | {batch} | {program} | {rates} | {ratio:.2f} | {share} |", flush=True)


def prepare(model: str, form: str) -> Path:
    """Return the folder of a model, or its GGUF file in a format; write it if it does not exist."""
    path = FOLDER / (model if form == "folder" else f"{model}-{form}.gguf")
    if path.exists():
        return path
    FOLDER.mkdir(parents=True, exist_ok=True)
    if form != "folder":
        files = ["--model_name_or_path", str(prepare(model, "folder")), "--output_file", str(path), "--outtype", form]
        subprocess.run([sys.executable, ROOT / "llm" / "export_gguf.py", *files], cwd=ROOT, check=True)
        return path
    from paddlenlp_ext import AutoModelForCausalLM, AutoTokenizer, configure_runtime

    configure_runtime()
    source = "smollm2-135m-instruct"
    if model == "smollm2":
        built = AutoModelForCausalLM.from_pretrained(source, dtype="bfloat16")
    else:
        built = AutoModelForCausalLM.from_config(SHAPES[model], dtype="bfloat16")
    built.save_pretrained(path)
    AutoTokenizer.from_pretrained(source).save_pretrained(path)
    return path


def stored_bytes(folder: Path, form: str) -> float:
    """Return the bytes of the weights that a step reads: linear layers in the format, and lm_head in bf16."""
    config = json.loads((folder / "config.json").read_text())
    hidden, heads = config["hidden_size"], config["num_attention_heads"] + config["num_key_value_heads"]
    layer = hidden * (2 * heads * config["head_dim"] + 3 * config["intermediate_size"])
    bytes_per_weight = {"bf16": 2.0, "int8": 1.0, "nf4": 0.5 + 4 / 64}[form]
    return config["num_hidden_layers"] * layer * bytes_per_weight + 2.0 * hidden * config["vocab_size"]


def memory_bandwidth(threads: int, num_bytes: int = 1 << 29, repeats: int = 5) -> float:
    """Return the bytes per second at which `threads` threads read arrays larger than the caches."""
    arrays = [np.ones(num_bytes // 4 // threads, np.float32) for _ in range(threads)]
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(repeats):
            start = time.perf_counter()
            list(pool.map(np.max, arrays))
            best = max(best, num_bytes / (time.perf_counter() - start))
    return best


if __name__ == "__main__":
    main()
