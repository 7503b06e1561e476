"""Rules about `share_prefix`."""

from __future__ import annotations

import pytest

from paddlenlp_ext.config.errors import ConfigError
from paddlenlp_ext.config.run_config import RunConfig
from paddlenlp_ext.config.sections.preference import PreferenceConfig, PreferenceDataConfig
from paddlenlp_ext.config.validation import check_trainer_config
from tests.common.training import make_config
from tests.config.config_cases import SMALLEST, load, problems, write

SHARED = {"share_prefix": True, "zero_padding": True}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"zero_padding": False}, "share_prefix: only rows of the same pack share a prefix; set zero_padding: true"),
        ({"lazy": True, "max_steps": 5}, "share_prefix: the rows of a stream are not compared"),
        ({"autoregressive": True}, "share_prefix: all tokens of plain text are targets"),
        ({"use_pose_convert": True}, "share_prefix: with PoSE, the position ids of a prefix vary"),
    ],
    ids=lambda value: " ".join(value)[:30],
)
def test_share_prefix_with_data_that_cannot_share_is_an_error(tmp_path, values, words):
    (found,) = problems(write(tmp_path, SMALLEST | SHARED | values))
    assert words in found.message and found.key == "share_prefix"
    with pytest.raises(ConfigError, match=words[:40]):
        check_trainer_config(make_config(tmp_path, **SHARED | values))
    load(write(tmp_path, SMALLEST | values))


def test_share_prefix_of_packed_rows_is_accepted_and_notes_shared_noise(tmp_path):
    assert load(write(tmp_path, SMALLEST | SHARED)).notes == []
    (note,) = load(write(tmp_path, SMALLEST | SHARED | {"neftune": True})).notes
    assert "rows that share a prefix also share the noise" in note


def test_share_prefix_in_preference_training_is_an_error():
    config = RunConfig(preference=PreferenceConfig(), data=PreferenceDataConfig(share_prefix=True, zero_padding=True))
    with pytest.raises(ConfigError, match="share_prefix cannot be used with preference data"):
        check_trainer_config(config)
