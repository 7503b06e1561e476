"""`run_finetune.py` under Paddle's launcher: runs, refusals before any weight is read, and signals."""

from __future__ import annotations

import json
import signal
import subprocess
import time

import pytest

from tests.common.parallel import launch_arguments, logs, start
from tests.common.scripts import LLM

SCRIPT = str(LLM / "run_finetune.py")


@pytest.fixture
def command(run_folders):
    """Return the command line of a small run."""
    keys = {
        "model_name_or_path": str(run_folders / "model"),
        "dataset_name_or_path": str(run_folders / "data"),
        "data_cache_dir": str(run_folders / "cache"),
        "output_dir": str(run_folders / "out"),
        "do_train": True,
        "do_eval": True,
        "do_predict": True,
        "device": "cpu",
        "max_steps": 4,
        "logging_steps": 1,
        "per_device_train_batch_size": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "max_length": 32,
        "src_length": 16,
    }
    (run_folders / "run.json").write_text(json.dumps(keys))
    (run_folders / "data" / "test.json").write_bytes((run_folders / "data" / "dev.json").read_bytes())
    return [SCRIPT, str(run_folders / "run.json")]


def test_launch_of_two_processes_makes_one_run(command, run_folders):
    result = start(2, command, run_folders)
    assert result.returncode == 0, logs(run_folders)
    out = run_folders / "out"
    assert {"model.safetensors", "eval_results.json", "checkpoint-4"} <= {path.name for path in out.iterdir()}
    history = json.loads((out / "trainer_state.json").read_text())["log_history"]
    assert [entry["step"] for entry in history] == [1, 2, 3, 4]
    main, other = ((run_folders / "log" / f"workerlog.{rank}").read_text() for rank in range(2))
    assert main.count("step 3/4") == 1 and "step 3/4" not in other
    both = main + other
    assert both.count("tokens cached in") == 3, "train, dev and test, each tokenized once"
    assert "cached tokens found in" in both
    evaluated, tested = (json.loads((out / f"{name}_results.json").read_text()) for name in ("eval", "test"))
    assert evaluated["eval_num_rows"] == tested["test_num_rows"] == 12
    assert tested["test_loss"] == evaluated["eval_loss"]


@pytest.mark.layouts
def test_launch_with_degrees_that_do_not_divide_raises_at_once(command, run_folders):
    started = time.perf_counter()
    result = start(2, [*command, "--tensor_parallel_degree", "3"], run_folders)
    assert result.returncode != 0
    assert time.perf_counter() - started < 60
    message = (run_folders / "log" / "workerlog.0").read_text()
    assert "tensor_parallel_degree 3 need 3 processes, but 2 were started" in message
    assert "nearest valid degrees: tensor_parallel_degree 2" in message
    assert not (run_folders / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.layouts)])
def test_launcher_stopped_by_a_signal_lets_its_processes_save(command, run_folders, number):
    keys = ["--max_steps", "3000", "--do_eval", "false", "--save_strategy", "no"]
    arguments = launch_arguments(2, [*command, *keys], run_folders)
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    # A shell that starts the tests in the background lets them and their children ignore SIGINT.
    launcher = subprocess.Popen(**arguments, **quiet, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    log = run_folders / "log" / "workerlog.0"

    def wait_for(words):
        deadline = time.monotonic() + 60
        while not (log.is_file() and words in log.read_text()):
            assert time.monotonic() < deadline, logs(run_folders)
            time.sleep(0.05)

    try:
        wait_for("step 3/")
        launcher.send_signal(number)
        wait_for("To continue: resume_from_checkpoint: true")
    finally:
        launcher.terminate()
        launcher.wait(60)
    (folder,) = (run_folders / "out").glob("checkpoint-*")
    assert 3 <= json.loads((folder / "trainer_state.json").read_text())["step"] < 3000


FAILING = """
import time
from paddlenlp_ext.utils.run_command import run_command
from paddlenlp_ext.utils.distributed_env import rank

def main(argv):
    if rank() == 1:
        raise RuntimeError("the second process fails")
    time.sleep(300)

run_command(main)
"""


@pytest.mark.layouts
def test_launcher_shows_the_error_of_any_process_and_ends(tmp_path):
    (tmp_path / "failing.py").write_text(FAILING)
    started = time.perf_counter()
    result = start(2, [str(tmp_path / "failing.py")], tmp_path)
    assert time.perf_counter() - started < 60 and result.returncode != 0
    assert "RuntimeError: the second process fails" in result.stderr and "[rank 1] Traceback" in result.stderr
