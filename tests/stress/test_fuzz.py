"""Short form of the attacks with random damage; `python -m tests.stress.fuzz` is the long one."""

from __future__ import annotations

import functools
import itertools
import re

import pytest

from tests.stress import fuzz

COUNTS = {
    "config": 150,
    "adapters": 100,
    "rows": 150,
    "compressed": 40,
    "columns": 60,
    "json": 60,
    "safetensors": 150,
    "gguf": 100,
    "tokenizer": 15,
    "templates": 40,
    "operations": 150,
}


def test_fuzz_short_form_has_every_target():
    assert COUNTS.keys() == fuzz.targets().keys()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", COUNTS)
def test_reader_of_damaged_input_accepts_or_refuses_it(name):
    seeds = [*fuzz.KEPT.get(name, ()), *range(COUNTS[name])]
    report = fuzz.attack(fuzz.targets()[name], seeds)
    assert not report.findings
    assert report.outcomes["refused"] > len(seeds) / 20 and report.outcomes["accepted"]


@pytest.mark.parametrize(
    ("target", "finding"),
    [
        (lambda rng, folder: {}["x"], "outside the package: KeyError: 'x'"),
        (lambda rng, folder: None, "more than 0.01 seconds"),
        (lambda rng, folder: None, "more than 0.001 GiB"),
        (lambda rng, folder: b"\xff".decode(), "UnicodeDecodeError: .*"),
    ],
)
def test_attack_reports_the_first_seed_of_a_finding(target, finding, monkeypatch):
    if "seconds" in finding:
        monkeypatch.setattr(fuzz, "MAX_SECONDS", 0.01)
        monkeypatch.setattr(fuzz.time, "process_time", functools.partial(next, itertools.count()))
    if "GiB" in finding:
        monkeypatch.setattr(fuzz, "MAX_GROWTH_GIB", 0.001)
        monkeypatch.setattr(fuzz, "_peak", functools.partial(next, itertools.count(step=3000)))
    report = fuzz.attack(target, [3, 4])
    ((kind, seed),) = report.findings.items()
    assert seed == 3 and report.outcomes["findings"] == 2
    assert re.fullmatch(finding, kind)
