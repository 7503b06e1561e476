"""Reward of a format: 1 for a completion that is a JSON value and conforms to a schema, otherwise 0."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paddlenlp_ext.config.sections.rewards import RewardsConfig
from paddlenlp_ext.rewards.registry import REWARD_FUNCTIONS, RewardFunction, required, text_of
from paddlenlp_ext.utils.files import read_json_object
from paddlenlp_ext.utils.optional_packages import import_extra


@REWARD_FUNCTIONS.register("json_format")
def json_format(config: RewardsConfig) -> RewardFunction:
    """Return the reward function for the schema in `reward_json_schema`.

    Raises:
        ValueError: the key is unset, the file has no valid schema, or jsonschema is not installed.
    """
    file = required(config.reward_json_schema, "reward_json_schema", "json_format")
    library = import_extra("jsonschema", "rewards", "reward_funcs: json_format")
    schema = read_json_object(Path(file).expanduser())
    kind = library.validators.validator_for(schema, library.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except library.SchemaError as error:
        raise ValueError(f"reward_json_schema: {file} is not a JSON schema: {error.message}") from error
    validator = kind(schema)

    def conforms(text: str) -> bool:
        try:
            return validator.is_valid(json.loads(text, parse_constant=_refuse))
        except (ValueError, RecursionError):
            return False

    def reward(completions: Sequence[Any], **_: Any) -> list[float]:
        return [float(conforms(text_of(each))) for each in completions]

    return reward


def _refuse(name: str) -> None:
    """Reject NaN and infinities, which Python reads although JSON lacks them."""
    raise ValueError(f"{name} is not a JSON value")
