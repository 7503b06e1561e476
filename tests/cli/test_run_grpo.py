"""Program run_grpo.py: training on sampled and stored completions, evaluation, dry run, preview and errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddlenlp_ext.cli.run_finetune import run_finetune
from paddlenlp_ext.config.errors import ConfigError
from paddlenlp_ext.config.run_config import GRPO_SECTIONS
from paddlenlp_ext.data.rollouts.rollout import read_rollouts
from paddlenlp_ext.ops.cpp import bf16
from paddlenlp_ext.trainer.memory.run_estimate import estimate_run

PROMPTS = [{"src": f"{word} fig =", "answer": "fig"} for word in ("red", "blue", "lime", "plum")]
REWARDS = """
def even(prompts, completions, completion_ids, answer, **columns):
    assert len(prompts) == len(completions) == len(answer) and set(answer) == {"fig"}
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]

def even_unless_plum(prompts, completion_ids, **columns):
    return [0.0 if "plum" in prompt else sum(token % 2 == 0 for token in ids) / len(ids)
            for prompt, ids in zip(prompts, completion_ids)]

def short(completion_ids, **columns):
    return [-0.01 * len(ids) for ids in completion_ids]
"""

EVALUATED = {"do_eval": "true", "evaluation_strategy": "epoch"}


@pytest.fixture
def run(run_folders: Path):
    """Return a function that runs the program with prompts, and further keys."""
    (run_folders / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in 2 * PROMPTS))
    (run_folders / "rewards.py").write_text(REWARDS)

    def run_with(**more: Any) -> Path:
        keys = {
            "model_name_or_path": run_folders / "model",
            "train_dataset_path": run_folders / "prompts.jsonl",
            "output_dir": run_folders / "out",
            "chat_template": "none",
            **dict.fromkeys(("do_train", "disable_tqdm"), "true"),
            "reward_funcs": f"{run_folders}/rewards.py:even,{run_folders}/rewards.py:short",
            "reward_weights": "1,0.5",
            "num_generations": 4,
            "per_device_train_batch_size": 8,
            "gradient_accumulation_steps": 2,
            "max_completion_length": 6,
            "num_train_epochs": 1,
            "learning_rate": 1e-3,
            "logging_steps": 1,
            "device": "cpu",
            **more,
        }
        words = [word for key, value in keys.items() if value is not None for word in (f"--{key}", str(value))]
        run_finetune(words, GRPO_SECTIONS, "run_grpo.py")
        return Path(str(keys["output_dir"]))

    return run_with


def metrics(folder: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def test_run_grpo_raises_the_reward_and_writes_rollouts(run):
    out = run(num_train_epochs=15, learning_rate=1e-2)
    steps = metrics(out)
    assert np.mean([step["reward"] for step in steps[-5:]]) > steps[0]["reward"] + 0.3
    for step in steps:
        assert step["sampling/sampling_logp_difference/max"] < 1e-5
        assert step["reward"] == pytest.approx(step["rewards/even/mean"] + 0.5 * step["rewards/short/mean"])
        assert 1 <= step["completions/min_length"] <= step["completions/max_length"] <= 6
    files = sorted((out / "rollouts").iterdir())
    assert len(files) == len(steps) == 30
    assert files[0].name == "epoch-0-batch-000000.jsonl"
    assert [len(rollout.completion_ids) for rollout in read_rollouts(files[0])] == [4] * 4


def test_run_grpo_writes_sampled_answers_with_their_rewards_to_history_and_report(run, run_folders):
    out = run(num_train_epochs=10)
    lines = [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]
    events = [line for line in lines if line.get("event") == "sampled_answers"]
    assert [event["step"] for event in events] == [1, *range(2, 21, 2)]
    stored = read_rollouts(out / "rollouts" / "epoch-0-batch-000000.jsonl")
    prompts = [row["src"] for row in 2 * PROMPTS]
    expected = [(prompts[each.row_index], each.rewards[place]) for place in (0, 1, 2) for each in stored][:10]
    assert [(answer["prompt"], answer["reward"]) for answer in events[0]["answers"]] == expected
    assert set(events[0]["answers"][0]["scores"]) == {"even", "short"}
    assert events[0]["answers"] != events[-1]["answers"]
    assert "Sampled answers" in (out / "report.html").read_text()


@pytest.mark.parametrize("adapter", [{}, {"lora": "true", "lora_rank": 2}])
def test_run_grpo_on_stored_rollouts_repeats_the_steps_of_the_run_that_wrote_them(run, run_folders, adapter):
    options = {"beta": 0.1, "max_steps": 1, "learning_rate": 1e-2, **adapter}
    first = run(**options, output_dir=run_folders / "first")
    stored = first / "rollouts" / "epoch-0-batch-000000.jsonl"
    second = run(
        **options,
        output_dir=run_folders / "second",
        rollouts_path=stored,
        train_dataset_path=None,
        reward_funcs=None,
        reward_weights=None,
    )
    one, other = metrics(first)[0], metrics(second)[0]
    for name in ("loss", "grad_norm", "reward", "rewards/even/mean", "kl", "entropy"):
        assert one[name] == pytest.approx(other[name], rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize(
    "keys",
    [
        {"lora": "true", "lora_rank": 2},
        {"lora": "true", "lora_rank": 2, "weight_quantize_algo": "nf4"},
        {"lora": "true", "use_dora": "true", "lora_rank": 2, "share_prompt": "false"},
        {"reft": "true"},
        {"temperature": 0.6, "top_p": 0.8, "top_k": 20},
    ],
    ids=["lora", "qlora", "dora", "reft", "temperature"],
)
def test_run_grpo_samples_with_the_log_probabilities_of_training(run, keys):
    out = run(learning_rate=1e-2, num_train_epochs=2, beta=0.05, **keys)
    steps = metrics(out)
    assert len(steps) == 4
    for step in steps:
        assert step["sampling/sampling_logp_difference/max"] < 1e-5
        assert step["clip_ratio/region_mean"] == 0
    assert steps[0]["kl"] < 1e-9 < steps[-1]["kl"]


def test_run_grpo_corrects_the_difference_between_sampling_and_training(run):
    keys = {"importance_sampling_correction": "true", "importance_sampling_mode": "token_truncate"}
    on_policy = metrics(run(**keys, max_steps=2))
    for step in on_policy:
        assert step["sampling/importance_sampling_ratio/mean"] == pytest.approx(1.0, abs=1e-4)
    out = run(**keys, num_iterations=2, overwrite_output_dir="true")
    (stored,) = read_rollouts(out / "rollouts" / "epoch-0-batch-000000.jsonl")[:1]
    for training, sampling in zip(stored.old_logps, stored.sampling_logps, strict=True):
        np.testing.assert_allclose(training, sampling, atol=1e-5)


@pytest.mark.skipif(bf16.unavailable_reason() is not None, reason="bfloat16 needs the C++ library")
def test_run_grpo_in_bf16_corrects_sampling_by_default(run):
    steps = metrics(run(bf16="true", fp16_opt_level="O2"))
    for step in steps:
        assert 0 < step["sampling/sampling_logp_difference/max"] < 0.2
        assert step["sampling/importance_sampling_ratio/mean"] == pytest.approx(1.0, abs=0.1)


def test_run_grpo_uses_a_sampled_batch_for_several_steps(run):
    out = run(num_iterations=2, steps_per_generation=4, max_steps=-1, learning_rate=1e-2, epsilon=1e-4)
    steps = metrics(out)
    assert len(list((out / "rollouts").iterdir())) == 1
    assert [("reward" in step) for step in steps] == [True, False, False, False]
    is_clipped = [step["clip_ratio/region_mean"] > 0 for step in steps]
    assert is_clipped == [False, True, True, True], "only the first step has the weights that sampled"


def test_run_grpo_with_dynamic_sampling_trains_only_on_groups_whose_rewards_differ(run, run_folders):
    keys = {"reward_funcs": f"{run_folders}/rewards.py:even_unless_plum", "reward_weights": None}
    size = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3}
    out = run(**keys, **size, dynamic_sampling="true", num_train_epochs=2)
    steps = metrics(out)
    for step, file in zip(steps, sorted((out / "rollouts").iterdir()), strict=True):
        groups = read_rollouts(file)
        assert all(np.ptp(each.rewards) > 0 for each in groups)
        trained, sampled = len(groups), step["dynamic_sampling/num_groups"]
        dropped = step["frac_reward_zero_std"] * sampled
        assert trained + dropped <= sampled + 1e-6 and (step["dynamic_sampling/num_rounds"] > 1) == (dropped > 0.5)
    assert max(step["dynamic_sampling/num_rounds"] for step in steps) > 1
    plain = run(**keys, **size, output_dir=run_folders / "plain")
    groups = [each for file in (plain / "rollouts").iterdir() for each in read_rollouts(file)]
    assert sorted(each.row_index for each in groups) == list(range(8)), "no group is replaced without the key"


def test_run_grpo_with_dynamic_sampling_names_a_batch_that_it_cannot_fill(run, run_folders, caplog):
    (run_folders / "rewards.py").write_text("def same(completions, **columns): return [1.0] * len(completions)")
    keys = {"reward_funcs": f"{run_folders}/rewards.py:same", "reward_weights": None}
    step, *_ = metrics(run(**keys, dynamic_sampling="true", max_gen_batches=2, max_steps=1))
    assert (step["dynamic_sampling/num_rounds"], step["frac_reward_zero_std"], step["loss"]) == (2, 1, 0)
    assert "after 2 rounds of sampling, 4 of 4 groups have equal rewards and no gradient" in caplog.text


def test_run_grpo_with_dynamic_sampling_drops_stored_groups_with_equal_rewards(run, run_folders, caplog):
    keys = {"reward_funcs": f"{run_folders}/rewards.py:even_unless_plum", "reward_weights": None, "max_steps": 1}
    first = run(**keys, per_device_train_batch_size=32, output_dir=run_folders / "first")
    stored = first / "rollouts" / "epoch-0-batch-000000.jsonl"
    assert len(read_rollouts(stored)) == 8
    options = {"rollouts_path": stored, "train_dataset_path": None, "dynamic_sampling": "true", "max_steps": 1}
    step, *_ = metrics(run(**options, per_device_train_batch_size=32))
    assert step["frac_reward_zero_std"] == 0
    assert "dynamic_sampling: dropped 2 of 8 groups" in caplog.text


def test_run_grpo_selects_the_checkpoint_with_the_best_reward(run, run_folders):
    out = run(
        **EVALUATED,
        dev_dataset_path=run_folders / "prompts.jsonl",
        load_best_model_at_end="true",
        save_strategy="epoch",
        num_train_epochs=3,
        learning_rate=1e-2,
    )
    history = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    rewards = [entry["eval_reward"] for entry in history if "eval_reward" in entry]
    state = json.loads((out / "trainer_state.json").read_text())
    assert len(rewards) == 3
    assert (state["best_name"], state["best_metric"]) == ("reward", max(rewards))


@pytest.mark.parametrize(
    ("metric", "best"),
    [("rewards/short/mean", max), ("completions/clipped_ratio", min), ("eval_completions/mean_length", max)],
)
def test_run_grpo_selects_the_checkpoint_with_another_metric_of_completions(run, run_folders, metric, best):
    out = run(
        **EVALUATED,
        dev_dataset_path=run_folders / "prompts.jsonl",
        load_best_model_at_end="true",
        save_strategy="epoch",
        num_train_epochs=2,
        learning_rate=1e-2,
        metric_for_best_model=metric,
    )
    name = metric.removeprefix("eval_")
    history = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    values = [entry[f"eval_{name}"] for entry in history if f"eval_{name}" in entry]
    state = json.loads((out / "trainer_state.json").read_text())
    assert len(values) == 2
    assert (state["best_name"], state["best_metric"]) == (name, best(values))


def test_run_grpo_evaluates_the_reward_of_sampled_completions(run, run_folders):
    out = run(
        **EVALUATED,
        dev_dataset_path=run_folders / "prompts.jsonl",
        num_generations_eval=2,
        metric_for_best_model="reward",
        max_steps=2,
    )
    results = json.loads((out / "eval_results.json").read_text())
    assert results["eval_num_rows"] == 8
    assert results["eval_reward"] == pytest.approx(
        results["eval_rewards/even/mean"] + 0.5 * results["eval_rewards/short/mean"]
    )


def test_run_grpo_dry_run_and_preview_train_nothing(run, run_folders, capsys):
    run(dry_run="true")
    assert "dapo; 4 completions of each prompt" in capsys.readouterr().out
    run(preview_data=1)
    assert "red fig =" in capsys.readouterr().out
    assert not (run_folders / "out" / "rollouts").exists()


def test_run_grpo_dry_run_counts_a_prompt_for_each_completion_unless_it_is_shared(run, monkeypatch):
    positions = []

    def estimate(config, outline, micro_batch_tokens, *arguments):
        positions.append(micro_batch_tokens)
        return estimate_run(config, outline, micro_batch_tokens, *arguments)

    monkeypatch.setattr("paddlenlp_ext.cli.dry_run.estimate_run", estimate)
    run(dry_run="true")
    run(dry_run="true", share_prompt="false")
    sampled = 2 * 4 * 6
    assert positions[1] - sampled == 4 * (positions[0] - sampled) > 0


def test_run_grpo_dry_run_shows_the_memory_of_the_cache_unless_completions_are_stored(run, run_folders, capsys):
    run(max_steps=1)
    capsys.readouterr()
    run(dry_run="true", output_dir=run_folders / "other")
    assert "while sampling" in capsys.readouterr().out
    stored = run_folders / "out" / "rollouts" / "epoch-0-batch-000000.jsonl"
    run(dry_run="true", output_dir=run_folders / "other", rollouts_path=stored, train_dataset_path=None)
    assert "while sampling" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"per_device_train_batch_size": 6}, "6 completions are not a multiple of num_generations: 4"),
        ({"steps_per_generation": 3}, "not a multiple of gradient_accumulation_steps: 2"),
        ({"reward_funcs": None}, "reward_funcs is not set"),
        ({"top_k": 1}, "all completions of a prompt are equal"),
        ({"sharding": "stage3"}, "stage3 shards the weights"),
        (
            {**EVALUATED, "reward_funcs": None, "rollouts_path": "r.jsonl", "metric_for_best_model": "reward"},
            "metric_for_best_model reward needs reward_funcs",
        ),
        (
            {**EVALUATED, "metric_for_best_model": "loss", "load_best_model_at_end": "true", "save_strategy": "epoch"},
            "loss of sampled completions is near 0",
        ),
        (
            {**EVALUATED, "metric_for_best_model": "rewards/odd/mean"},
            "rewards/odd/mean is not measured by this run; use one of reward, .*rewards/even/mean, rewards/short/mean",
        ),
        (
            {**EVALUATED, "reward_funcs": None, "rollouts_path": "r.jsonl", "metric_for_best_model": "rewards/a/mean"},
            "metric_for_best_model rewards/a/mean needs reward_funcs",
        ),
        ({"delta": 1.1}, "is below 1 \\+ epsilon_high"),
    ],
)
def test_run_grpo_with_wrong_keys_is_an_error(run, keys, message):
    with pytest.raises(ConfigError, match=message):
        run(**keys)


def test_run_grpo_with_invalid_rollouts_names_the_line(run, run_folders):
    file = run_folders / "stored.jsonl"
    file.write_text('{"prompt_ids": [1], "completion_ids": [[2], [3]], "old_logps": [[-1.0]], "rewards": [1, 0]}\n')
    with pytest.raises(ValueError, match=r"stored\.jsonl:1: .*one number per token"):
        run(rollouts_path=file)
