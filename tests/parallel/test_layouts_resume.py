"""A checkpoint of one layout goes on in another, to what one process without a break comes to."""

from __future__ import annotations

import dataclasses
import json

import pytest
from parallel_cases import Case, assert_same_run, launch, outcome, run_case

pytestmark = pytest.mark.layouts

TENSOR = {"tensor_parallel_degree": 2}
RUNS = [
    Case("sft", model={"attention_bias": True, "tie_word_embeddings": False}),
    Case("lora", switch="lora", peft={"rank": 4, "dropout": 0.2}),
    Case("adalora", switch="adalora", peft={"tinit": 2, "tfinal": 4}),
]
HALF = {"save_strategy": "steps", "save_steps": 10}
RESUMED = [("one", "two"), ("two", "two"), ("two", "one")]


def named(case: Case, name: str, **keys) -> Case:
    return dataclasses.replace(case, name=f"{case.name}-{name}", keys={**case.keys, **keys})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Runs on one process and on two, each saved half-way, and gone on with from there."""
    folder = tmp_path_factory.mktemp("resume")
    for case in RUNS:
        run_case(named(case, "one", **HALF), folder)
    launch(2, [named(case, "two", **HALF, **TENSOR) for case in RUNS], folder)
    resumed = {
        (before, after): [
            named(
                case,
                f"{before}-then-{after}",
                resume_from_checkpoint=str(folder / f"{case.name}-{before}" / "checkpoint-10"),
                **(TENSOR if after == "two" else {}),
            )
            for case in RUNS
        ]
        for before, after in RESUMED
    }
    launch(2, resumed["one", "two"] + resumed["two", "two"], folder)
    for case in resumed["two", "one"]:
        run_case(case, folder)
    return folder


@pytest.mark.parametrize("case", RUNS, ids=lambda case: case.name)
@pytest.mark.parametrize("way", RESUMED, ids=lambda way: "-then-".join(way))
def test_goes_on_as_if_nothing_had_happened(folder, case, way):
    straight = outcome(named(case, "one"), folder)
    assert_same_run(outcome(named(case, "-then-".join(way)), folder), straight)


@pytest.mark.parametrize("case", RUNS, ids=lambda case: case.name)
def test_both_layouts_write_the_same_files(folder, case):
    one, two = (folder / f"{case.name}-{layout}" for layout in ("one", "two"))
    files = written(one)
    assert files == written(two)
    for file in files:
        if file.suffix == ".safetensors":
            assert header(one / file) == header(two / file), file
        elif file.name in ("config.json", "adapter_config.json"):
            assert json.loads((one / file).read_text()) == json.loads((two / file).read_text())


def written(folder):
    """A run's files; what each process of a test notes of itself is none."""
    files = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    return sorted(file for file in files if not file.name.startswith("held-"))


def header(path):
    """Names, formats, shapes and places of a file's tensors, in their order."""
    with open(path, "rb") as file:
        return file.read(int.from_bytes(file.read(8), "little"))
