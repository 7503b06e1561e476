"""Checkpoints of any layout resume in any other with the same result; all layouts write the same files."""

from __future__ import annotations

import dataclasses
import hashlib
import json

import pytest

from paddlenlp_ext.checkpoint.safetensors import SafetensorsFile
from tests.common.hybrid_models import GEMMA_4, GRANITE_4_H, LFM2, QWEN3_5
from tests.common.parallel import Case, assert_same_run, launch, outcome, run_case

pytestmark = pytest.mark.layouts

HYBRIDS = {"qwen3_5": QWEN3_5, "lfm2": LFM2, "gemma4": GEMMA_4, "granite_4_h": GRANITE_4_H}
REPLICAS = 2  # micro-batches of two data or sharding ranks, run in sequence on one process
KEYS = {"gradient_accumulation_steps": REPLICAS}
ONCE = {"gradient_accumulation_steps": 1}
SMALL_STEPS = {**ONCE, "learning_rate": 1e-4}  # the default rate amplifies rounding in the gradients of Qwen3.5
LAYOUTS = {
    "dp2": {},
    "sharding1": {"sharding": "stage1"},
    "sharding2": {"sharding": "stage2"},
    "sharding3": {"sharding": "stage3"},
    "tp2": {"tensor_parallel_degree": 2, **KEYS},
    "pp2": {"pipeline_parallel_degree": 2, **KEYS},
}
EXPERT_LAYOUTS = {
    "ep2": {"expert_parallel_degree": 2},
    "ep2-sharding1": {"expert_parallel_degree": 2, "sharding": "stage1"},
}
MIXED = {
    "tp2-dp2": {"tensor_parallel_degree": 2},
    "pp2-sharding1": {"pipeline_parallel_degree": 2, "sharding": "stage1"},
    "tp2-sharding3": {"tensor_parallel_degree": 2, "sharding": "stage3"},
}
HALF = {"save_strategy": "steps", "save_steps": 5}


def laid_out(case: Case, layout: str, **keys) -> Case:
    options = {**LAYOUTS, **EXPERT_LAYOUTS, **MIXED, "one": KEYS}[layout]
    return dataclasses.replace(case, name=f"{case.name}-{layout}", keys={**case.keys, **options, **keys})


def resumed(case: Case, before: str, after: str, folder) -> Case:
    checkpoint = folder / f"{case.name}-{before}" / "checkpoint-5"
    continued = laid_out(case, after, resume_from_checkpoint=str(checkpoint))
    return dataclasses.replace(continued, name=f"{case.name}-{before}-then-{after}")


CROSS = [(before, after) for before in ("one", *LAYOUTS) for after in LAYOUTS]
CHAIN = list(zip(("one", *LAYOUTS), LAYOUTS, strict=False))  # sufficient to test a method's own state
TENSOR = [("one", "tp2"), ("tp2", "tp2"), ("tp2", "one")]  # sufficient to test sharded parameters
MIXERS = [("one", "tp2"), ("tp2", "pp2"), ("pp2", "one")]  # sharded heads and channels
EXPERTS = [("one", "ep2"), ("ep2", "tp2"), ("tp2", "ep2-sharding1"), ("ep2-sharding1", "one")]
RUNS = [
    (Case("sft", ONCE, {"attention_bias": True}), CROSS),
    (Case("adalora", ONCE, {}, "adalora", {"tinit": 2, "tfinal": 4}), CHAIN),
    (Case("untied", ONCE, {"attention_bias": True, "tie_word_embeddings": False}), TENSOR),
    (Case("lora", ONCE, {}, "lora", {"rank": 4, "dropout": 0.2}), TENSOR),
    *[(Case(f"sft-{name}", SMALL_STEPS, model), MIXERS) for name, model in HYBRIDS.items()],
    (Case("experts", ONCE, {"model_type": "mixtral", "num_local_experts": 4}), EXPERTS),
]
WAYS = [(case, way) for case, ways in RUNS for way in ways]
ON_2 = (*LAYOUTS, *EXPERT_LAYOUTS)
LAID_OUT = [(case, layout) for case, ways in RUNS for layout in ON_2 if any(layout in way for way in ways)]
RUNS_OF_4 = [case for case, ways in RUNS if ways not in (TENSOR, MIXERS, EXPERTS)]
WAYS_TO_1 = [(before, "one") for before in (*LAYOUTS, *MIXED)]
WAYS_OF_4 = [("one", "tp2-sharding3"), ("sharding3", "pp2-sharding1"), ("tp2-dp2", "pp2-sharding1")]
WAYS_OF_4 += [("pp2", "tp2-dp2"), ("pp2-sharding1", "tp2-sharding3"), ("tp2-sharding3", "tp2-dp2")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Run every layout, save half-way, and resume each checkpoint in other layouts."""
    folder = tmp_path_factory.mktemp("layouts")
    for case, _ in RUNS:
        run_case(laid_out(case, "one", **HALF), folder)
    launch(2, [laid_out(case, layout, **HALF) for case, layout in LAID_OUT], folder, 600)
    launch(2, [resumed(case, *way, folder) for case, way in WAYS if way[1] != "one"], folder, 600)
    for case, way in WAYS:
        if way[1] == "one":
            run_case(resumed(case, *way, folder), folder)
    return folder


@pytest.fixture(scope="module")
def folder_of_4(folder):
    """Run and resume with four processes."""
    launch(4, [laid_out(case, layout, **HALF) for case in RUNS_OF_4 for layout in MIXED], folder, 600)
    launch(4, [resumed(case, *way, folder) for case in RUNS_OF_4 for way in WAYS_OF_4], folder, 600)
    for case in RUNS_OF_4:
        for way in WAYS_TO_1:
            run_case(resumed(case, *way, folder), folder)
    return folder


@pytest.mark.parametrize(("case", "way"), WAYS, ids=lambda part: getattr(part, "name", None) or "-then-".join(part))
def test_resume_in_another_layout_matches_the_uninterrupted_run(folder, case, way):
    assert_same_run(outcome(resumed(case, *way, folder), folder), outcome(laid_out(case, "one"), folder))


@pytest.mark.slow
@pytest.mark.parametrize("case", RUNS_OF_4, ids=lambda case: case.name)
@pytest.mark.parametrize("way", WAYS_OF_4 + WAYS_TO_1, ids="-then-".join)
def test_resume_between_four_processes_and_one_matches_the_uninterrupted_run(folder_of_4, case, way):
    assert_same_run(outcome(resumed(case, *way, folder_of_4), folder_of_4), outcome(laid_out(case, "one"), folder_of_4))


@pytest.mark.parametrize(("case", "layout"), LAID_OUT, ids=lambda part: getattr(part, "name", part))
def test_checkpoint_of_two_processes_has_the_same_files(folder, case, layout):
    assert_same_files(folder, case, layout)


@pytest.mark.slow
@pytest.mark.parametrize("case", RUNS_OF_4, ids=lambda case: case.name)
@pytest.mark.parametrize("layout", MIXED)
def test_checkpoint_of_four_processes_has_the_same_files(folder_of_4, case, layout):
    assert_same_files(folder_of_4, case, layout)


def test_checkpoint_of_equal_numbers_has_equal_bytes(folder):
    """Compare layouts that compute the same bits at the start of a run: they write the same bytes."""
    hashes = set()
    for layout in ("dp2", "sharding1", "sharding2", "sharding3"):
        file = folder / f"sft-{layout}" / "checkpoint-5" / "model.safetensors"
        hashes.add(hashlib.sha256(file.read_bytes()).hexdigest())
    assert len(hashes) == 1


def assert_same_files(folder, case, layout):
    """Assert that a layout writes the files of one process, with equal names, dtypes, shapes and offsets of tensors.

    Values agree within 1e-6 of the largest one; within 2e-5 in optimizer state (squares of gradients) and in LoRA's B,
    AdaLoRA's E and the norms of Qwen3.5, which start at zero: they are sums of Adam steps, which divide by the size of
    the gradient.
    """
    one, other = folder / f"{case.name}-one", folder / f"{case.name}-{layout}"
    norms = ("norm.weight",) if case.model.get("model_type") == "qwen3_5_text" else ()
    files = [path.relative_to(one) for path in one.rglob("*") if path.is_file() and path.name[:5] != "held-"]
    others = [path.relative_to(other) for path in other.rglob("*") if path.is_file() and path.name[:5] != "held-"]
    assert sorted(files) == sorted(others)
    for file in files:
        if file.suffix == ".safetensors":
            assert header(one / file) == header(other / file), file
            want, got = SafetensorsFile(one / file), SafetensorsFile(other / file)
            for name in want.names():
                a, b = want.read(name), got.read(name)
                starts_at_zero = name.endswith((".lora_B.weight", ".lora_E", *norms))
                tolerance = 2e-5 if starts_at_zero or file.name == "training_state.safetensors" else 1e-6
                assert abs(a - b).max() <= tolerance * max(abs(a).max(), 1e-8), (file, name)
        elif file.name in ("config.json", "adapter_config.json"):
            assert json.loads((one / file).read_text()) == json.loads((other / file).read_text())


def header(path):
    """Return names, dtypes, shapes and offsets of a file's tensors, in order."""
    with open(path, "rb") as file:
        return file.read(int.from_bytes(file.read(8), "little"))
