"""Stop signals, and SIGTERM to a training process as a scheduler sends it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from paddlenlp_ext.trainer import signals as signals_module
from paddlenlp_ext.trainer.signals import StopSignals
from tests.common.scripts import script_environment

SCRIPT = """
import sys
from paddlenlp_ext import configure_runtime
configure_runtime()
from paddlenlp_ext.trainer.trainer import Trainer
from tests.common.training import Rows, Tokenizer, make_config, make_model

config = make_config(sys.argv[1], max_steps=100000)
Trainer(make_model(lora=True), config, Rows(16), None, Tokenizer()).train()
"""


def test_stop_signals_first_sets_received_and_second_stops():
    heard = []
    before = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        with StopSignals() as signals:
            assert signals.received is None
            os.kill(os.getpid(), signal.SIGINT)
            assert signals.received == signal.SIGINT and heard == []
            os.kill(os.getpid(), signal.SIGINT)
            assert heard == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_stop_signals_repeated_sigterm_counts_once(monkeypatch):
    heard = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        with StopSignals() as signals:
            for _ in range(3):  # as Paddle's launchers do
                os.kill(os.getpid(), signal.SIGTERM)
            assert signals.received == signal.SIGTERM and heard == []
            monkeypatch.setattr(signals_module, "_REPEAT_SECONDS", 0.0)
            os.kill(os.getpid(), signal.SIGTERM)
            assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.slow
def test_trainer_on_sigterm_logs_it_and_leaves_a_checkpoint(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "run")],
        env=script_environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    seen = []
    for line in process.stderr:
        seen.append(line)
        if "step 3/" in line:
            process.send_signal(signal.SIGTERM)
            break
    seen += process.communicate(timeout=60)[1].splitlines()
    assert process.returncode == 128 + signal.SIGTERM
    assert "SIGTERM: finishing this optimizer step" in "".join(seen)
    assert "To continue: resume_from_checkpoint: true" in seen[-1] and "Traceback" not in "".join(seen)
    (folder,) = (tmp_path / "run").glob("checkpoint-*")
    state = json.loads((folder / "trainer_state.json").read_text())
    assert folder.name == f"checkpoint-{state['step']}" and state["step"] >= 3
