"""SIGTERM to a training process, as a scheduler sends it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

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


@pytest.mark.slow
def test_run_finetune_terminated_logs_it_and_leaves_a_checkpoint(tmp_path):
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
