"""Process settings of `_runtime`, each checked in a fresh process."""

from __future__ import annotations

import importlib.metadata
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paddlenlp_ext import _runtime

ROOT = Path(__file__).resolve().parents[1]
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "PADDLE_LOCAL_SIZE")


def run_python(code: str, *arguments: object, **environment: str) -> str:
    clean = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    result = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**clean, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_configure_runtime_sets_threads_unless_the_user_did():
    code = (
        "import os; from paddlenlp_ext import _runtime as runtime; runtime.configure_runtime();"
        "print(os.environ.get('MKL_NUM_THREADS'), runtime.threads_per_process())"
    )
    setting, cores = run_python(code).split()
    assert setting == cores
    assert run_python(code, OMP_NUM_THREADS="3").split()[0] == "None"
    assert run_python(code, MKL_NUM_THREADS="7").split()[0] == "7"


def test_threads_per_process_with_local_ranks_divides_the_cores():
    code = "from paddlenlp_ext import _runtime as runtime; print(runtime.threads_per_process())"
    assert int(run_python(code, PADDLE_LOCAL_SIZE="1000")) == 1


@pytest.mark.parametrize(("quota", "most"), [("150000 100000", 2), ("max 100000", 10**9), ("1000 100000", 1)])
def test_threads_per_process_with_container_quota_is_limited(tmp_path, monkeypatch, quota, most):
    (tmp_path / "cpu.max").write_text(quota + "\n")
    monkeypatch.setattr(_runtime, "_CPU_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(_runtime, "_siblings", str)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(64)))
    assert _runtime.threads_per_process() == min(64, most)


def test_import_does_not_load_paddle():
    assert run_python("import sys, paddlenlp_ext; print('paddle' in sys.modules)") == "False"


def test_import_changes_nothing_in_the_process():
    """Check that environment, warning filters and allocator settings of the host process are unchanged."""
    code = (
        "import ctypes, os, warnings; before = dict(os.environ), list(warnings.filters); called = [];"
        "real = ctypes.CDLL; ctypes.CDLL = lambda *names: called.append(names) or real(*names);"
        "import paddlenlp_ext, paddlenlp_ext.peft; dir(paddlenlp_ext);"
        "print((dict(os.environ), list(warnings.filters)) == before and not called)"
    )
    assert run_python(code) == "True"


def test_import_after_paddle_keeps_its_threads():
    code = (
        "import paddle; from paddle.base import core; seen = []; core.set_num_threads = seen.append;"
        "import paddlenlp_ext; paddlenlp_ext.LoRAConfig, paddlenlp_ext.finetune; print(seen)"
    )
    assert run_python(code) == "[]"


SCRIPTS = sorted(path for path in (ROOT / "llm").rglob("*.py") if path.name != "__init__.py")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_program_configures_the_runtime(script: Path):
    code = (
        "import os, runpy, sys; sys.argv = [sys.argv[1], '--help']; sys.path.insert(0, os.path.dirname(sys.argv[0]))\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except SystemExit: print('MKL_NUM_THREADS' in os.environ)"
    )
    assert run_python(code, script).splitlines()[-1] == "True"


def test_configure_runtime_after_paddle_sets_its_threads():
    code = (
        "import paddle, os; from paddle.base import core; seen = []; core.set_num_threads = seen.append;"
        "from paddlenlp_ext import _runtime as runtime; runtime.configure_runtime();"
        "print(seen == [runtime.threads_per_process()])"
    )
    assert run_python(code) == "True"


@pytest.mark.parametrize("installed", ["2.6.2", "2.4.0.post117", "1.8.5"])
@pytest.mark.parametrize("package", ["paddlepaddle", "paddlepaddle-gpu"])
def test_check_paddle_release_of_an_old_release_names_the_supported_ones(package, installed, monkeypatch):
    set_release(monkeypatch, {package: installed})
    message = rf"^{package} {installed} is too old: .* Paddle 3 and is tested with 3\.3; run: pip install '{package}==3"
    with pytest.raises(ImportError, match=message):
        _runtime.check_paddle_release()


def test_import_with_an_old_release_is_an_error():
    code = (
        "import importlib.metadata as metadata; metadata.version = lambda package: '2.6.2'\n"
        "try:\n    import paddlenlp_ext\nexcept ImportError as error:\n    print(error)"
    )
    assert run_python(code).startswith("paddlepaddle 2.6.2 is too old: paddlenlp_ext supports Paddle 3 ")


@pytest.mark.parametrize("installed", ["3.0.0", "3.3.1", "3.10.0rc0", "4.0.0", "0.0.0", "0.0.0.dev20261101"])
def test_check_paddle_release_of_a_newer_release_says_nothing(installed, monkeypatch, recwarn):
    set_release(monkeypatch, {"paddlepaddle": installed})
    _runtime.check_paddle_release()
    set_release(monkeypatch, {})
    _runtime.check_paddle_release()
    assert not recwarn.list


def set_release(monkeypatch: pytest.MonkeyPatch, installed: dict[str, str]) -> None:
    """Replace the versions of the installed packages."""

    def version(package: str) -> str:
        if package not in installed:
            raise importlib.metadata.PackageNotFoundError(package)
        return installed[package]

    monkeypatch.setattr("importlib.metadata.version", version)


def test_require_paddle_without_paddle_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install"):
        _runtime.require_paddle()


STOPPED_WITH_CHILD = """
import os, signal, sys
from pathlib import Path
from paddlenlp_ext import _runtime

def stop(number, frame):
    raise KeyboardInterrupt

number, ends, children = int(sys.argv[1]), os.pipe(), Path(f"/proc/self/task/{os.getpid()}/children")
signal.signal(number, stop)
os.pipe = lambda: ends
try:
    with _runtime._explained_end([Path("plug_in.so")]):
        child = int(children.read_text())
        while os.path.lexists(f"/proc/{child}/fd/{ends[1]}"):  # until the child has set its handlers
            pass
        os.kill(child, number)
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        os.kill(os.getpid(), number)
except KeyboardInterrupt:
    print("stopped")
    print("children:", children.read_text())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_stop_signal_while_plug_ins_are_loaded_ends_the_child_and_reaches_the_program(number):
    """Ctrl-C sends the signal to both processes."""
    assert run_python(STOPPED_WITH_CHILD, int(number)) == "stopped\nchildren:"


@pytest.mark.parametrize(
    ("vendor", "features", "code_path"),
    [
        ("AuthenticAMD", "fpu avx avx2 fma avx512f avx512cd avx512dq avx512bw avx512vl", "7"),
        ("AuthenticAMD", "fpu avx avx2 fma avx512f", "5"),
        ("AuthenticAMD", "fpu avx avx2 fma", "5"),
        ("AuthenticAMD", "fpu avx", None),
        ("GenuineIntel", "fpu avx avx2 fma avx512f avx512cd avx512dq avx512bw avx512vl", None),
    ],
)
def test_mkl_code_path_on_amd_is_the_widest(vendor: str, features: str, code_path: str | None):
    cpuinfo = f"processor\t: 0\nvendor_id\t: {vendor}\nflags\t\t: {features}\n\n"
    assert _runtime._mkl_code_path(cpuinfo) == code_path


def test_configure_runtime_keeps_the_users_mkl_setting():
    code = "import os, paddlenlp_ext; paddlenlp_ext.configure_runtime(); print(os.environ['MKL_DEBUG_CPU_TYPE'])"
    assert run_python(code, MKL_DEBUG_CPU_TYPE="4") == "4"
