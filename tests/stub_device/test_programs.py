"""Programs of llm/ and the server on the stub device, compared with the CPU."""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.common.scripts import ROOT
from tests.common.server_process import server_process
from tests.stub_device.plugin import run_with_stub, variables_of

WORKER = Path(__file__).with_name("programs_worker.py")
NUMBERS = ("rewards", "scores", "harness")


@pytest.mark.slow
def test_programs_give_the_same_results_as_on_the_cpu(stub_folder, tmp_path):
    found = {}
    for device in ("cpu", "stub:1"):
        (folder := tmp_path / device[:4]).mkdir()
        done = run_with_stub(stub_folder, WORKER, device, folder, PYTHONPATH=str(ROOT))
        assert done.returncode == 0, done.stderr[-3000:]
        found[device] = json.loads(done.stdout.splitlines()[-1])
    on_cpu, on_device = found["cpu"], found["stub:1"]
    assert on_device.keys() == on_cpu.keys() > set(NUMBERS)
    for key, expected in on_cpu.items():
        if key in NUMBERS:
            np.testing.assert_allclose(on_device[key], expected, rtol=1e-4, atol=1e-5, err_msg=key)
        else:
            assert on_device[key] == expected, key
    assert on_device["gguf"] == on_device["adapter"], "the GGUF file has the merged adapter"


def answer(port: int, **keys: Any) -> Any:
    """Return the reply to a request for a completion, without id and time."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = json.dumps({"model": "model", "prompt": "red apple =", "max_tokens": 6, **keys})
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    reply = connection.getresponse()
    assert reply.status == 200
    return json.loads(reply.read())["choices"]


@pytest.mark.slow
def test_server_gives_the_same_answers_as_on_the_cpu(stub_folder, run_folders, monkeypatch):
    for name, value in variables_of(stub_folder).items():
        monkeypatch.setenv(name, value)
    found = {}
    for device in ("cpu", "stub:1"):
        words = ("--dtype", "float32", "--chat_template", "none", "--device", device)
        with server_process(str(run_folders / "model"), *words) as (_, port):
            found[device] = [answer(port, temperature=0), answer(port, temperature=1, seed=3, n=2)]
    assert found["stub:1"] == found["cpu"]
