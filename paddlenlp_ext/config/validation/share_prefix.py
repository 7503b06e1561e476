"""Rules about `share_prefix`: the data that cannot share prefixes."""

from __future__ import annotations

from paddlenlp_ext.config.errors import Report
from paddlenlp_ext.config.sections.data import DataConfig
from paddlenlp_ext.config.sections.preference import PreferenceDataConfig
from paddlenlp_ext.config.sections.train import TrainConfig
from paddlenlp_ext.config.validation.rules import Rules

rules = Rules()


@rules("share_prefix")
def _rows_have_one_answer(data: DataConfig, report: Report) -> None:
    if data.share_prefix and isinstance(data, PreferenceDataConfig):
        message = "share_prefix: this program reads preference data, whose prompts share_prompt shares; leave it out"
        report.error(message, "share_prefix")


def _refuse(key: str, value: bool, reason: str) -> None:
    """Register the rule that `share_prefix` is an error if `key` has a value."""

    @rules("share_prefix", key)
    def rule(data: DataConfig, report: Report) -> None:
        if data.share_prefix and getattr(data, key) == value:
            report.error(f"share_prefix: {reason}", "share_prefix", key)


_refuse("zero_padding", False, "rows share a prefix within a pack; set zero_padding: true")
_refuse("lazy", True, "the rows of a stream are not compared before training; set lazy: false")
_refuse("autoregressive", True, "every token of plain text is a target, and none can be shared; set it to false")
_refuse("use_pose_convert", True, "PoSE gives each row other position ids in the prefix; set one of the two to false")


@rules("share_prefix", "neftune")
def _note_shared_noise(data: DataConfig, train: TrainConfig, report: Report) -> None:
    if data.share_prefix and train.neftune:
        report.note("share_prefix: the rows of a pack with one prefix get the same noise on it (neftune)", "neftune")
