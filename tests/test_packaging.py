"""Distributions contain the files of the package that are not Python modules."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.common.scripts import ROOT

setuptools = pytest.importorskip("setuptools")


def test_package_data_are_all_tracked_files_that_are_no_modules(monkeypatch):
    listed = subprocess.run(["git", "ls-files", "paddlenlp_ext"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    from distutils.core import run_setup

    monkeypatch.chdir(ROOT)
    build = run_setup("setup.py", stop_after="init").get_command_obj("build_py")
    build.finalize_options()
    packed = {os.path.join(source, name) for _, source, _, names in build.data_files for name in names}
    tracked = {path for path in listed.stdout.split() if not path.endswith(".py") and ".clang-format" not in path}
    assert tracked and tracked <= packed, f"not in package_data of setup.py: {sorted(tracked - packed)}"
