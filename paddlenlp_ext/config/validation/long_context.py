"""Rules about long-sequence strategies and PoSE."""

from __future__ import annotations

from paddlenlp_ext.config.errors import Report
from paddlenlp_ext.config.sections.data import DataConfig
from paddlenlp_ext.config.sections.model import LONG_SEQUENCE_STRATEGIES, ModelConfig
from paddlenlp_ext.config.validation.rules import Rules

rules = Rules()
_ALIBI = "AttentionWithLinearBias"


@rules("use_long_sequence_strategies", "strategy_name")
def _strategies_need_a_name(model: ModelConfig, report: Report) -> None:
    if model.use_long_sequence_strategies and model.strategy_name is None:
        report.error(
            "use_long_sequence_strategies needs strategy_name, such as YaRNScalingRotaryEmbedding",
            "strategy_name",
            "use_long_sequence_strategies",
        )


@rules("strategy_type", "strategy_name")
def _strategy_has_its_type(model: ModelConfig, report: Report) -> None:
    if model.strategy_type is None or model.strategy_name is None:
        return
    if model.strategy_name not in LONG_SEQUENCE_STRATEGIES[model.strategy_type]:
        kind = next(kind for kind, names in LONG_SEQUENCE_STRATEGIES.items() if model.strategy_name in names)
        report.error(
            f"strategy_name {model.strategy_name} belongs to strategy_type {kind}, not {model.strategy_type}; "
            "leave strategy_type out",
            "strategy_type",
            "strategy_name",
        )


@rules("use_long_sequence_strategies", "strategy_name", "rope_scaling_factor")
def _scaling_has_a_factor(model: ModelConfig, report: Report) -> None:
    if model.use_long_sequence_strategies and model.rope_scaling_factor == 1 and model.strategy_name != _ALIBI:
        report.note(
            "use_long_sequence_strategies has no effect with rope_scaling_factor: 1; set the factor to the ratio of "
            "the target context length to the trained context length",
            "rope_scaling_factor",
            "use_long_sequence_strategies",
        )


@rules("use_long_sequence_strategies", "strategy_name", "flash_mask", "use_pose_convert")
def _linear_biases_exclude_other_positions(model: ModelConfig, data: DataConfig, report: Report) -> None:
    if not (model.use_long_sequence_strategies and model.strategy_name == _ALIBI):
        return
    if data.use_pose_convert:
        report.error(
            f"use_pose_convert cannot be used with strategy_name {_ALIBI}, which needs no training at long "
            "distances; set use_pose_convert: false",
            "use_pose_convert",
            "strategy_name",
        )
    if model.flash_mask:
        report.note(
            f"flash_mask only switches on zero_padding: the FlashMask kernel does not support the biases of "
            f"strategy_name {_ALIBI}",
            "flash_mask",
            "strategy_name",
        )
