"""Shipped configurations for Llama and Qwen under the launcher, in the documented layouts, on tiny weights.

On two processes every method has every layout, with one family each; on four, every method has a third of the layouts.

A run makes one step and saves, or is refused before any weight is read, with the nearest supported option.
"""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import pytest

from paddlenlp_ext.config.parallel_degrees import complete_degrees
from paddlenlp_ext.config.sections.parallel import ParallelConfig
from tests.common.parallel import Case, logs, start, write_model
from tests.common.scripts import LLM

CONFIGS = LLM / "config"
METHODS = sorted(
    path.name.removesuffix("_argument.json")
    for path in (CONFIGS / "llama").glob("*.json")
    if not path.name.startswith(("dpo", "reward", "grpo", "ptq", "gptq", "awq"))  # of other programs
)
WORKER = str(Path(__file__).with_name("shipped_worker.py"))
# Wide enough for the files' quantization blocks and ranks on each of two shards of a layer.
WIDE = {"hidden_size": 64, "intermediate_size": 128}
MODELS = {"llama": WIDE, "qwen": {**WIDE, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}}

TENSOR = {"tensor_parallel_degree": 2}
SEQUENCE = {**TENSOR, "sequence_parallel": True}
STAGES = {"pipeline_parallel_degree": 2}


def shared(stage: int) -> dict[str, object]:
    return {"sharding": f"stage{stage}", "sharding_parallel_degree": 2}


LAYOUTS: dict[int, dict[str, dict[str, object]]] = {
    2: {
        "data": {},
        "tensor": {**TENSOR, "tensor_parallel_config": "enable_mp_async_allreduce"},
        "sequence": SEQUENCE,
        "stages": {**STAGES, "pipeline_parallel_config": "disable_p2p_cache_shape"},
        "virtual": {**STAGES, "virtual_pp_degree": 2},
        "stage1": {"sharding": "stage1", "sharding_parallel_config": "split_param enable_stage1_overlap"},
        "stage2": shared(2),
        "stage3": {"sharding": "stage3"},
    },
    4: {
        "tensor-data": TENSOR,
        **{f"tensor-stage{stage}": {**TENSOR, **shared(stage)} for stage in (1, 2, 3)},
        "tensor-stages": {**TENSOR, **STAGES},
        "tensor-virtual": {**TENSOR, **STAGES, "virtual_pp_degree": 2},
        "sequence-stages": {**SEQUENCE, **STAGES},
        "sequence-virtual": {**SEQUENCE, **STAGES, "virtual_pp_degree": 2},
        "sequence-data": SEQUENCE,
        **{f"sequence-stage{stage}": {**SEQUENCE, **shared(stage)} for stage in (1, 2, 3)},
        "stages-data": STAGES,
        **{f"stages-stage{stage}": {**STAGES, **shared(stage)} for stage in (1, 2, 3)},
        "stage3-data": shared(3),
    },
}
RECOMPUTE = {
    "full_attn": {"recompute_granularity": "full_attn"},
    "core_attn": {"recompute_granularity": "core_attn", "no_recompute_layers": "[0]"},
    "refined": {"refined_recompute": "attention_row_ln:-1,mlp_row_ln:1,flash_attn:-1"},
}
OF_TINY_VOCABULARY = {"trainable_tokens": {"trainable_tokens_indices": "[3, 5, 40]"}}
"""Method -> keys whose shipped values are token ids."""
Jobs = dict[str, tuple[str, str, dict[str, object]]]
"""Family, method and layout's keys of a job, by its name."""


EVERY = {2: 1, 4: 3}
"""Number of processes -> n: a method has every n-th layout."""


def chosen_jobs(processes: int) -> Jobs:
    """Return every file in some layouts: the families alternate, and so do the layouts if not all are chosen."""
    return {
        f"{family} {method} {name}": (family, method, keys)
        for number, method in enumerate(METHODS)
        for place, (name, keys) in enumerate(LAYOUTS[processes].items())
        if (place + number) % EVERY[processes] == 0
        for family in [list(MODELS)[(place // EVERY[processes] + number) % 2]]
    }


def recompute_jobs() -> Jobs:
    """Return all recompute options with tensor parallelism."""
    return {
        f"{family} {method} {name}": (family, method, {**TENSOR, **keys})
        for name, keys in RECOMPUTE.items()
        for family in MODELS
        for method in ("sft", "lora")
    }


def some_jobs() -> Jobs:
    """Return one file per layout of two processes, and files that are refused."""
    chosen = ["lora data", "qlora tensor", "sft sequence", "dora stages", "pt virtual", "lora_ga stage1", "sft stage2"]
    chosen += ["wint8_lora stage3", "mora tensor", "reft sequence"]
    jobs = {}
    for number, words in enumerate(chosen):
        family, (method, layout) = list(MODELS)[number % 2], words.split()
        jobs[f"{family} {words}"] = (family, method, LAYOUTS[2][layout])
    return jobs


def refusal(method: str, keys: dict[str, object], processes: int) -> str | None:
    """Return words of the expected error message; None if the file runs."""
    if "pipeline_parallel_degree" in keys and keys.get("sharding") in ("stage2", "stage3"):
        return "use sharding: stage1, or pipeline_parallel_degree: 1"
    if method == "mora" and "tensor_parallel_degree" in keys:
        nearest = complete_degrees(ParallelConfig(**{**keys, "tensor_parallel_degree": 1}), processes)
        return f"; nearest valid degrees: {nearest}"
    if method == "reft" and "sequence_parallel" in keys:
        return "cannot be combined with sequence_parallel"
    return None


def command_of(family: str, method: str, keys: dict[str, object], model: Path, folder: Path) -> list[str]:
    """Return the configuration file and the options of a small run."""
    values = {
        "model_name_or_path": model,
        "output_dir": folder,
        "device": "cpu",
        "max_steps": 1,
        "gradient_accumulation_steps": 2,
        "do_eval": False,
        "evaluation_strategy": "no",
        "save_strategy": "no",
        "load_best_model_at_end": False,
        "src_length": 16,
        "max_length": 32,
        **OF_TINY_VOCABULARY.get(method, {}),
        **keys,
    }
    options = [word for key, value in values.items() for word in (f"--{key}", str(value))]
    return [str(CONFIGS / family / f"{method}_argument.json"), *options]


def assert_start_or_are_refused(jobs: Jobs, processes: int, folder: Path) -> None:
    """Run the jobs in sequence in a single launch; refused ones get a model folder without weights."""
    commands = {}
    for name, (family, method, keys) in jobs.items():
        layers = {"num_hidden_layers": 4 if "virtual_pp_degree" in keys else 2}
        model = write_model(Case(name, model={**MODELS[family], **layers}), folder)
        if refusal(method, keys, processes):
            model = without_weights(model)
        commands[name] = command_of(family, method, keys, model, folder / name.replace(" ", "-"))
    (folder / "jobs.json").write_text(json.dumps(commands))
    result = start(processes, [WORKER, str(folder)], folder, timeout=3600)
    assert result.returncode == 0, logs(folder)
    for rank in range(processes):
        outcomes = json.loads((folder / f"outcomes-{rank}.json").read_text())
        assert outcomes.keys() == jobs.keys()
        for name, (_, method, keys) in jobs.items():
            words, outcome = refusal(method, keys, processes), outcomes[name]
            if words is None:
                assert "losses" in outcome, (name, outcome)
                assert len(outcome["losses"]) == 1 and 0 < outcome["losses"][0] < 20, name
            else:
                assert words in outcome.get("refused", "it runs"), name
    for name, (_, method, keys) in jobs.items():
        files = {path.name for path in (folder / name.replace(" ", "-")).glob("*.safetensors")}
        saved = "model.safetensors" if method == "sft" else "adapter_model.safetensors"
        assert files == (set() if refusal(method, keys, processes) else {saved}), name


def without_weights(model: Path) -> Path:
    """Return a folder with the model's configuration only."""
    bare = model.with_name(f"{model.name}-bare")
    bare.mkdir(exist_ok=True)
    shutil.copy(model / "config.json", bare)
    return bare


@pytest.mark.layouts
def test_shipped_config_of_each_layout_starts(tmp_path):
    assert_start_or_are_refused(some_jobs(), 2, tmp_path)


@pytest.mark.layouts
@pytest.mark.parametrize("processes", LAYOUTS)
def test_shipped_configs_start_in_the_layouts(tmp_path, processes):
    jobs = chosen_jobs(processes)
    assert {(family, method) for family, method, _ in jobs.values()} == set(itertools.product(MODELS, METHODS))
    assert {name.split()[2] for name in jobs} == set(LAYOUTS[processes])
    assert_start_or_are_refused(jobs, processes, tmp_path)


@pytest.mark.layouts
def test_shipped_configs_start_with_every_recompute_option(tmp_path):
    assert_start_or_are_refused(recompute_jobs(), 2, tmp_path)
