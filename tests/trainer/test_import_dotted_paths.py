"""User code that a configuration names is imported before the data is read."""

from __future__ import annotations

import json

import pytest

import paddlenlp_ext
from paddlenlp_ext import SFTConfig, SFTTrainer
from paddlenlp_ext.cli.run_finetune import run_finetune
from tests.common.adapters import run_keys


@pytest.fixture
def keys(run_folders):
    """Keys of a run whose dataset is missing too."""
    return run_keys(run_folders, max_steps=1) | {"dataset_name_or_path": str(run_folders / "no_data")}


@pytest.mark.parametrize(
    ("key", "value"), [("callbacks", ["absent_one.Count"]), ("compute_metrics", "absent_one.words")]
)
def test_user_code_that_cannot_be_imported_is_reported_before_missing_data(keys, run_folders, key, value):
    named = {**keys, key: value}
    with pytest.raises(ValueError, match=f"{key}: absent_one cannot be imported"):
        paddlenlp_ext.finetune(named)
    file = run_folders / "run.json"
    file.write_text(json.dumps(named))
    with pytest.raises(ValueError, match=f"{key}: absent_one cannot be imported"):
        run_finetune([str(file), "--dry_run", "true"])
    args = SFTConfig(str(run_folders / "trl"), run_keys={key: value})
    with pytest.raises(ValueError, match=f"{key}: absent_one cannot be imported"):
        SFTTrainer(named["model_name_or_path"], args=args, train_dataset=named["dataset_name_or_path"])
