"""Inject adapters: wrap target layers, replace parameters, load stored tensors, and undo everything on failure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

from paddle import nn

from paddlenlp_ext.nn.submodules import layer_at, replace_layer
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.peft import compatibility
from paddlenlp_ext.peft.adapter import Adapter
from paddlenlp_ext.peft.config import PeftConfig
from paddlenlp_ext.peft.formats.read_adapter import AdapterFiles, read_adapter
from paddlenlp_ext.peft.formats.renamed_layers import with_names_in_memory
from paddlenlp_ext.peft.layers import adapter_layers, detach_adapters
from paddlenlp_ext.peft.lora_conversion import lora_config_for, lora_tensors
from paddlenlp_ext.peft.low_rank_factors import Factors
from paddlenlp_ext.peft.modules_to_save import (
    ReplacedParameters,
    covers,
    excluded_targets,
    replace_parameters,
    with_trained_modules,
)
from paddlenlp_ext.peft.target_modules import without_foreign_targets
from paddlenlp_ext.peft.trainable_token_indices import EMBEDDING, TABLES, TrainableTokens, tokens_of_model
from paddlenlp_ext.quantization.quantize_model import quantized_layers
from paddlenlp_ext.quantization.quantized_grouped_linear import AnyGroupedLinear
from paddlenlp_ext.utils.logging import get_logger
from paddlenlp_ext.utils.suggest import did_you_mean

logger = get_logger("paddlenlp_ext.peft")


def new_adapter(model: TrainableModel, config: PeftConfig, seed: int) -> Adapter:
    """Add an adapter to a base model; if `config.path` is set, start from the adapter stored at this path.

    Raises:
        ValueError: the adapter cannot be added (see `inject`), or the stored adapter does not fit the model or the
            config; the model is unchanged.
    """
    config = with_names_in_memory(config, model.config)
    if model.trained_modules:
        config = with_trained_modules(config, model)
    _log_frozen_experts(model, config)
    if config.exclude_modules and not config.path:
        _require_excluded_targets(model, config)
    with undone_on_failure(model):
        return _continued_adapter(model, config, seed) if config.path else inject(model, config, seed)


def inject(model: TrainableModel, config: PeftConfig, seed: int = 42) -> Adapter:
    """Freeze every parameter of the model, and add an adapter.

    Args:
        model: base model without an adapter.
        config: config of the adapter's method.
        seed: seed of the adapter's initial values.

    Raises:
        ValueError: the model already has an adapter; a target matches no layer, or every target is excluded; a tied
            embedding is both a target and trained in full; or the layers were quantized after subtracting the initial
            factors of another adapter.
    """
    if next(adapter_layers(model), None) is not None:
        raise ValueError(
            "the model already has an adapter; add another with PeftModel.add_adapter(), or call unload() or "
            "merge_and_unload() first"
        )
    targets = config.targets(model)
    if config.exclude_modules or config.modules_to_save:
        targets = _without_excluded(model, config, targets)
    for parameter in model.parameters():
        parameter.stop_gradient = True
    bases = {name: layer_at(model, name) for name in targets}
    wrap = config.wrapper(bases, seed)
    if config.trainable_token_indices is not None:
        _wrap_tables(model, config, bases)
    for name, base in bases.items():
        replace_layer(model, name, wrap(name, base))
    injected = dict(adapter_layers(model))
    replaces = config.modules_to_save or config.saved_embeddings or config.bias != "none"
    replaced = replace_parameters(model, config) if replaces else ReplacedParameters(model)
    adapter_class = config.adapter_class or Adapter
    assert issubclass(adapter_class, Adapter)
    adapter = adapter_class(model, config, injected, replaced)
    if model.quantization is not None:
        _check_residual_bases(model)
    return adapter


def _require_excluded_targets(model: TrainableModel, config: PeftConfig) -> None:
    """Check that each entry of `exclude_modules` matches a target; configs of stored adapters are not checked."""
    targets = config.targets(model)
    for entry in config.exclude_modules or ():
        if not excluded_targets(config.replace(exclude_modules=(entry,), modules_to_save=None), targets):
            leaves = list(dict.fromkeys(name.rpartition(".")[2] for name in targets))
            raise ValueError(
                f"exclude_modules: {entry} matches no target of the adapter{did_you_mean(entry, leaves)} Targets: "
                f"{', '.join(leaves)}. Remove the entry, or correct it."
            )


def _without_excluded(model: TrainableModel, config: PeftConfig, targets: list[str]) -> list[str]:
    """Return the targets except for excluded layers and layers that are trained in full."""
    excluded = excluded_targets(config, targets)
    if targets and len(excluded) == len(targets):
        raise ValueError("exclude_modules and modules_to_save leave no layer to adapt; exclude fewer layers")
    kept = [name for name in targets if name not in excluded]
    if model.config.tie_word_embeddings and _trained_tables(config) and EMBEDDING in kept:
        raise ValueError(
            "modules_to_save: the base ties lm_head to embed_tokens, which is also a target of the adapter; name the "
            "layer either in modules_to_save or in the targets"
        )
    return kept


def _trained_tables(config: PeftConfig) -> list[str]:
    """Return the names of the layers (embedding, lm_head) that are trained in full."""
    return [name for name in TABLES if covers(config.modules_to_save, name)]


def _wrap_tables(model: TrainableModel, config: PeftConfig, targets: Collection[str]) -> None:
    """Wrap the embedding and lm_head to train the rows of the tokens in `trainable_token_indices`."""
    tokens = tokens_of_model(config.trainable_token_indices, model, _trained_tables(config), targets)
    for name, ids in tokens.items():
        replace_layer(model, name, TrainableTokens(layer_at(model, name), ids))


def _continued_adapter(model: TrainableModel, config: PeftConfig, seed: int) -> Adapter:
    """Add the adapter stored at `config.path`, with the training options of `config`."""
    assert config.path is not None
    stored = read_adapter(config.path).for_base(model.config)
    compatibility.require_same_model(stored, model)
    config = compatibility.continued_config(stored, config, without_foreign_targets(stored.config, model))
    adapter = inject(model, config, seed)
    adapter.load_tensors(stored.tensors, str(stored.folder))
    compatibility.warn_of_other_quantization(stored, model.quantization)
    return adapter


def _log_frozen_experts(model: TrainableModel, config: PeftConfig) -> None:
    """Log that the default targets exclude experts and routers (as in Hugging Face PEFT), if the model has experts."""
    is_default = getattr(config, "target_modules", ()) is None and not getattr(config, "target_parameters", None)
    if is_default and any(isinstance(layer, AnyGroupedLinear) for layer in model.sublayers()):
        logger.info("experts and routers are not adapted; name them in target_parameters to adapt them with LoRA")


def stored_adapter(model: TrainableModel, stored: AdapterFiles) -> Adapter:
    """Add a stored adapter to its base model.

    Raises:
        ValueError: the adapter does not fit the model; the model is unchanged.
    """
    stored = stored.for_base(model.config)
    compatibility.require_same_model(stored, model)
    with undone_on_failure(model):
        adapter = inject(model, without_foreign_targets(stored.config, model))
        adapter.load_tensors(stored.tensors, str(stored.folder))
    return adapter


def adapter_from_factors(model: TrainableModel, factors: Mapping[str, Factors]) -> Adapter:
    """Add a plain LoRA with scale 1 and the given low-rank factors to a base model."""
    adapter = inject(model, lora_config_for(factors))
    adapter.load_tensors({name: tensor.numpy() for name, tensor in lora_tensors(factors).items()}, "combined")
    return adapter


def _check_residual_bases(model: nn.Layer) -> None:
    """Check that each base layer quantized as a residual has an adapter that adds the subtracted factors back."""
    covered = {id(layer.base) for _, layer in adapter_layers(model) if getattr(layer, "base_is_residual", False)}
    for name, base in quantized_layers(model).items():
        if base.is_residual and id(base) not in covered:
            raise ValueError(
                f"{name.removesuffix('.base')}: the initial factors of another adapter (such as PiSSA) were subtracted "
                "from the weight before quantization; load the original model again for this adapter"
            )


@contextmanager
def undone_on_failure(model: TrainableModel) -> Iterator[None]:
    """Context manager: on an error, remove the added adapter, and restore the parameters and their `stop_gradient`."""
    had_adapter = next(adapter_layers(model), None) is not None
    frozen = [(parameter, parameter.stop_gradient) for parameter in model.parameters()]
    parameters = [
        (layer, dict(layer.named_parameters(include_sublayers=False))) for layer in model.sublayers(include_self=True)
    ]
    try:
        yield
    except BaseException:
        if not had_adapter:
            detach_adapters(model)
            for layer, own in parameters:
                for name, parameter in own.items():
                    setattr(layer, name, parameter)
        for parameter, stop_gradient in frozen:
            parameter.stop_gradient = stop_gradient
        raise
