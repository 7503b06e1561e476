"""Rules about `share_prefix` and the options that it cannot be combined with."""

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
        message = "share_prefix cannot be used with preference data, where share_prompt shares prompts; leave it out"
        report.error(message, "share_prefix")


def _refuse(key: str, value: bool, reason: str) -> None:
    """Register the rule that `share_prefix` is an error if `key` has the value `value`."""

    @rules("share_prefix", key)
    def rule(data: DataConfig, report: Report) -> None:
        if data.share_prefix and getattr(data, key) == value:
            report.error(f"share_prefix: {reason}", "share_prefix", key)


_refuse("zero_padding", False, "only rows of the same pack share a prefix; set zero_padding: true")
_refuse("lazy", True, "the rows of a stream are not compared before training; set lazy: false")
_refuse("autoregressive", True, "all tokens of plain text are targets, which are not shared; set autoregressive: false")
_refuse("use_pose_convert", True, "with PoSE, the position ids of a prefix vary by row; set use_pose_convert: false")


@rules("share_prefix", "neftune")
def _note_shared_noise(data: DataConfig, train: TrainConfig, report: Report) -> None:
    if data.share_prefix and train.neftune:
        report.note("neftune with share_prefix: rows that share a prefix also share the noise on the prefix", "neftune")
