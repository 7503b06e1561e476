"""Put single faults into the package and run the tests that execute the changed line, until one fails.

    python -m tests.mutation.run --sample 25 data nn ops        # 25 faults in each package
    python -m tests.mutation.run --only 3f2a91c07b              # one fault again, with the tests' output
    python -m tests.mutation.run --table                        # outcomes so far, by package

A server imports Paddle once and forks a process for each fault. The child compiles the changed source in place of the
file, so the working tree stays as it is; programs that a test starts in new processes see the code without the fault.
The sample is ordered by a hash of seed and fault, so it does not change with edits elsewhere.

Tests run in the order of their distance from the module: first tests that mirror it, then tests that import it, then
tests of its folder. A first run of each test file records which lines it executes and how long it takes
(build/mutation/map.json).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import paddlenlp_ext

paddlenlp_ext.configure_runtime()

import coverage
import pytest
import transformers  # noqa: F401 (imported once, for all children)

from tests.mutation.mutations import Mutation, mutations_of

ROOT = Path(paddlenlp_ext.__file__).parents[1]
STATE = ROOT / "build" / "mutation"
EQUIVALENT = Path(__file__).with_name("equivalent.txt")
"""Faults that change nothing that a user or caller could notice: key, place and reason, one a line."""
PACKAGES = ("data", "config", "trainer", "peft", "checkpoint", "nn", "ops", "generation")
_MARKERS = "not slow and not layouts and not devices"
_SECONDS = 30  # after which no further test file of a fault is started


class TestMap:
    """Lines that each test file executes, its failures without a fault, and its seconds; measured once per content."""

    def __init__(self) -> None:
        self._file = STATE / "map.json"
        self._known = json.loads(self._file.read_text()) if self._file.exists() else {}

    def entry(self, test: str, module: str) -> dict:
        """Return {"digest", "seconds", "failures", "lines", "sources"} of a test file.

        It is measured again if the test or `module` has changed since.
        """
        known = self._known.get(test, {"digest": "", "sources": {}})
        if known["digest"] != _digest(test) or known["sources"].get(module, _digest(module)) != _digest(module):
            self._known[test] = {"digest": _digest(test), **_measure(test)}
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.write_text(json.dumps(self._known))
        return self._known[test]


def _digest(file: str) -> str:
    return hashlib.sha256((ROOT / file).read_bytes()).hexdigest()[:16]


def tests_near(module: str) -> list[str]:
    """Return test files for a module, nearest first: mirrored, importing it, of its folder."""
    path = Path(module).relative_to("paddlenlp_ext")
    stem = path.stem.removeprefix("_") if path.stem != "__init__" else path.parent.name
    folder = Path("tests") / path.parent
    mirrored = [*folder.glob(f"test_{stem}.py"), *folder.glob(f"test_{stem}_*.py")]
    mirrored += folder.parent.glob(f"test_{folder.name}*.py")  # one file may test all modules of a small package
    folder = next(place for place in (folder, *folder.parents) if place.is_dir())
    dotted = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
    parent, _, leaf = f"paddlenlp_ext.{dotted}".rpartition(".")
    imports = re.compile(rf"paddlenlp_ext\.{re.escape(dotted)}\b|from {re.escape(parent)} import [^\n]*\b{leaf}\b")
    every = sorted(
        path for path in Path("tests").rglob("test_*.py") if "parallel" not in path.parts or "parallel" in module
    )
    importing = [path for path in every if imports.search(path.read_text())]
    beside = [path for path in every if folder in path.parents]
    exports = [Path("tests/test_public_api.py")] if path.name == "__init__.py" else []
    return [str(path) for path in dict.fromkeys([*sorted(mirrored), *exports, *importing, *beside])]


def run_forked(job: Callable[[], int], seconds: float, log: Path) -> int | None:
    """Run a job in a forked process group; return its exit code, or None after a timeout."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.setsid()
        with open(log, "w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        code = 70
        try:
            code = int(job())
        finally:
            sys.stdout.flush()
            os._exit(code)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _pytest(tests: list[str], *options: str) -> int:
    for name in [name for name in sys.modules if name.split(".")[0] in ("paddlenlp_ext", "tests")]:
        del sys.modules[name]
    folder = tempfile.mkdtemp(prefix="mutation-")
    options = ("-p", "no:cacheprovider", "-m", _MARKERS, "--basetemp", f"{folder}/tests", "--tb", "line", *options)
    try:
        return int(pytest.main(["-q", *options, *tests]))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _measure(test: str) -> dict:
    """Run a test file without a fault, under coverage."""
    STATE.mkdir(parents=True, exist_ok=True)
    log, result = STATE / "measure.log", STATE / "measure.json"
    result.unlink(missing_ok=True)

    def job() -> int:
        measured = coverage.Coverage(data_file=None, include=[f"{ROOT}/paddlenlp_ext/*"], config_file=False)
        measured.start()
        code = _pytest([test], "-rfE")
        measured.stop()
        data = measured.get_data()
        lines = {os.path.relpath(file, ROOT): sorted(data.lines(file) or ()) for file in data.measured_files()}
        result.write_text(json.dumps(lines))
        return code

    begin = time.monotonic()
    code = run_forked(job, 600, log)
    failures = _failed(log)
    if code not in (0, 1, 5) or not result.exists():
        print(f"  {test} does not run without a fault (code {code}); it is left out")
        return {"seconds": time.monotonic() - begin, "failures": [test], "lines": {}, "sources": {}}
    for failure in failures:
        print(f"  {failure} fails without a fault; it is left out")
    lines = json.loads(result.read_text())
    sources = {module: _digest(module) for module in lines}
    return {"seconds": time.monotonic() - begin, "failures": failures, "lines": lines, "sources": sources}


def _failed(log: Path) -> list[str]:
    """Return the names of the tests that failed, from pytest's summary."""
    return re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", log.read_text(), re.MULTILINE)


def _compile_instead(mutation: Mutation) -> None:
    """Make imports of the file compile the source with the fault."""
    from importlib.machinery import SourceFileLoader

    path = str(ROOT / mutation.path)
    code = compile(mutation.apply(Path(path).read_text()), path, "exec")
    original = SourceFileLoader.get_code

    def get_code(loader: SourceFileLoader, fullname: str) -> object:
        return code if loader.path == path else original(loader, fullname)

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign]


def try_mutation(mutation: Mutation, tests: TestMap, extra: list[str]) -> tuple[str, str]:
    """Run the tests of a fault; return (killed, timeout, survived or not executed) and the test that failed."""
    (first, last), executed, spent = mutation.lines, False, 0.0
    log = STATE / "test.log"
    for test in [*extra, *tests_near(mutation.path)]:
        entry = tests.entry(test, mutation.path)
        if not set(range(first, last + 1)) & set(entry["lines"].get(mutation.path, ())):
            continue
        executed = True
        options = ["-x", *(f"--deselect={failure}" for failure in entry["failures"])]

        def job(test: str = test, options: list[str] = options) -> int:
            _compile_instead(mutation)
            return _pytest([test], *options)

        begin = time.monotonic()
        code = run_forked(job, 20 + 5 * entry["seconds"], log)
        spent += time.monotonic() - begin
        if code is None:
            return "timeout", test
        if code not in (0, 5):
            return "killed", (_failed(log) or [test])[0]
        if spent > _SECONDS:
            break
    return ("survived" if executed else "not executed"), ""


def sample(package: str, count: int, seed: int) -> list[Mutation]:
    """Return `count` faults of a package in different lines, in the order of their hashes."""
    found: list[Mutation] = []
    for path in sorted((ROOT / "paddlenlp_ext" / package).rglob("*.py")):
        found += mutations_of(str(path.relative_to(ROOT)), path.read_text())
    found.sort(key=lambda mutation: hashlib.sha256(f"{seed}{mutation.key}".encode()).digest())
    chosen: dict[tuple[str, int], Mutation] = {}
    for mutation in found:
        chosen.setdefault((mutation.path, mutation.line), mutation)
    return list(chosen.values())[:count]


def print_table(results: Path) -> None:
    """Print the last outcome of every fault, counted by package."""
    outcomes = {fields["key"]: fields for fields in map(json.loads, results.read_text().splitlines())}
    by_package: dict[str, Counter[str]] = {}
    for fields in outcomes.values():
        by_package.setdefault(fields["package"], Counter())[fields["outcome"]] += 1
    print("| package | faults | detected | equivalent | not detected |\n|---|---|---|---|---|")
    for package, counts in [*sorted(by_package.items()), ("all", sum(by_package.values(), Counter()))]:
        detected = counts["killed"] + counts["timeout"]
        missed = counts["survived"] + counts["not executed"]
        print(f"| {package} | {counts.total()} | {detected} | {counts['equivalent']} | {missed} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("packages", nargs="*", default=PACKAGES)
    parser.add_argument("--sample", type=int, default=25, help="number of faults per package")
    parser.add_argument("--skip", type=int, default=0, help="number of faults to skip at the start of the sample")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=(), help="keys of the faults to run")
    parser.add_argument("--tests", nargs="*", default=[], help="test files to try first")
    parser.add_argument("--list", action="store_true", help="only print the sample")
    parser.add_argument("--table", action="store_true", help="only print the outcomes so far")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    tests, results = TestMap(), STATE / "results.jsonl"
    if arguments.table:
        print_table(results)
        return
    equivalent = {line.split()[0] for line in EQUIVALENT.read_text().splitlines() if line}
    for package in arguments.packages:
        chosen = sample(package, 10**9 if arguments.only else arguments.sample, arguments.seed)[arguments.skip :]
        for mutation in chosen:
            if arguments.only and mutation.key not in arguments.only:
                continue
            if arguments.list:
                print(mutation)
                continue
            begin = time.monotonic()
            is_equivalent = mutation.key in equivalent and not arguments.only
            outcome, test = ("equivalent", "") if is_equivalent else try_mutation(mutation, tests, arguments.tests)
            print(f"{outcome:12} {mutation}  [{time.monotonic() - begin:.0f} s] {test}", flush=True)
            fields = {"package": package, "key": mutation.key, "outcome": outcome, "test": test, "fault": str(mutation)}
            with results.open("a") as file:
                file.write(json.dumps(fields) + "\n")
            if arguments.only and (STATE / "test.log").exists():
                print((STATE / "test.log").read_text()[-3000:])


if __name__ == "__main__":
    main()
