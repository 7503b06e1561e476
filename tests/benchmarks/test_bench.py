"""Benchmark harness: commands of the cases, rates and ratios, and the reports."""

from __future__ import annotations

import json
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import ours
from benchmarks.arithmetic import linear_shapes, step_operations
from benchmarks.bench import parse_arguments, reason_to_skip, run_module
from benchmarks.bench_report import markdown, summarize, write_report
from benchmarks.cases import CASES, GSM8K_KEYS, LORA_KEYS
from benchmarks.compare_losses import describe, differences, draw
from benchmarks.measure import SMOLLM2_SHAPE, sample_rates, time_steps, tokens_per_second
from benchmarks.scaling import SERIES, write
from benchmarks.step_profile import seconds_by_kernel
from paddlenlp_ext import AutoModelForCausalLM, get_peft_model
from paddlenlp_ext.nn.linear import Linear
from paddlenlp_ext.trainer.build_model import BuiltModel

TINY = {**SMOLLM2_SHAPE, "vocab_size": 37, "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 4}


def measured_line(rate: float, memory: float) -> dict[str, Any]:
    return {"tokens_per_second": rate, "peak_memory_gb": memory}


def test_cases_name_existing_scripts_and_keys_of_the_launcher():
    for name, case in CASES.items():
        assert case.programs[0].environment == "ours", name
        for program in case.programs:
            assert find_spec(f"benchmarks.{shlex.split(program.command)[0]}") is not None, program.command
    keys = f"{LORA_KEYS} {GSM8K_KEYS}".format(model="m", gsm8k="d")
    config = ours.run_config(shlex.split(keys))
    assert (config.peft.rank, config.data.greedy_zero_padding) == (8, True)


def test_reason_to_skip_names_missing_features_environments_and_data(tmp_path: Path):
    assert ours.not_offered("--lora true") is None
    assert "both true" in ours.not_offered("--bf16 true --fp16 true")
    assert "fp16_opt_level" in ours.not_offered("--bf16 true --fp16_opt_level O0")
    python = [f"--python={name}={sys.executable}" for name in ("torch", "paddlenlp")]
    assert "--gsm8k" in reason_to_skip(CASES["gsm8k_fp32"], parse_arguments(python))
    assert reason_to_skip(CASES["gsm8k_fp32"], parse_arguments([*python, f"--gsm8k={tmp_path}"])) is None
    missing = parse_arguments([f"--python=torch={tmp_path / 'python'}", *python[1:]])
    assert "no environment torch" in reason_to_skip(CASES["lora_fp32"], missing)
    with pytest.raises(ValueError, match=r"no such case.*lora_fp32"):
        parse_arguments(["--only", "lora_fp23"])
    with pytest.raises(ValueError, match="NAME=PATH"):
        parse_arguments(["--python", "jax=python"])


def test_run_module_with_failing_script_raises_its_last_error():
    with pytest.raises(RuntimeError, match="unrecognized arguments: --nonsense"):
        run_module(sys.executable, "startup --nonsense")


def test_tokens_per_second_is_the_median_rate_of_the_steps():
    figures = tokens_per_second([100, 300, 100], [1.0, 1.0, 2.0])
    assert figures["tokens_per_second"] == 100.0
    calls = []
    assert len(time_steps(lambda: calls.append(0), 3, 10)["seconds"]) == 3
    assert len(calls) == 4


def test_bench_report_has_medians_ratios_and_unmeasured_cases(tmp_path: Path):
    runs = {
        "this project": [measured_line(100, 2), measured_line(400, 2), measured_line(300, 3)],
        "peer": [measured_line(150, 4), measured_line(150, 4)],
    }
    first, peer = summarize(runs)
    assert (first["rate"], first["peak"], first["spread"], first["speed"]) == (300, 2, 1.0, None)
    assert (peer["speed"], peer["memory"]) == (2.0, 0.5)
    results = {
        "environment": {"date": "today"},
        "rounds": 3,
        "cases": {"case": {"title": "a case", "runs": runs}},
        "not_measured": {"another": "it is not built"},
    }
    text = markdown(results)
    assert "| a case | peer | 150 | 0% | 4.00 GB | 2.00 | 0.50 |" in text
    assert "Not measured: another: it is not built" in text
    write_report(tmp_path, results)
    assert json.loads((tmp_path / "bench.json").read_text())["rounds"] == 3
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_step_operations_are_two_per_weight_and_token():
    model = AutoModelForCausalLM.from_config(TINY, seed=0)
    weights = sum(layer.weight.size for layer in model.sublayers() if isinstance(layer, Linear))
    parts = step_operations(TINY, [7], num_target_tokens=5, rank=2)
    last_feed_forward = sum(rows * columns for rows, columns in linear_shapes(TINY)[4:])
    assert parts["linear forward"] == 2 * 7 * weights - 2 * (7 - 5) * last_feed_forward
    q, k, v = (2 * 7 * rows * columns for rows, columns in linear_shapes(TINY)[:3])
    assert parts["linear input gradient"] == parts["linear forward"] - q - k - v
    assert parts["attention"] == 6 * 2 * (7 * 8 / 2) * 12 * 2
    assert parts["head"] == 2 * 2 * 5 * 12 * 37
    full = step_operations(TINY, [3, 4], num_target_tokens=7, rank=None)
    assert (full["lora"], full["linear weight gradient"]) == (0.0, 2 * 7 * weights)
    assert full["attention"] < parts["attention"]


def test_seconds_by_kernel_counts_nested_events_once():
    def event(category: str, name: str, start: float, length: float) -> dict[str, Any]:
        return {"ph": "X", "cat": category, "name": f"{name}[{length} us]", "ts": start, "dur": length}

    events = [
        {"ph": "M", "name": "meta"},
        event("ProfileStep", "ProfileStep#0", 0, 1e6),
        event("Operator", "matmul dygraph", 0, 3e5),
        event("DygraphKernelLaunch", "matmul kernel launch", 1e5, 2e5),
        event("PythonUserDefined", "native rms_norm", 5e5, 3e5),
        event("DygraphKernelLaunch", "empty kernel launch", 6e5, 1e5),
    ]
    expected = {"Python and autograd": 0.5, "native rms_norm": 0.3, "matmul": 0.2}
    assert seconds_by_kernel(events) == pytest.approx(expected)


def test_training_step_repeated_lowers_the_loss():
    config = ours.run_config(["--lora", "true", "--lora_rank", "2"])
    model = get_peft_model(AutoModelForCausalLM.from_config(TINY, seed=0), config.peft)
    ids = np.random.default_rng(0).integers(0, 37, (2, 6))
    batch = ours.packed_batch(ids, 1.0)
    assert batch.document_lengths == ((6, 6),)
    assert (batch.input_ids == ids.reshape(1, -1)).all()
    assert batch.num_target_tokens == 10
    step = ours.training_step(BuiltModel(model), config, batch)
    losses = [step().loss for _ in range(3)]
    assert losses[2] < losses[0]


def test_scaling_write_tabulates_and_plots_every_series(tmp_path: Path):
    points = {
        name: {value: measured_line(100 * value, 1.5) for value in values} for name, (_, values, _) in SERIES.items()
    }
    write(tmp_path, points)
    assert "| cores, 4 x 512 tokens | 2 | 200 | 1.50 GB |" in (tmp_path / "scaling.md").read_text()
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")


def test_compare_losses_subtracts_the_first_curve_step_by_step(tmp_path: Path):
    runs = {"first": {1: 2.0, 2: 1.0}, "other": {2: 1.1, 3: 5.0}}
    assert differences(runs["first"], runs["other"]) == pytest.approx({2: 0.1})
    assert "10.000% at most" in describe(runs)[1]
    draw(runs, tmp_path / "losses.png")
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")


def test_sample_rates_are_medians_over_the_steps_after_the_first():
    figures = sample_rates(8, ends=[0.0, 1.0, 3.0], mean_lengths=[2.0, 3.0, 5.0])
    assert (figures["samples_per_second"], figures["tokens_per_second"]) == (6.0, 22.0)
    assert figures["tokens"] == [24, 40]
