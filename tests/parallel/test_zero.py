"""Two processes that shard optimizer state, gradients and weights, compared with one process."""

from __future__ import annotations

import json

import pytest

from paddlenlp_ext.parallel.mesh import Mesh, ProcessAxis
from paddlenlp_ext.parallel.zero import balanced_owners
from tests.common.hybrid_models import GRANITE_4_H, LFM2, QWEN3_5
from tests.common.parallel import Case, assert_same_run, launch, outcome, run_case, selected_cases, write_model

UNTIED = {"tie_word_embeddings": False}
BIASED = {"attention_bias": True, "mlp_bias": True, **UNTIED}
STAGES = ("stage1", "stage2", "stage3")
DEEP = Case("sft-deep", {"gradient_accumulation_steps": 2}, {"num_hidden_layers": 8})
LORA = Case("lora-plus", {"recompute": True}, BIASED, "lora", {"rank": 4, "dropout": 0.3, "plus_scale": 4.0})
EVERY_STAGE = [
    Case("adalora", switch="adalora", peft={"tinit": 2, "tfinal": 4}),
    Case("sft", {"max_grad_norm": 0.5, "weight_decay": 0.1}),
    Case("sft-uneven", {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 4}, BIASED),
    Case("sft-recomputed", {"recompute": True, "gradient_accumulation_steps": 2}, UNTIED),
    Case("dora", {}, BIASED, "use_dora", {"rank": 4}),
    Case("muon", {"optim": "muon"}, {}, "lora", {"rank": 4}),
    Case("prompt", {"neftune": True}, switch="prompt_tuning", peft={"num_tokens": 3}),
]
FIRST_IS_BEST = {
    "evaluation_strategy": "steps",
    "eval_steps": 5,
    "save_strategy": "steps",
    "save_steps": 5,
    "load_best_model_at_end": True,
    "greater_is_better": True,  # with a falling loss, the first evaluation is the best
}
LAYER_EMBEDDINGS = {
    "model_type": "gemma4_text",
    "num_hidden_layers": 4,
    "head_dim": 8,
    "global_head_dim": 12,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 64,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
ONLY_STAGE3 = [
    Case("sft-layer-embeddings", {"recompute": True}, LAYER_EMBEDDINGS),
    Case("sft-qwen3_5", {"recompute": True}, QWEN3_5),
    Case("sft-lfm2", {}, LFM2),
    Case("lora-granite_4_h", {"recompute": True}, GRANITE_4_H, "lora", {"rank": 4}),
    Case("sft-back", FIRST_IS_BEST),
    Case("vera", switch="vera", peft={"rank": 8}),
    Case("lora-ga", {}, UNTIED, "lora_ga", {"rank": 4, "ga_batches": 2}),
    Case("lokr", switch="lokr", peft={"rank": 2, "factor": 4}),
    Case("loha", switch="loha", peft={"rank": 2}),
    Case("miss-bat", switch="miss", peft={"rank": 4, "variant": "bat"}),
    Case("hira", switch="hira", peft={"rank": 4}),
    Case("shira", switch="shira", peft={"rank": 4}),
    Case("boft", {}, BIASED, "boft", {"butterfly_factors": 2}),
    Case("ia3", {}, BIASED, "ia3"),
    Case("p-tuning", switch="p_tuning", peft={"num_tokens": 3}),
    Case("tokens", {"neftune": True}, switch="trainable_tokens", peft={"indices": (5, 40, 7)}),
    Case("hra", switch="hra", peft={"rank": 4}),
    Case("ln", {"recompute": True}, switch="ln_tuning"),
    Case("oft", switch="oft", peft={"block_size": 4}),
    Case("bottleneck", switch="adapter", peft={"size": 8}),
    Case("prefix", {"recompute": True}, switch="prefix_tuning", peft={"num_tokens": 3, "projection": True}),
    Case("reft", switch="reft", peft={"rank": 4}),
    Case("mos", switch="lora_use_mixer", peft={"rank": 4}),
]


def sharded(case: Case, stage: str) -> Case:
    """Return the case with its state sharded over all processes."""
    return Case(f"{case.name}-{stage}", {**case.keys, "sharding": stage}, case.model, case.switch, case.peft)


SHORT = [*(sharded(DEEP, stage) for stage in STAGES), sharded(LORA, "stage3")]
LONG = [sharded(LORA, "stage1"), sharded(LORA, "stage2")]
LONG += [sharded(case, stage) for case in EVERY_STAGE for stage in STAGES]
LONG += [sharded(case, "stage3") for case in ONLY_STAGE3]
CASES = [*SHORT, *(pytest.param(case, marks=pytest.mark.layouts) for case in LONG)]


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharding")
    cases = [*(sharded(DEEP, stage) for stage in STAGES), *selected_cases(request)]
    return folder, launch(2, list({case.name: case for case in cases}.values()), folder, timeout=600)


@pytest.fixture(scope="module")
def on_one_process(runs):
    """Return a function that runs a case on one process, once for all its stages."""
    folder, made = runs[0], {}

    def run(case: Case):
        name = case.name.rpartition("-")[0]
        if name not in made:
            made[name] = case.on_one_process(data_ranks=2)
            run_case(made[name], folder)
        return outcome(made[name], folder)

    return run


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_sharding_on_two_processes_matches_one_process(runs, on_one_process, case):
    assert_same_run(runs[1][case.name], on_one_process(case))


@pytest.mark.parametrize("stage", STAGES)
def test_sharding_holds_sharded_state_once(runs, on_one_process, stage):
    single = json.loads((on_one_process(sharded(DEEP, stage)).folder / "held-0.json").read_text())
    ranks = [json.loads((runs[0] / f"{DEEP.name}-{stage}" / f"held-{rank}.json").read_text()) for rank in range(2)]
    shared = {"stage1": ["state"], "stage2": ["state", "gradients"], "stage3": ["state", "gradients", "values"]}[stage]
    for what in ("state", "gradients", "values"):
        copies = 1 if what in shared else 2
        assert sum(held[what] for held in ranks) == copies * single[what]
        assert max(held[what] for held in ranks) <= (1.1 / 2 if copies == 1 else 1.0) * single[what]


@pytest.mark.parametrize("stage", ["stage2", "stage3"])
def test_sharding_releases_gradients_during_the_backward_pass(runs, on_one_process, stage):
    """Check that a rank holds its own shard and at most two of eight layers and the tied embedding."""
    single = json.loads((on_one_process(sharded(DEEP, stage)).folder / "held-0.json").read_text())["backward"]
    for rank in range(2):
        held = json.loads((runs[0] / f"{DEEP.name}-{stage}" / f"held-{rank}.json").read_text())
        assert held["gradients"] < held["backward"] <= 0.7 * single


@pytest.mark.parametrize("stage", ["stage2", "stage3"])
@pytest.mark.parametrize("index", [0, 99])
def test_sharding_with_too_many_ranks_raises_before_weights_are_read(tmp_path, monkeypatch, stage, index):
    mesh = Mesh(sharding=ProcessAxis(index, 100, None, tuple(range(100))))
    monkeypatch.setattr(Mesh, "from_config", lambda parallel: mesh)
    case = Case("many", {"sharding": stage})
    (write_model(case, tmp_path) / "model.safetensors").write_bytes(b"not to be read")
    with pytest.raises(ValueError, match=r"sharding_parallel_degree 100: too large for 20 .* at most 20"):
        run_case(case, tmp_path)


def test_balanced_owners_get_similar_totals():
    sizes = [100, 7, 40, 40, 3, 25, 25, 60]
    owners = balanced_owners(sizes, 3)
    totals = [sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank) for rank in range(3)]
    assert sum(totals) == 300 and max(totals) <= 108
    assert balanced_owners([5, 5], 4) == [0, 1]
