"""Cases of `make bench`, as data; bench.py replaces the names in braces.

{model}   the built-in SmolLM2-135M-Instruct, unpacked into a Hugging Face folder that all programs read
{gsm8k}   the folder passed with --gsm8k, with rows in train.json and dev.json: {"src": ..., "tgt": ...}
{rows}    the documents of each optimizer step of GSM8K_KEYS, exported once (export_rows.py)
"""

from __future__ import annotations

from dataclasses import dataclass

PYTHONS = {"torch": ".venv-peers/bin/python", "paddlenlp": ".venv-paddlenlp/bin/python"}
"""Interpreter of each environment, below the root of the project; `ours` is the interpreter that runs bench.py."""

MODEL_KEYS = "--model_name_or_path {model}"
LORA_KEYS = f"{MODEL_KEYS} --lora true --lora_rank 8"
BF16_KEYS = "--bf16 true"
NF4_KEYS = "--weight_quantize_algo nf4"
GSM8K_KEYS = (
    "--dataset_name_or_path {gsm8k} --src_length 512 --max_length 2048 --zero_padding true --greedy_zero_padding true "
    "--per_device_train_batch_size 1 --gradient_accumulation_steps 2"
)


@dataclass(frozen=True)
class Program:
    """Row of a case: a module of this package, run in one environment.

    Attributes:
        label: name in tables and plots.
        environment: "ours", or a key of PYTHONS.
        command: the module's name in this package and its arguments; bench.py adds `--steps N`.
        steps: number of timed steps, if fewer than bench.py's, for a program that takes minutes per step.
    """

    label: str
    environment: str
    command: str
    steps: int | None = None


@dataclass(frozen=True)
class Case:
    """Programs that do the same work, this project's first.

    Attributes:
        title: name of the case in tables.
        programs: programs to run in turn in every round.
        needs: required keys of a run; the case is skipped, with the reason, if the package rejects a key or reports
            that it has no effect.
    """

    title: str
    programs: tuple[Program, ...]
    needs: str = ""


def ours(command: str) -> Program:
    return Program("this project", "ours", command)


def torch(command: str, label: str = "transformers + peft") -> Program:
    return Program(label, "torch", command)


def gsm8k(dtype: str, keys: str) -> tuple[Program, ...]:
    """Return the programs: this project on packed rows; the peer on padded batches of 8 rows, and on single rows."""
    peer = f"peers.train_rows {{rows}} {{model}} --rank 8 --learning_rate 1e-4 --dtype {dtype} --micro_batch"
    return (
        ours(f"train_rows {LORA_KEYS} {GSM8K_KEYS} {keys}"),
        torch(f"{peer} 8", "transformers + peft, padded"),
        torch(f"{peer} 1", "transformers + peft, row by row"),
    )


def generation(batch: int, dtype: str, needs: str = "") -> Case:
    """Return the programs that decode 128 tokens greedily after prompts of 64 tokens."""
    arguments = f"--batch {batch} --dtype {dtype}"
    programs = (
        ours(f"generation {arguments}"),
        torch(f"peers.generation {{model}} {arguments}", "transformers"),
    )
    return Case(f"generation, batch {batch}, {dtype.replace('float', 'fp').replace('bfp', 'bf')}", programs, needs)


CASES = {
    "lora_fp32": Case(
        "LoRA r 8, 4 x 512 tokens, fp32",
        (
            ours(f"train_step {LORA_KEYS}"),
            torch("peers.train_step {model} --dtype float32"),
            Program("PaddleNLP as installed", "paddlenlp", "peers.paddlenlp_train_step {model}", steps=1),
        ),
    ),
    "lora_bf16": Case(
        "LoRA r 8, 4 x 512 tokens, bf16",
        (
            ours(f"train_step {LORA_KEYS} {BF16_KEYS}"),
            torch("peers.train_step {model} --dtype bfloat16"),
        ),
        needs=BF16_KEYS,
    ),
    "full_fp32": Case(
        "all weights, 4 x 512 tokens, fp32",
        (
            ours(f"train_step {MODEL_KEYS}"),
            torch("peers.train_step {model} --method full --dtype float32", "transformers"),
        ),
    ),
    "gsm8k_fp32": Case("LoRA r 8, rows of GSM8K, fp32", gsm8k("float32", "")),
    "gsm8k_bf16": Case("LoRA r 8, rows of GSM8K, bf16", gsm8k("bfloat16", BF16_KEYS), needs=BF16_KEYS),
    "qlora_nf4": Case(
        "QLoRA r 8, nf4, 4 x 512 tokens, fp32",
        (
            ours(f"train_step {LORA_KEYS} {NF4_KEYS}"),
            torch("peers.train_step {model} --dtype float32", "transformers + peft, not quantized"),
        ),
        needs=f"--lora true {NF4_KEYS}",
    ),
    "generate_1_fp32": generation(1, "float32"),
    "generate_8_fp32": generation(8, "float32"),
    "generate_1_bf16": generation(1, "bfloat16", needs=BF16_KEYS),
    "generate_8_bf16": generation(8, "bfloat16", needs=BF16_KEYS),
}
