"""Collectives of the plug-in, which the runs of several processes on its devices need."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.common.parallel import logs, start
from tests.stub_device.plugin import variables_of

WORKER = Path(__file__).with_name("collectives_worker.py")


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.layouts)])
def test_collectives_of_the_plug_in_match_numpy(stub_folder, tmp_path, processes):
    result = start(processes, [str(WORKER)], tmp_path, plugin=variables_of(stub_folder))
    assert result.returncode == 0, logs(tmp_path)
