"""Communication and memory of every layout: formulas (parallel_cost_model.py), runs, and estimates for large models.

    python -m benchmarks.parallel_cost                  # writes docs/parallel_cost.md; about three minutes
    python -m benchmarks.parallel_cost --on_paper_only  # prints the estimates for large models

Runs are launched over gloo. Every process of a run executes this file, with `--counted_run`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.measure import environment
from benchmarks.parallel_cost_model import Layout, Step, bytes_sent, memory
from paddlenlp_ext.config.parallel_degrees import Degrees
from paddlenlp_ext.models.decoder_config import DecoderConfig
from paddlenlp_ext.nn.recompute import RecomputePlan

PAGE = ROOT / "docs" / "parallel_cost.md"
NUM_STEPS, LENGTH, MICRO_BATCHES = 2, 128, 4
MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
# name, processes, layout, keys
RUNS: list[tuple[str, int, Layout, dict[str, Any]]] = [
    ("one process", 1, Layout(degrees=Degrees()), {}),
    ("one process, recompute", 1, Layout(degrees=Degrees()), {"recompute": True}),
    ("tensor 2", 2, Layout(degrees=Degrees(tensor=2)), {"tensor_parallel_degree": 2}),
    (
        "tensor 2, recompute",
        2,
        Layout(degrees=Degrees(tensor=2)),
        {"tensor_parallel_degree": 2, "recompute": True},
    ),
    (
        "tensor 2, sequence parallel",
        2,
        Layout(degrees=Degrees(tensor=2), sequence_parallel=True),
        {"tensor_parallel_degree": 2, "sequence_parallel": True},
    ),
    ("pipeline 2", 2, Layout(degrees=Degrees(pipeline=2)), {"pipeline_parallel_degree": 2}),
    (
        "pipeline 2, 2 chunks each",
        2,
        Layout(degrees=Degrees(pipeline=2), virtual=2),
        {"pipeline_parallel_degree": 2, "virtual_pp_degree": 2},
    ),
    ("data 2", 2, Layout(degrees=Degrees(data=2)), {}),
    *[
        (f"sharding 2, stage {n}", 2, Layout(degrees=Degrees(sharding=2), stage=n), {"sharding": f"stage{n}"})
        for n in (1, 2, 3)
    ],
    ("data 4", 4, Layout(degrees=Degrees(data=4)), {}),
    ("tensor 4", 4, Layout(degrees=Degrees(tensor=4)), {"tensor_parallel_degree": 4}),
    (
        "tensor 2 x pipeline 2",
        4,
        Layout(degrees=Degrees(tensor=2, pipeline=2)),
        {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2},
    ),
    (
        "tensor 2, sequence parallel x pipeline 2",
        4,
        Layout(degrees=Degrees(tensor=2, pipeline=2), sequence_parallel=True),
        {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2, "sequence_parallel": True},
    ),
    (
        "tensor 2 x sharding 2, stage 2",
        4,
        Layout(degrees=Degrees(tensor=2, sharding=2), stage=2),
        {"tensor_parallel_degree": 2, "sharding": "stage2"},
    ),
    ("sharding 4, stage 3", 4, Layout(degrees=Degrees(sharding=4), stage=3), {"sharding": "stage3"}),
]


def micro_batches(layout: Layout) -> int:
    """Return the micro-batches of a step per replica."""
    return MICRO_BATCHES // (layout.degrees.data * layout.degrees.sharding)


def step_of(layout: Layout, keys: dict[str, Any]) -> Step:
    """Return the step of the runs, in which every token except the first of a document is a target token."""
    plan = RecomputePlan() if keys.get("recompute") else None
    return Step(tokens=LENGTH, target_tokens=LENGTH - 1, micro_batches=micro_batches(layout), plan=plan)


# -- worker of every process --------------------------------------------------------------------------------------------
def work(folder: Path, keys: dict[str, Any]) -> None:
    """Train two steps; write the bytes sent in the second and the growth of memory to the folder."""
    from benchmarks.counted_run import train_and_count

    result = train_and_count(MODEL, folder, {**keys, "max_steps": NUM_STEPS}, LENGTH)
    (folder / f"{result.pop('rank')}.json").write_text(json.dumps(result))


def launch(processes: int, keys: dict[str, Any]) -> list[dict[str, Any]]:
    """Run one layout and return the measurements of every process."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable]
        if processes > 1:
            command += ["-m", "paddle.distributed.launch", "--nproc_per_node", str(processes), "--backend", "gloo"]
            command += ["--log_dir", str(folder / "log")]
        command += [__file__, "--counted_run", str(folder), json.dumps(keys)]
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        environment |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        if result.returncode:
            logs = "\n".join(path.read_text()[-2000:] for path in folder.glob("log/workerlog.*"))
            raise RuntimeError(f"{keys} failed:\n{result.stderr[-2000:]}\n{logs}")
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(processes)]


# -- tables ------------------------------------------------------------------------------------------------------------
def table(heads: list[str], rows: list[list[Any]]) -> str:
    """Format a Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def pair(predicted: float, counted: float, unit: float) -> str:
    return f"{predicted / unit:.2f} / {counted / unit:.2f}" if predicted or counted else "-"


def measured_tables() -> str:
    """Compare formula and measurement, for the process that sends the most bytes or needs the most memory."""
    config, sent, held = DecoderConfig.from_dict(MODEL), [], []
    for name, processes, layout, keys in RUNS:
        print(name, flush=True)
        counted = launch(processes, {**keys, "gradient_accumulation_steps": micro_batches(layout)})
        step = step_of(layout, keys)
        expected = [bytes_sent(config, layout, step, one["stage"]) for one in counted]
        worst = max(range(processes), key=lambda index: sum(counted[index]["sent"].values()))
        axes = ("tensor", "pipeline", "replicas")
        cells = [pair(expected[worst][axis], counted[worst]["sent"].get(axis, 0.0), 1e6) for axis in axes]
        sent.append([name, processes, *cells])
        full = max(range(processes), key=lambda index: counted[index]["grown"])
        parts = memory(config, layout, step, counted[full]["stage"])
        cells = [f"{value / 1e6:.0f}" for value in parts.values()]
        held.append([name, *cells, f"{sum(parts.values()) / 1e6:.0f}", f"{counted[full]['grown'] / 1e6:.0f}"])
    bytes_table = table(["layout", "processes", "sent: tensor", "sent: pipeline", "sent: data and sharding"], sent)
    heads = ["layout", "weights", "gradients", "optimizer", "activations", "loss", "sum", "measured"]
    return MEASURED.format(bytes=bytes_table, memory=table(heads, held), where=json.dumps(environment("paddlepaddle")))


LLAMA3 = {
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
}
# model, GPUs, tensor, pipeline, virtual, sharding, stage
ON_PAPER = [
    ("8B", 8, 1, 1, 1, 8, 3),
    ("8B", 8, 2, 1, 1, 4, 2),
    ("8B", 8, 8, 1, 1, 1, 0),
    ("8B", 64, 2, 1, 1, 32, 2),
    ("8B", 64, 2, 2, 2, 16, 1),
    ("8B", 512, 2, 1, 1, 32, 2),
    ("8B", 512, 4, 2, 2, 16, 1),
    ("70B", 8, 8, 1, 1, 1, 0),
    ("70B", 8, 1, 1, 1, 8, 3),
    ("70B", 64, 8, 1, 1, 8, 2),
    ("70B", 64, 8, 4, 5, 2, 1),
    ("70B", 64, 1, 1, 1, 64, 3),
    ("70B", 512, 8, 4, 5, 16, 1),
    ("70B", 512, 8, 1, 1, 64, 2),
    ("70B", 512, 1, 1, 1, 64, 3),
]
_GLOBAL_BATCH, _PAPER_LENGTH = 512, 8192


def paper_config(size: str) -> DecoderConfig:
    """Return Llama 3's shape, with the vocabulary rounded up to a multiple of every degree."""
    shape = {"model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 8192}
    return DecoderConfig.from_dict({**shape, "tie_word_embeddings": False, **LLAMA3[size]})


def paper_table() -> str:
    """Format the table of large models on many GPUs."""
    rows = []
    for size, gpus, tensor, pipeline, virtual, sharding, stage in ON_PAPER:
        data = gpus // (tensor * pipeline * sharding)
        layout = Layout(
            degrees=Degrees(data, sharding, pipeline, tensor),
            stage=stage,
            sequence_parallel=tensor > 1,
            virtual=virtual,
        )
        step = Step(
            tokens=_PAPER_LENGTH,
            target_tokens=_PAPER_LENGTH,
            micro_batches=_GLOBAL_BATCH // (data * sharding),
            value_bytes=2,
            plan=RecomputePlan(),
        )
        config = paper_config(size)
        sent = [bytes_sent(config, layout, step, process) for process in range(pipeline)]
        parts_by_stage = [memory(config, layout, step, process) for process in range(pipeline)]
        fullest = max(parts_by_stage, key=lambda parts: sum(parts.values()))
        name = f"tensor {tensor} x pipeline {pipeline}{f' ({virtual} chunks)' if virtual > 1 else ''}"
        name += f" x sharding {sharding}{f' stage {stage}' if stage else ''} x data {data}"
        most = [max(one[axis] for one in sent) / 1e9 for axis in ("tensor", "pipeline", "replicas")]
        static = sum(fullest[part] for part in ("weights", "gradients", "optimizer")) / 1e9
        total = sum(fullest.values()) / 1e9
        cells = [f"{number:,.1f}" for number in (*most, static, fullest["activations"] / 1e9)]
        rows.append([size, gpus, name, *cells, f"{total:,.0f}{' (over 80)' if total > 80 else ''}"])
    heads = ["model", "GPUs", "layout", "GB sent: tensor", "GB sent: pipeline", "GB sent: data and sharding"]
    heads += ["GB of state", "GB of activations", "GB of memory"]
    return table(heads, rows)


# ruff: noqa: E501 - rows of Markdown tables have no line breaks
HEAD = """# Communication and memory of parallel layouts

Written by `python -m benchmarks.parallel_cost`. The formulas are in `benchmarks/parallel_cost_model.py`;
`tests/benchmarks/test_parallel_cost_model.py` compares the formulas with values computed by hand.

| Layout | Bytes that each process sends per step |
| --- | --- |
| tensor parallelism, t ranks | 2(t-1)/t · b · T · D for each all-reduce. All-reduces per micro-batch: 4 per layer, one for the embedding, and one for the target tokens at the lm_head. Full recompute needs 6 all-reduces per layer; with `refined_recompute` of one or both `row` regions, a layer needs 5 or 4 |
| tensor parallelism with sequence parallelism, t ranks | the same as for tensor parallelism, with reduce-scatter and all-gather instead of all-reduce; plus an all-gather at each end of the model, and the gradients of the norms |
| pipeline parallelism | b · T · D per micro-batch (with sequence parallelism b · T/t · D) at each boundary between two chunks; the gradient of a tied embedding once per step |
| data parallelism, r replicas | 2(r-1)/r · b · trained |
| sharding stage 1, s ranks | the same as for data parallelism, plus (s-1)/s · b · trained to broadcast updated values |
| sharding stage 2, s ranks | (s-1)/s · b · trained per micro-batch, and the same amount once per step to broadcast updated values |
| sharding stage 3, s ranks | (s-1)/s · b · (trained + 2 · layers + embedding, last norm and lm_head) per micro-batch |

b: bytes per value. T: tokens per micro-batch. D: hidden size. "trained" and "layers": parameter counts. The byte
counts assume ring collectives. With LoRA, only the adapter is trained, and stages 2 and 3 do not shard its gradients.
"""
MEASURED = """
## Formula and measurement

The model is a Llama with 8 layers, D 256, and a tied vocabulary of 4,096. Each run has two steps of 4 micro-batches
of 128 tokens, distributed over the replicas, in fp32 with AdamW, over gloo on one machine.

**Communication** in MB per step, as "formula / counted", for the process that sends the most. The counted value is the
size of the arguments of the collectives in the second step, not the traffic of gloo.

{bytes}

**Memory** in MB, for the process that needs the most: the components of the formula, their sum, and the measured growth
of the process (`VmHWM`), which starts before the model is built. The growth also includes the cache of the
allocator, copies of gradients for communication, and memory of gloo.

{memory}

{where}
"""
PAPER = """
## Estimates for Llama 3 8B and 70B

The table contains estimates, not measurements. Assumptions:

- all weights are trained in bf16, with gradients in bf16, and moments and master weights of AdamW in fp32 (16 bytes
  per parameter);
- a step has 512 sequences of 8,192 tokens, one per micro-batch, and all tokens are target tokens;
- all layers are recomputed, and tensor parallelism is used with sequence parallelism.

Communication is in GB (10^9 bytes) per step, for the GPU that sends the most. Memory is for the GPU that needs the
most memory, without libraries and fragmentation. "over 80" marks layouts that do not fit into a GPU with 80 GB. The bandwidth
between GPUs is ignored; in practice, tensor parallelism needs the fast links within a machine.

The memory formula counts an even shard of the state for each GPU, and no temporary tensors of the forward and backward
pass. The peak of a run is higher than the formula:

- ZeRO does not split a parameter: with 32 ranks, the rank that owns the 8B model's embedding stores twice as much as an
  even shard (2 GB more);
- in the backward pass of stages 2 and 3, every process also has the gradients of the embedding, the lm_head and one or
  two layers. In stage 3, every process also has the gathered values of these parameters.

"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--on_paper_only", action="store_true", help="only print the estimates for large models, which need no runs"
    )
    parser.add_argument("--output", type=Path, default=PAGE)
    parser.add_argument("--counted_run", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.counted_run:
        work(Path(arguments.counted_run[0]), json.loads(arguments.counted_run[1]))
    elif arguments.on_paper_only:
        print(PAPER + paper_table())
    else:
        arguments.output.write_text(HEAD + measured_tables() + PAPER + paper_table() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
