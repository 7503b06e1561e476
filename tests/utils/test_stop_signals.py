"""Signals that arrive outside of training, sent to processes that run a command."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from paddlenlp_ext.utils.stop_signals import STOP_SIGNALS
from tests.common.scripts import script_environment

PROGRAM = """
import signal, sys, time
from pathlib import Path
from paddlenlp_ext.utils import stop_signals
from paddlenlp_ext.utils.files import atomic_folder
from paddlenlp_ext.utils.run_command import run_command

def wait():
    print("ready", flush=True)
    time.sleep(100)

def write_a_folder(argv):
    with atomic_folder(argv[0]):
        wait()

def catch_everything(argv):
    stop_signals._CLEANUP_SECONDS = 0.1
    while True:
        try:
            wait()
        except BaseException:
            pass

def clean_up_slowly(argv):
    stop_signals._CLEANUP_SECONDS = 100.0
    try:
        wait()
    finally:  # the kernel delivers the second signal to another thread, so that the sleep goes on
        signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals.STOP_SIGNALS)
        wait()

def stop_before_the_line(argv):
    install = stop_signals.handle_stop_signals
    def install_and_stop(handler):
        install(handler)
        signal.raise_signal(signal.SIGTERM)
    stop_signals.handle_stop_signals = install_and_stop
    wait()

def import_from(argv):
    sys.path.insert(0, argv[0])
    import noisy

def import_paddle(argv):
    import paddle
    wait()

for number in stop_signals.STOP_SIGNALS:  # a test run in the background may ignore some, and its children inherit that
    signal.signal(number, signal.SIG_DFL)
run_command(globals()[sys.argv[1]], sys.argv[2:])
"""


def stop(signals, *arguments):
    """Run PROGRAM, send one signal whenever it is ready, and return its exit code and standard error."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, *arguments],
        env=script_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for number in signals:
        assert process.stdout.readline() == "ready\n", process.communicate()[1]
        process.send_signal(number)
    errors = process.communicate(timeout=90)[1]  # the program would wait for longer
    return process.returncode, errors


@pytest.mark.parametrize("number", STOP_SIGNALS, ids=lambda number: number.name)
def test_signal_outside_of_training_prints_a_line_removes_drafts_and_exits_with_its_code(tmp_path, number):
    assert stop([number], "write_a_folder", str(tmp_path / "out")) == (128 + number, f"stopped by {number.name}\n")
    assert [path.name for path in tmp_path.iterdir() if path.name != ".out.lock"] == []


def test_signal_whose_exception_is_caught_ends_the_program():
    assert stop([signal.SIGTERM], "catch_everything") == (143, "stopped by SIGTERM\n")


def test_second_signal_during_the_cleanup_ends_the_program():
    assert stop([signal.SIGTERM, signal.SIGINT], "clean_up_slowly") == (130, "stopped by SIGTERM\n")


def test_second_signal_before_the_line_of_the_first_ends_the_program_after_the_line():
    assert stop([signal.SIGUSR1], "stop_before_the_line") == (128 + signal.SIGTERM, "stopped by SIGUSR1\n")


def test_signal_during_an_import_ends_the_program_without_messages_of_the_module(tmp_path):
    (tmp_path / "noisy.py").write_text(
        "import __main__, sys\ntry:\n    __main__.wait()\nexcept BaseException:\n    sys.exit('noise')\n"
    )
    assert stop([signal.SIGINT], "import_from", str(tmp_path)) == (130, "stopped by SIGINT\n")


@pytest.mark.slow
def test_sigterm_after_the_import_of_paddle_prints_a_line_only():
    """Test that Paddle's own handler, which prints a report of ten lines, is not left in place."""
    assert stop([signal.SIGTERM], "import_paddle") == (143, "stopped by SIGTERM\n")
