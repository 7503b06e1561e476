"""Losses and final weights of every layout compared with one process, for full training and each adapter family.

    python -m benchmarks.parallel_exactness                                # writes docs/parallel_exactness.md
    python -m benchmarks.parallel_exactness --model smollm2-135m-instruct --steps 3 --output smollm2.md
    python -m benchmarks.parallel_exactness --layouts "tensor 2" "data 2" --methods SFT LoRA

Runs are set up as in tests/parallel: fp32 over gloo, rows in memory, four micro-batches per step, distributed over the
replicas; one launch per layout, with one run per method. Runs that exist in `--folder` are not repeated; `--collect`
only writes the page from existing runs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from paddlenlp_ext import configure_runtime

configure_runtime()  # before Paddle is imported

from benchmarks import ROOT
from benchmarks.measure import environment
from paddlenlp_ext.checkpoint.config_json import read_model_config
from paddlenlp_ext.checkpoint.hub import resolve_model
from paddlenlp_ext.checkpoint.open_weights import open_weights
from paddlenlp_ext.checkpoint.safetensors import write_safetensors
from tests.common.parallel import NUM_STEPS, Case, differences, launch, outcome, run_case, write_model

PAGE = ROOT / "docs" / "parallel_exactness.md"
TINY = {"num_hidden_layers": 4}
MICRO_BATCHES = 4
LIMIT, MOVE, EPSILON = 1e-5, 1e-7, 1e-4
RATE = 1e-5
"""Learning rate for a trained model, which would diverge at the tiny model's rate and amplify rounding errors."""
YARDSTICK = f"one process, initial weights off by {MOVE:.0e}"


@dataclass(frozen=True)
class Layout:
    """Layout of runs: its name, process count, replica count, and configuration keys."""

    name: str
    processes: int
    replicas: int
    keys: dict[str, Any]

    def refuses(self, method: str) -> bool:
        """Return True if a run of the method in this layout must raise an error."""
        is_tensor_parallel = "tensor_parallel_degree" in self.keys
        return (method == "MoRA" and is_tensor_parallel) or (method == "ReFT" and "sequence_parallel" in self.keys)


def layouts(tensor: int) -> list[Layout]:
    """Return layouts along each parallel axis and along several axes; the model must support the degree `tensor`."""
    split, stages = {"tensor_parallel_degree": tensor}, {"pipeline_parallel_degree": 2}
    shared = {"sharding": "stage1", "sharding_parallel_degree": 2}
    return [
        Layout(f"tensor {tensor}", tensor, 1, split),
        Layout(f"tensor {tensor}, sequence", tensor, 1, {**split, "sequence_parallel": True}),
        Layout("pipeline 2", 2, 1, stages),
        Layout("pipeline 2, virtual 2", 2, 1, {**stages, "virtual_pp_degree": 2}),
        Layout("data 2", 2, 2, {}),
        *[Layout(f"sharding 2, stage {n}", 2, 2, {"sharding": f"stage{n}"}) for n in (1, 2, 3)],
        Layout("pipeline 4", 4, 1, {"pipeline_parallel_degree": 4}),
        Layout("data 4", 4, 4, {}),
        Layout(f"tensor {tensor} x pipeline 2", 2 * tensor, 1, {**split, **stages}),
        Layout(
            f"tensor {tensor}, sequence x pipeline 2", 2 * tensor, 1, {**split, **stages, "sequence_parallel": True}
        ),
        Layout(f"tensor {tensor} x data 2", 2 * tensor, 2, split),
        Layout(f"tensor {tensor} x sharding 2, stage 3", 2 * tensor, 2, {**split, **shared, "sharding": "stage3"}),
        Layout("pipeline 2 x data 2", 4, 2, stages),
        Layout("pipeline 2 x sharding 2, stage 1", 4, 2, {**stages, **shared}),
        Layout(f"tensor {tensor} x pipeline 2 x sharding 2, stage 1", 4 * tensor, 2, {**split, **stages, **shared}),
    ]


METHODS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "SFT": (None, {}),
    "LoRA": ("lora", {"rank": 4, "dropout": 0.3}),
    "DoRA": ("use_dora", {"rank": 4, "dropout": 0.2}),
    "PiSSA": ("pissa", {"rank": 4}),
    "LoRA-GA": ("lora_ga", {"rank": 4, "ga_batches": 2}),
    "MoSLoRA": ("lora_use_mixer", {"rank": 4}),
    "MoRA": ("use_mora", {"rank": 4}),
    "AdaLoRA": ("adalora", {"tinit": 2, "tfinal": 4}),
    "SoRA": ("sora", {"rank": 4}),
    "VeRA": ("vera", {"rank": 8, "dropout": 0.2}),
    "LoKr": ("lokr", {"rank": 2, "factor": 4}),
    "LoHa": ("loha", {"rank": 2}),
    "MiSS": ("miss", {"rank": 4}),
    "HiRA": ("hira", {"rank": 4}),
    "SHiRA": ("shira", {"rank": 4}),
    "BOFT": ("boft", {}),
    "IA3": ("ia3", {}),
    "HRA": ("hra", {"rank": 4}),
    "LN tuning": ("ln_tuning", {}),
    "OFT": ("oft", {"block_size": 4}),
    "bottleneck": ("adapter", {"size": 8}),
    "prefix": ("prefix_tuning", {"num_tokens": 3, "projection": True}),
    "prompt": ("prompt_tuning", {"num_tokens": 3}),
    "p-tuning": ("p_tuning", {"num_tokens": 3}),
    "tokens": ("trainable_tokens", {"indices": (5, 40, 7)}),
    "ReFT": ("reft", {"rank": 4}),
}

OF_A_MODEL = {"LoKr": ("lokr", {"rank": 2, "factor": 12})}
"""Options of methods for `--model`, with sizes that are divisible by 3 tensor ranks."""

ONE_PROCESS = Layout("one process", 1, 1, {})


def case_of(method: str, layout: Layout, keys: dict[str, Any]) -> Case:
    """Return the run of a method in a layout."""
    switch, options = METHODS[method]
    accumulated = {"gradient_accumulation_steps": MICRO_BATCHES // layout.replicas}
    return Case(f"{layout.name} {method}", {**keys, **layout.keys, **accumulated}, TINY, switch, options)


def run_missing(chosen: list[Layout], methods: list[str], keys: dict[str, Any], folder: Path) -> None:
    """Run all missing runs: on one process, in every layout, and with perturbed weights."""
    one_process = [case_of(method, ONE_PROCESS, keys) for method in methods]
    for single in one_process:
        run_on_one_process(single, folder)
    for layout in chosen:
        cases = [case_of(method, layout, keys) for method in methods if not layout.refuses(method)]
        missing = [case for case in cases if not is_done(case, folder)]
        for case in missing:  # partial output of an interrupted launch
            shutil.rmtree(folder / case.name, ignore_errors=True)
        if missing:
            launch(layout.processes, missing, folder, timeout=3600)
        print(layout.name, flush=True)
    for single in one_process:
        path = perturbed_model(Path(keys.get("model_name_or_path") or write_model(single, folder)), folder / "moved")
        run_on_one_process(with_perturbed_model(single), folder, {"model_name_or_path": str(path)})


def run_on_one_process(case: Case, folder: Path, keys: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Run the case in this process, with further keys `keys`, unless its output exists."""
    if not is_done(case, folder):
        shutil.rmtree(folder / case.name, ignore_errors=True)
        run_case(replace(case, keys={**case.keys, **keys}), folder)


def collect(chosen: list[Layout], methods: list[str], keys: dict[str, Any], folder: Path) -> dict[str, dict[str, Any]]:
    """Return the largest differences of losses and weights, by layout and method.

    The entry is None if the layout does not support the method, and () if there is no run.
    """
    found: dict[str, dict[str, Any]] = {YARDSTICK: {}, **{layout.name: {} for layout in chosen}}
    for method in methods:
        single = case_of(method, ONE_PROCESS, keys)
        runs = {YARDSTICK: with_perturbed_model(single)}
        runs |= {layout.name: case_of(method, layout, keys) for layout in chosen}
        for name, case in runs.items():
            found[name][method] = largest_differences(case, single, folder) if is_done(case, folder) else ()
    for layout in chosen:
        found[layout.name] |= {method: None for method in methods if layout.refuses(method)}
    return found


def largest_differences(got: Case, want: Case, folder: Path) -> tuple[float, float]:
    """Return the largest relative differences of losses and weights."""
    relative = differences(outcome(got, folder), outcome(want, folder))
    losses, _, _ = (relative.pop(name) for name in ("losses", "norms", "evaluation"))
    return losses, max(relative.values())


def with_perturbed_model(case: Case) -> Case:
    """Return the run with all weights of the model changed by the relative amount `MOVE`."""
    return replace(case, name=f"moved {case.name}")


def perturbed_model(start: Path, path: Path) -> Path:
    """Return the folder of the perturbed model, and write it if it does not exist."""
    if not path.exists():
        shutil.copytree(start, path)
        stored, random = open_weights(start), np.random.default_rng(0)
        values = ((name, stored.read(name)) for name in stored.names())
        perturbed = {n: (v * (1 + MOVE * random.standard_normal(v.shape))).astype(v.dtype) for n, v in values}
        write_safetensors(path / "model.safetensors", perturbed)
    return path


def is_done(case: Case, folder: Path) -> bool:
    return (folder / case.name / "eval_results.json").exists()


HEAD = """# Exactness of parallel training

The tables compare layouts with a run in one process: the largest relative differences after {steps} steps.

- Model: {model}.
- Runs: fp32, AdamW, {micro} micro-batches per step, gloo on one machine, one thread per process.
- Losses: |loss - reference| / |reference|, the maximum over steps.
- Weights: ‖tensor - reference‖ / ‖reference‖ of full tensors, the maximum over all saved tensors.
- "-": the layout does not support the method ([parallel.md](reference/parallel.md#supported-combinations)).
- An empty cell: not run.

The first row of each table shows the effect of rounding: a run in one process whose initial weights are perturbed by
a relative {move:.0e}. Adam divides a gradient by its magnitude, so rounding errors of near-zero gradients
become full-size updates. The runs therefore use `adam_epsilon` {epsilon:.0e}.

Limit: 1e-5. {verdict}

Written by `python -m benchmarks.parallel_exactness`.
"""


def page(found: dict[str, dict[str, Any]], methods: list[str], model: str, steps: int) -> str:
    """Return the page: two tables, and the environment of the figures."""
    cells = {(name, m): max(row[m]) for name, row in found.items() if name != YARDSTICK for m in methods if row[m]}
    over = [f"| {name} | {m} | {worst:.1e} |" for (name, m), worst in cells.items() if worst > LIMIT]
    inside, most = len(cells) - len(over), max(cells.values())
    verdict = f"{inside} of {len(cells)} runs are within the limit; the maximum is {most:.1e}."
    if over:
        heads = ["| layout | method | difference |", "| --- | --- | --- |"]
        verdict += " These runs exceed the limit:\n\n" + "\n".join([*heads, *over])
    parts = [HEAD.format(steps=steps, model=model, micro=MICRO_BATCHES, verdict=verdict, move=MOVE, epsilon=EPSILON)]
    for number, title in enumerate(("Losses", "Weights")):
        lines = [["layout", *methods], ["---"] * (len(methods) + 1)]
        for name, row in found.items():
            lines.append([name, *(cell(row[m], number) for m in methods)])
        parts.append(f"\n## {title}\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n")
    parts.append(f"\n{json.dumps(environment('paddlepaddle'))}\n")
    return "".join(parts)


def cell(figures: tuple[float, ...] | None, number: int) -> str:
    """Format the table cell of a layout and a method."""
    return f"{figures[number]:.1e}" if figures else "-" if figures is None else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", help="name or folder of a model; default: a random Llama with 4 layers and hidden size 32"
    )
    parser.add_argument("--steps", type=int, default=NUM_STEPS)
    parser.add_argument("--layouts", nargs="+")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--collect", action="store_true", help="only write the page, from the runs in --folder")
    parser.add_argument("--output", type=Path, default=PAGE)
    arguments = parser.parse_args()
    if arguments.collect and not arguments.folder:
        parser.error("--collect needs the --folder of the runs")
    keys: dict[str, Any] = {"max_steps": arguments.steps, "adam_epsilon": EPSILON}
    tensor, model = 2, "a random Llama with 4 layers, hidden size 32 and a vocabulary of 61 tokens"
    if arguments.model:
        path, model = resolve_model(arguments.model), arguments.model
        heads = read_model_config(path)["num_key_value_heads"]
        tensor = next(degree for degree in (2, 3, 1) if heads % degree == 0)
        keys |= {"model_name_or_path": str(path), "learning_rate": RATE}
        METHODS.update(OF_A_MODEL)
    chosen = [layout for layout in layouts(tensor) if not arguments.layouts or layout.name in arguments.layouts]
    with tempfile.TemporaryDirectory() as made:
        folder = arguments.folder or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        runs = (chosen, arguments.methods, keys, folder.resolve())
        if not arguments.collect:
            run_missing(*runs)
        found = collect(*runs)
    arguments.output.write_text(page(found, arguments.methods, model, arguments.steps), encoding="utf-8")


if __name__ == "__main__":
    main()
