"""Fixture with the built plug-in."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stub_device.plugin import COMPILER, build


@pytest.fixture(scope="session")
def stub_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the plug-in, and return its folder."""
    if COMPILER is None:
        pytest.skip("the stub device is not built: g++ is missing, so nothing runs on a device with memory of its own")
    return build(tmp_path_factory.mktemp("stub_device"))
