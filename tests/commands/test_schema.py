"""Command `pnx schema`: the stored schema, or its path."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paddlenlp_ext.commands.schema import run


def test_run_prints_the_schema_of_a_command_or_its_path(capsys: pytest.CaptureFixture[str]):
    run(["dpo"])
    schema = json.loads(capsys.readouterr().out)
    assert schema["title"] == "Configuration of run_dpo.py" and "loss_type" in schema["properties"]
    run(["--path"])
    path = Path(capsys.readouterr().out.strip())
    assert path.is_absolute() and json.loads(path.read_text())["title"] == "Configuration of run_finetune.py"
    with pytest.raises(ValueError, match="did you mean 'dpo'"):
        run(["dpp"])
