"""`python -m` with a module of the package of programs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import paddlenlp_ext.cli
from tests.common.scripts import ROOT

MODULES = sorted(path.stem for path in Path(paddlenlp_ext.cli.__file__).parent.glob("[!_]*.py"))


@pytest.mark.parametrize("name", MODULES)
def test_cli_module_run_with_python_m_names_the_script(name: str):
    command = [sys.executable, "-m", f"paddlenlp_ext.cli.{name}", "my.json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 2
    message, _, script = done.stderr.strip().partition("; run: python ")
    assert message == f"error: paddlenlp_ext.cli.{name} is not a program"
    assert (ROOT / script.split()[0]).is_file()
