"""Shipped files for Llama and Qwen under the launcher, with every documented combination, on tiny weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from parallel_cases import Case, logs, start, write_model

pytestmark = pytest.mark.layouts

CONFIGS = Path(__file__).parents[2] / "llm" / "config"
WORKER = str(Path(__file__).with_name("shipped_worker.py"))
MODELS = {"llama": {}, "qwen": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}}
LAYOUTS = {
    2: {
        "data 2": {},
        "tensor 2": {"tensor_parallel_degree": 2, "tensor_parallel_config": "enable_mp_async_allreduce"},
        "tensor 2 sequence": {"tensor_parallel_degree": 2, "sequence_parallel": "true"},
        "pipeline 2": {"pipeline_parallel_degree": 2, "pipeline_parallel_config": "disable_p2p_cache_shape"},
        "stage1": {"sharding": "stage1", "sharding_parallel_config": "split_param enable_stage1_overlap"},
        "stage2": {"sharding": "stage2", "sharding_parallel_degree": 2},
        "stage3": {"sharding": "stage3"},
    },
}
RECOMPUTE = {
    "full_attn": {"recompute_granularity": "full_attn"},
    "core_attn": {"recompute_granularity": "core_attn", "no_recompute_layers": "[0]"},
    "refined": {"refined_recompute": "attention_row_ln:-1,mlp_row_ln:1,flash_attn:-1"},
}


def jobs(processes: int, folder: Path) -> dict[str, list[str]]:
    """Command lines by name: both families, all weights and LoRA, in every layout; ways to recompute under tensor 2."""
    layouts = dict(LAYOUTS[processes])
    if processes == 2:
        layouts |= {f"tensor 2 {name}": {"tensor_parallel_degree": 2, **keys} for name, keys in RECOMPUTE.items()}
    result = {}
    for family, changes in MODELS.items():
        for method in ("sft", "lora"):
            for name, keys in layouts.items():
                job = f"{family} {method} {name}"
                values = {
                    "model_name_or_path": write_model(Case(job, model=changes), folder),
                    "output_dir": folder / job.replace(" ", "-"),
                    "device": "cpu",
                    "max_steps": 2,
                    "gradient_accumulation_steps": 2,
                    "do_eval": "false",
                    "evaluation_strategy": "no",
                    "save_strategy": "no",
                    "load_best_model_at_end": "false",
                    "src_length": 16,
                    "max_length": 32,
                    **keys,
                }
                options = [word for key, value in values.items() for word in (f"--{key}", str(value))]
                result[job] = [str(CONFIGS / family / f"{method}_argument.json"), *options]
    return result


@pytest.mark.parametrize("processes", LAYOUTS)
def test_every_shape_starts_trains_and_saves(tmp_path, processes):
    wanted = jobs(processes, tmp_path)
    (tmp_path / "jobs.json").write_text(json.dumps(wanted))
    result = start(processes, [WORKER, str(tmp_path)], tmp_path, timeout=600)
    assert result.returncode == 0, logs(tmp_path)
    losses = json.loads((tmp_path / "losses-0.json").read_text())
    assert losses.keys() == wanted.keys()
    for name, of_steps in losses.items():
        assert len(of_steps) == 2 and all(0 < loss < 20 for loss in of_steps), name
        saved = "adapter_model" if " lora " in name else "model"
        assert (tmp_path / name.replace(" ", "-") / f"{saved}.safetensors").is_file(), name
