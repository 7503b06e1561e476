"""Check that a stored adapter is compatible with the base model and with the options of a run."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any

from paddlenlp_ext.checkpoint.score_head import SCORE_WEIGHT
from paddlenlp_ext.config.run_config import method_options
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.peft.config import PeftConfig
from paddlenlp_ext.peft.formats.read_adapter import AdapterFiles
from paddlenlp_ext.peft.registry import PEFT_METHODS
from paddlenlp_ext.quantization.config import QuantizationConfig, describe_quantization
from paddlenlp_ext.utils.logging import get_logger

logger = get_logger("paddlenlp_ext.peft")


def require_same_method(where: str, stored: PeftConfig, config: PeftConfig) -> None:
    """Check that both configs belong to the same method.

    Raises:
        ValueError: `stored` and `config` belong to different methods.
    """
    if type(stored) is not type(config):
        found, expected = (f"{each.peft_type} ({type(each).__name__})" for each in (stored, config))
        raise ValueError(
            f"{where} contains an adapter of type {found}, but the run trains type {expected}; start from an adapter "
            "of the run's method, or change the method"
        )


def continued_config(stored: AdapterFiles, config: PeftConfig, structure: PeftConfig) -> PeftConfig:
    """Return the config of a run that starts from a stored adapter, and log each difference from `config`.

    Args:
        stored: stored adapter.
        config: options of the run.
        structure: config of the stored adapter, without targets that are missing in the model.

    Raises:
        ValueError: the stored adapter and `config` belong to different methods.
    """
    require_same_method(str(stored.folder), stored.config, config)
    common = ("exclude_modules", "modules_to_save", "bias", "ensure_weight_tying", "saved_embeddings")
    result = config.warm_start(structure)
    result = result.replace(**{name: getattr(structure, name) for name in common})
    for field in dataclasses.fields(result):
        used, requested = getattr(result, field.name), getattr(config, field.name)
        if field.compare and used != requested:
            logger.info(
                "%s: using %r from the stored adapter %s; the value %r of this run is ignored",
                *(field.name, used, stored.folder, requested),
            )
    return result


def require_same_function(where: str, stored: PeftConfig, config: PeftConfig) -> None:
    """Check that a model with the stored tensors computes the same function under both configs.

    Raises:
        ValueError: the configs belong to different methods, or an option outside `free_on_resume` has different values
            in the two configs. The message lists both values of each of these options.
    """
    require_same_method(where, stored, config)
    differences = [
        f"{_key(field.name, config)} changed from {getattr(stored, field.name)!r} to {getattr(config, field.name)!r}"
        for field in dataclasses.fields(config)
        if field.compare
        and field.name not in config.free_on_resume
        and getattr(stored, field.name) != getattr(config, field.name)
    ]
    if differences:
        raise ValueError(
            f"{where}: {'; '.join(differences)}. With the new values, the stored tensors would define a "
            "different function. Restore the options, or start a new run from this adapter."
        )


def _key(attribute: str, config: PeftConfig) -> str:
    """Return the JSON key of a config attribute, or the attribute's name if it has no key."""
    for switch, method in PEFT_METHODS.items():
        if method is type(config):
            return next((o.key for o in method_options(switch, method) if o.attribute == attribute), attribute)
    return attribute


def require_same_base(stored: AdapterFiles, config: Any, quantization: QuantizationConfig | None) -> None:
    """Check that a resumed adapter was trained on the same base model; warn if the adapter names a different model.

    Args:
        stored: stored adapter.
        config: config of the base model.
        quantization: quantization of the base model; None if it is not quantized.

    Raises:
        ValueError: the base model has a different quantization, or its config is overridden differently.
    """
    require_same_config(stored, config, is_resumed=True)
    base_model = config.name_or_path
    before = stored.base_model
    if before is not None and base_model is not None and os.path.realpath(before) != os.path.realpath(base_model):
        logger.warning(
            "%s was trained on %s and resumes on %s; training continues correctly only if both models have the same "
            "weights",
            stored.folder,
            before,
            base_model,
        )
    if stored.quantization != quantization:
        raise ValueError(
            f"{stored.folder}: the adapter was trained on weights in {describe_quantization(stored.quantization)}, "
            f"but the base now has weights in {describe_quantization(quantization)}; set weight_quantize_algo and the "
            "related keys as in training"
        )


def require_same_config(stored: AdapterFiles, config: Any, is_resumed: bool = False) -> None:
    """Check that keys of the base's config, such as `rope_scaling`, have the values that the adapter was trained with.

    Args:
        stored: stored adapter.
        config: config of the base model.
        is_resumed: also raise the error if this run overrides keys of the base's config that training did not override.

    Raises:
        ValueError: the value of a config key differs from training.
    """
    trained, now = stored.base_overrides(config.source), config.source
    different = {key for key, value in trained.items() if now.get(key) != value}
    if is_resumed:
        different |= config.config_overrides.keys() - trained.keys()
    if different:
        shown = [{key: each.get(key, "as stored") for key in sorted(different)} for each in (trained, now)]
        raise ValueError(
            f"{stored.folder}: the adapter was trained on a base with {json.dumps(shown[0])} in its config.json, and "
            f"this base has {json.dumps(shown[1])}; set use_long_sequence_strategies, add_tokens and the related keys "
            "as in training (in Python, load the base with the config_overrides of training, or use "
            "AutoPeftModelForCausalLM)"
        )


def require_same_model(stored: AdapterFiles, model: TrainableModel) -> None:
    """Check that a base model has the config that the adapter was trained with, and the same task.

    Raises:
        ValueError: the value of a config key differs from training; only the adapter or only the base model has a
            score head; or the adapter corrects the errors of a quantization that the base model does not have.
    """
    require_same_config(stored, model.config)
    if stored.config.corrects_quantization and stored.quantization not in (None, model.quantization):
        raise ValueError(
            f"{stored.folder}: the adapter corrects the errors of weights in "
            f"{describe_quantization(stored.quantization)}, but the base has weights in "
            f"{describe_quantization(model.quantization)}; load the base with the quantization of training "
            "(AutoPeftModelForCausalLM does), or merge the adapter into the quantized weights"
        )
    has_head = SCORE_WEIGHT in stored.tensors
    if has_head and not model.trained_modules:
        raise ValueError(
            f"{stored.folder}: the adapter belongs to a reward model ({SCORE_WEIGHT}), but the base is a language "
            "model; load the adapter with AutoPeftModelForSequenceClassification or llm/predict/reward_predictor.py"
        )
    if model.trained_modules and not has_head:
        raise ValueError(
            f"{stored.folder}: the adapter has no score head ({SCORE_WEIGHT}), because it was trained on a language "
            "model; merge the adapter into its base, and start from the merged model"
        )


def warn_of_other_quantization(stored: AdapterFiles, quantization: QuantizationConfig | None) -> None:
    """Warn if the adapter was trained on weights in a different quantized format; no warning if none is recorded."""
    if stored.quantization not in (None, quantization):
        logger.warning(
            "%s was trained on weights in %s and is used with weights in %s; outputs will differ from training",
            stored.folder,
            describe_quantization(stored.quantization),
            describe_quantization(quantization),
        )
