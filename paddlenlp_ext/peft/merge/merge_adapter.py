"""Merge a stored adapter into the files of its base model, and verify the result before publishing it.

Two comparisons of logits on fixed prompts verify the merge:

| step | model | compared with | detects |
| --- | --- | --- | --- |
| 1 | model merged in memory | base with adapter | errors in the merge formula |
| 2 | model loaded from the merged files | model merged in memory, rounded to the files' dtypes | errors in the files |

The output folder is renamed to its final name after both steps. Both models of the second comparison have rounded
weights, so the tolerance is the same for bfloat16 and float32. The effect of rounding is reported separately.

By default, an adapter that was trained on a quantized base is merged into the dequantized weights, to reproduce the
trained model. With `merge_base` "original", the adapter is merged into the original weights, and the difference
from the trained model is measured.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import paddle

from paddlenlp_ext.checkpoint.config_json import read_model_config
from paddlenlp_ext.checkpoint.hub import resolve_base, resolve_model
from paddlenlp_ext.checkpoint.open_weights import open_weights
from paddlenlp_ext.checkpoint.output_folder import check_output
from paddlenlp_ext.checkpoint.resized_embeddings import with_vocab_size
from paddlenlp_ext.checkpoint.score_head import SCORE_WEIGHT, TASK_KEYS, ClassifierWeights
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.peft.formats.read_adapter import AdapterFiles, read_adapter
from paddlenlp_ext.peft.merge.compare_logits import fixed_prompts, largest, logits_of, require_equal_logits
from paddlenlp_ext.peft.merge.in_memory import require_mergeable_method
from paddlenlp_ext.peft.merge.write_merged import (
    common_dtype,
    round_to_stored,
    tensors_by_module,
    write_companions,
    write_merged_weights,
    write_model_card,
)
from paddlenlp_ext.peft.peft_model import PeftModel
from paddlenlp_ext.quantization.config import QuantizationConfig
from paddlenlp_ext.quantization.config_json import from_quantization_config
from paddlenlp_ext.quantization.quantize_model import matrices_by_layer, quantize_linears
from paddlenlp_ext.quantization.quantized_weight_source import QuantizedWeights
from paddlenlp_ext.utils.files import atomic_folder
from paddlenlp_ext.utils.logging import get_logger

logger = get_logger("paddlenlp_ext.peft")

MergeBase = Literal["dequantized", "original"]
_LOST_IN_ROUNDING = (
    "the adapter changes logits by up to {:.3g}, but rounding the merged weights to {} changes logits by up to {:.3g}, "
    "so most of the training would be lost; pass --dtype float32"
)
_FAR_FROM_TRAINED = (
    "the adapter changes logits by up to %.3g, but merging it into the original weights instead of the quantized "
    "weights changes logits by up to %.3g, so the result is far from the trained model; leave out --merge_into to get "
    "the trained model"
)


@dataclass(frozen=True)
class MergeReport:
    """Result of a merge.

    Attributes:
        output: folder of the merged model.
        num_merged: number of merged layers.
        merged_into: description of the weights that the adapter was merged into.
        effect: largest change that the adapter causes in a logit.
        difference: largest difference between a logit of the merged model and the same logit of the trained model,
            including rounding.
    """

    output: Path
    num_merged: int
    merged_into: str
    effect: float
    difference: float


def merge_adapter(
    adapter: str | os.PathLike[str],
    output: str | os.PathLike[str],
    load_model: Callable[..., TrainableModel],
    base: str | os.PathLike[str] | None = None,
    dtype: str | None = None,
    overwrite: bool = False,
    allow_pickle: bool = False,
    merge_base: MergeBase = "dequantized",
) -> MergeReport:
    """Write the merged model of an adapter and its base as a Hugging Face folder, and verify it.

    Peak memory is one float32 model (for the comparisons) plus the adapter, and the quantized weights if the base was
    quantized in training.

    Args:
        adapter: adapter folder.
        output: folder to create.
        load_model: function that loads a folder or .gguf file as a float32 model, such as
            `AutoModelForCausalLM.from_pretrained`. The options of `load_model` are `config_overrides` if the base's
            config was changed, and `task_type` for a reward model.
        base: base model; None: the base model recorded in the adapter's config.
        dtype: dtype of the merged weights; None: the dtype of the base (`common_dtype`).
        overwrite: replace an existing model at `output`.
        allow_pickle: read pickled weights, as in `read_adapter`.
        merge_base: weights into which the adapter is merged if the base was quantized in training.

    Raises:
        ValueError: the base model is not found; the adapter belongs to another model, has no effect or cannot be
            merged; rounding the merged weights loses most of the adapter's effect; `output` exists; `merge_base` is
            "original" for a base that is stored quantized; or logits differ by more than the tolerance. After an error,
            nothing is written.
    """
    stored = read_adapter(adapter, allow_pickle)
    require_mergeable_method(stored.config)
    if SCORE_WEIGHT in stored.tensors:
        load_model = partial(load_model, task_type="SEQ_CLS")
    base_name = _base_name(base, stored)
    base_path = resolve_model(base) if base else resolve_base(base_name, stored.folder, "--model_name_or_path BASE")
    output = Path(output).expanduser()
    check_output(output, overwrite, (base_path, stored.folder))
    base_config = read_model_config(base_path)
    quantization = stored.base_quantization(base_config)
    merged_into = _describe_target(merge_base, base_path, stored)
    overrides = stored.base_overrides(base_config)
    input_ids = fixed_prompts({**base_config, **overrides}["vocab_size"])
    trained = target = _load_adapted(load_model, base_path, stored, quantization, overrides, input_ids)
    effect = largest(trained.adapted_logits - trained.base_logits)
    if effect == 0.0:
        raise ValueError(
            f"{stored.folder}: this adapter has no effect on the logits; check that it was trained; nothing is written"
        )
    if quantization is not None and merge_base == "original":
        target = _load_adapted(load_model, base_path, stored, None, overrides, input_ids)
    merged = target.pop_model().merge_and_unload()
    require_equal_logits(
        logits_of(merged, input_ids), target.adapted_logits, "the model merged in memory", "base with adapter"
    )
    dtype = dtype or common_dtype(base_path, target.source)
    with atomic_folder(output) as draft:
        _write_files(draft, base_path, target, merged, dtype, overrides)
        round_to_stored(merged, target.config.from_files(open_weights(draft)))
        expected = logits_of(merged, input_ids)
        del merged  # free the memory before loading another model
        written = logits_of(load_model(draft), input_ids)
        require_equal_logits(written, expected, "the merged files", "the model merged in memory")
        difference = largest(written - trained.adapted_logits)
        is_far = difference > effect / 2
        if is_far and target is trained and dtype != "float32":
            raise ValueError(_LOST_IN_ROUNDING.format(effect, dtype or "the base's dtype", difference))
        write_model_card(draft, stored, base_name, merged_into, effect, difference)
    if is_far and target is not trained:
        logger.warning(_FAR_FROM_TRAINED, effect, difference)
    return MergeReport(output, len(target.modules), merged_into, effect, difference)


@dataclass
class _AdaptedBase:
    """Base model with its adapter, the base's weights, and the logits without and with the adapter.

    Attributes:
        model: base model with the adapter.
        source: weights of the base model.
        stored: stored adapter, with the layer names of the decoder.
        modules: result of `tensors_by_module`.
        config: config of the base model, which converts tensors between memory and files.
        base_logits, adapted_logits: logits of the prompts without and with the adapter.
    """

    model: PeftModel | None
    source: QuantizedWeights
    stored: AdapterFiles
    modules: dict[str, dict[str, np.ndarray]]
    config: Any
    base_logits: np.ndarray
    adapted_logits: np.ndarray

    def pop_model(self) -> PeftModel:
        """Return the model and drop this object's reference, so that the caller can free the model's memory."""
        model, self.model = self.model, None
        assert model is not None
        return model


def _write_files(
    folder: Path,
    base: Path,
    target: _AdaptedBase,
    merged: TrainableModel,
    dtype: str | None,
    overrides: Mapping[str, Any],
) -> None:
    """Write the merged weights with the config and the tokenizer of the base."""
    # Checkpoints of tied models may contain lm_head as a copy of the embedding.
    copies = ("lm_head.weight",) if merged.config.tie_word_embeddings else ()
    stored = target.stored
    write_merged_weights(folder, target.source, stored, target.modules, dtype, target.config.to_files, left_out=copies)
    # The text config of a composite model may lack `architectures`.
    keys = ("architectures",) if merged.config.num_labels is None else TASK_KEYS
    task = {key: merged.config.source[key] for key in keys}
    write_companions(folder, base, stored.folder, dtype, {**overrides, **task})


def _load_adapted(
    load_model: Callable[..., TrainableModel],
    base: Path,
    stored: AdapterFiles,
    quantization: QuantizationConfig | None,
    overrides: Mapping[str, Any],
    input_ids: paddle.Tensor,
) -> _AdaptedBase:
    model = load_model(base, **({"config_overrides": overrides} if overrides else {}))
    own = stored.for_base(model.config)
    if quantization is not None:
        quantize_linears(model, quantization, own.before_quantizing)
    layers, config = matrices_by_layer(model), model.config
    weights = with_vocab_size(config.from_files(open_weights(base)), overrides.get("vocab_size"))
    if SCORE_WEIGHT in stored.tensors:
        weights = ClassifierWeights(weights, stored.tensors[SCORE_WEIGHT])
    source = QuantizedWeights(weights, quantization, layers, own.before_quantizing)
    modules = tensors_by_module(own, source)
    base_logits = logits_of(model, input_ids)
    adapted = PeftModel.from_files(model, stored)
    return _AdaptedBase(adapted, source, own, modules, config, base_logits, logits_of(adapted, input_ids))


def _describe_target(merge_base: MergeBase, base: Path, stored: AdapterFiles) -> str:
    """Describe the weights into which the adapter is merged."""
    saved = from_quantization_config(read_model_config(base).get("quantization_config"))
    trained_over = stored.quantization or saved
    if merge_base == "original" and saved is not None:
        raise ValueError(f"{base} is stored quantized; pass the original model with --model_name_or_path")
    if trained_over is None:
        return "the weights of the base"
    words = trained_over.describe()
    if merge_base == "original":
        return f"the original weights; the adapter was trained on their quantized values ({words})"
    return f"the dequantized weights that the adapter was trained on ({words})"


def _base_name(base: str | os.PathLike[str] | None, stored: AdapterFiles) -> str | os.PathLike[str]:
    name = base or stored.base_model
    if not name:
        raise ValueError(f"{stored.folder} does not name its base model; pass --model_name_or_path (in Python: base)")
    return name
