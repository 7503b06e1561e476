"""Adapter files of models with fused projections: qkv_proj and gate_up_proj, which are separate layers in memory.

    projection p, rank r_p          s_p B_p A_p          p = q, k, v or gate, up
    fused layer, rank sum r_p       A = [A_q]            B = [B_q  0   0 ]
                                        [A_k]                [ 0  B_k  0 ]
                                        [A_v]                [ 0   0  B_v]

In memory, each projection has an adapter. In files of Hugging Face PEFT, each fused layer has one adapter. This package
writes the fused adapter, and a field that records how to split it again. If PEFT trained the adapter, B is dense. Each
projection then gets its rows of B and a copy of A; the update is unchanged.

| adapter | layers in files |
| --- | --- |
| LoRA, and variants saved as LoRA (rsLoRA, PiSSA, ...) | fused |
| DoRA, if it adapts all projections of a layer | fused |
| modules to save, if they include all projections of a layer | fused |
| all other adapters and modules | single projections, which only this package reads |
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import paddle

from paddlenlp_ext.checkpoint.file_layouts.fused_projections import (
    FusedLayers,
    locate,
    projection_name,
    projection_rows,
)
from paddlenlp_ext.peft.config import PeftConfig
from paddlenlp_ext.peft.formats.adapter_config import SPLIT_FIELD
from paddlenlp_ext.peft.target_modules import by_pattern
from paddlenlp_ext.utils.layer_name_patterns import has_suffix, matches
from paddlenlp_ext.utils.logging import get_logger

logger = get_logger("paddlenlp_ext.peft")

_A, _B, _BIAS, _MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_B.bias", "lora_magnitude_vector"
_LORA = frozenset({_A, _B, _BIAS, _MAGNITUDE})
_FULL = frozenset({"weight", "bias"})
_TARGETS = ("target_modules", "target_parameters", "modules_to_save")
_OF_PARTS = (*_TARGETS, "rank_pattern", "alpha_pattern")
"""Fields of adapter_config.json with layer names: projection names in memory, names of fused layers in files."""
_NAMES_OF_LAYERS = (*_OF_PARTS, "exclude_modules", "feedforward_modules")

Parts = dict[str, dict[str, Any]]
"""Projection of a fused layer -> tensor name within the projection -> tensor."""


def with_parts(config: PeftConfig, layers: FusedLayers) -> PeftConfig:
    """Return the config with the names of projections instead of fused layers."""
    changes: dict[str, Any] = {}
    for name in _NAMES_OF_LAYERS:
        value = getattr(config, name, None)
        entries = (value,) if isinstance(value, str) else tuple(value or ())
        parts = {entry: _parts_of(entry, layers) for entry in entries}
        if all(named == [entry] for entry, named in parts.items()):
            continue
        if isinstance(value, Mapping):
            changes[name] = {part: value[entry] for entry, named in parts.items() for part in named}
        else:
            changes[name] = tuple(part for named in parts.values() for part in named)
    return config.replace(**changes) if changes else config


def _parts_of(pattern: str, layers: FusedLayers) -> list[str]:
    """Return a pattern for each projection if `pattern` contains the name of a fused layer; otherwise, `pattern`."""
    named = next((fused for fused in layers if fused in pattern), None)
    return [pattern] if named is None else [pattern.replace(named, part) for part in layers[named]]


class _Block(NamedTuple):
    """Block of the projection `part` in the fused B: its rows, its columns (also the rows of A), and its scale s."""

    part: str
    rows: slice
    columns: slice
    scaling: float


def _blocks(fused: str, ranks: Mapping[str, int], fields: Mapping[str, Any], layers: FusedLayers) -> list[_Block]:
    """Return the blocks of the adapted projections, in the order of the fused layer.

    Args:
        fused: dotted name of the fused layer.
        ranks: adapted projection -> rank.
        fields: fields of adapter_config.json, with names of projections.
        layers: fused layers of the base.
    """
    blocks, column = [], 0
    for part, rows in projection_rows(fused, layers).items():
        if part in ranks:
            rank = ranks[part]
            alpha = by_pattern(fields["alpha_pattern"], projection_name(fused, part), fields["lora_alpha"])
            scaling = alpha / (rank**0.5 if fields["use_rslora"] else rank)
            blocks.append(_Block(part, rows, slice(column, column + rank), scaling))
            column += rank
    return blocks


# -- writing ----------------------------------------------------------------------------------------------------------
def join_adapter(
    fields: Mapping[str, Any], tensors: Mapping[str, paddle.Tensor], layers: FusedLayers
) -> tuple[dict[str, Any], dict[str, paddle.Tensor]]:
    """Convert an adapter of projections to an adapter of fused layers; return its fields and tensors.

    An adapter that cannot be fused is returned unchanged, with a warning.

    Args:
        fields: fields of adapter_config.json, with names of projections.
        tensors: tensors keyed by names of projections.
        layers: fused layers of the base.
    """
    groups: dict[str, Parts] = {}
    joined: dict[str, paddle.Tensor] = {}
    for name, tensor in tensors.items():
        found = locate(name, layers)
        if found is None or found.projection is None:
            joined[name] = tensor
        else:
            groups.setdefault(found.fused, {}).setdefault(found.projection, {})[found.tensor] = tensor
    if not groups:
        return dict(fields), joined
    if not all(_has_fused_form(fields["peft_type"], *group, layers) for group in groups.items()):
        _warn_of_parts(fields["peft_type"], ", ".join(layers))
        return dict(fields), dict(tensors)
    ranks, alphas = {}, {}
    for fused, parts in groups.items():
        ordered = [parts[part] for part in projection_rows(fused, layers) if part in parts]
        if ordered[0].keys() <= _FULL:
            joined |= {f"{fused}.{leaf}": paddle.concat([each[leaf] for each in ordered]) for leaf in ordered[0]}
            continue
        blocks = _blocks(fused, {part: each[_A].shape[0] for part, each in parts.items()}, fields, layers)
        rank = ranks[fused] = blocks[-1].columns.stop
        alphas[fused] = blocks[0].scaling * (rank**0.5 if fields["use_rslora"] else rank)
        joined |= {f"{fused}.{leaf}": tensor for leaf, tensor in _joined(fused, parts, blocks, layers).items()}
    of_parts = {name: fields[name] for name in _OF_PARTS if fields.get(name)}
    of_fused: dict[str, Any] = {
        name: list(dict.fromkeys(_fused_target(each, layers) for each in entries))
        for name, entries in of_parts.items()
        if name in _TARGETS
    }
    by_weight = {
        fused
        for fused, parts in groups.items()
        if not any(_is_module(projection_name(fused, p), fields) for p in parts)
    }
    for name, values in (("rank_pattern", ranks), ("alpha_pattern", alphas)):
        if values:
            of_fused[name] = {**_as_pattern(values, by_weight), **fields[name]}
            of_parts[name] = fields[name]
    sizes = {fused: dict(parts) for fused, parts in layers.items()}
    return {**fields, **of_fused, SPLIT_FIELD: {"sizes": sizes, "fields": of_parts}}, joined


def _has_fused_form(peft_type: str, fused: str, parts: Parts, layers: FusedLayers) -> bool:
    """Return whether the adapters of a layer's projections can be stored as one adapter of the fused layer.

    DoRA must adapt all projections, because the magnitudes of unadapted projections depend on the base's weight.
    """
    is_complete = parts.keys() == layers[fused.rpartition(".")[2]].keys()
    if all(each.keys() <= _FULL for each in parts.values()):
        return is_complete
    is_lora = peft_type == "LORA" and all(each.keys() <= _LORA for each in parts.values())
    has_magnitudes = {_MAGNITUDE in each for each in parts.values()}
    return is_lora and (has_magnitudes == {False} or (has_magnitudes == {True} and is_complete))


@functools.cache
def _warn_of_parts(peft_type: str, fused: str) -> None:
    """Warn, once per process, that an adapter is stored for separate projections."""
    logger.warning(
        "an adapter of type %s cannot be stored for the fused layers of the base's files (%s). The adapter is stored "
        "for separate projections, and only this package can load it; merge the adapter to use it in other programs",
        peft_type,
        fused,
    )


@paddle.no_grad()
def _joined(fused: str, parts: Parts, blocks: list[_Block], layers: FusedLayers) -> dict[str, paddle.Tensor]:
    """Return the adapter of a fused layer: A, biases and magnitudes are concatenated, and B is block-diagonal."""
    outputs = sum(layers[fused.rpartition(".")[2]].values())
    b = paddle.zeros([outputs, blocks[-1].columns.stop], parts[blocks[0].part][_B].dtype)
    bias = paddle.zeros([outputs], b.dtype)
    for block in blocks:
        adapter, factor = parts[block.part], block.scaling / blocks[0].scaling
        b[block.rows, block.columns] = adapter[_B] * factor
        if _BIAS in adapter:
            bias[block.rows] = adapter[_BIAS] * factor
    tensors = {_A: paddle.concat([parts[block.part][_A] for block in blocks]), _B: b}
    if _BIAS in parts[blocks[0].part]:
        tensors[_BIAS] = bias
    if _MAGNITUDE in parts[blocks[0].part]:
        tensors[_MAGNITUDE] = paddle.concat([parts[block.part][_MAGNITUDE] for block in blocks])
    return tensors


def _fused_target(target: str, layers: FusedLayers) -> str:
    """Return the fused layer (or its weight) of the projection `target`; other targets are returned unchanged."""
    found = locate(target, layers)
    return target if found is None else f"{found.fused}.{found.tensor}".rstrip(".")


def _is_module(name: str, fields: Mapping[str, Any]) -> bool:
    """Return whether `target_modules` of adapter_config.json selects the layer `name`."""
    return any(matches(target, name, "target_modules") for target in fields.get("target_modules") or ())


def _is_adapted(name: str, fields: Mapping[str, Any]) -> bool:
    """Return whether the fields of adapter_config.json select the layer `name`, or its weight."""
    parameters = fields.get("target_parameters") or ()
    return _is_module(name, fields) or any(has_suffix(f"{name}.weight", parameter) for parameter in parameters)


def _as_pattern(values: Mapping[str, Any], by_weight: set[str]) -> dict[str, Any]:
    """Return a `rank_pattern` or `alpha_pattern`, with short keys ("q_proj") if each has a single value.

    Layers in `by_weight` are in `target_parameters`, so PEFT looks for the names of their weights.
    """
    by_name, by_leaf = {}, {}
    for layer, value in values.items():
        name = f"{layer}.weight" if layer in by_weight else layer
        by_name[name] = value
        by_leaf.setdefault(name.removeprefix(f"{layer.rpartition('.')[0]}."), set()).add(value)
    leaf_decides = all(len(each) == 1 for each in by_leaf.values())
    return {leaf: next(iter(each)) for leaf, each in by_leaf.items()} if leaf_decides else by_name


# -- reading ----------------------------------------------------------------------------------------------------------
def split_recorded(tensors: Mapping[str, np.ndarray], fields: Mapping[str, Any], where: str) -> dict[str, np.ndarray]:
    """Split the tensors of a fused adapter that `join_adapter` wrote; return tensors keyed by names of projections.

    Args:
        tensors: stored tensors.
        fields: fields of adapter_config.json, including `SPLIT_FIELD`.
        where: the adapter's folder, for error messages.

    Raises:
        ValueError: the tensors do not have the sizes in `SPLIT_FIELD`.
    """
    layers = fields[SPLIT_FIELD]["sizes"]
    groups: dict[str, dict[str, np.ndarray]] = {}
    split: dict[str, np.ndarray] = {}
    for name, value in tensors.items():
        found = locate(name, layers)
        if found is None or found.projection is not None:
            split[name] = value
        else:
            groups.setdefault(found.fused, {})[found.tensor] = value
    for fused, stored in groups.items():
        names = {part: projection_name(fused, part) for part in layers[fused.rpartition(".")[2]]}
        if stored.keys() <= _FULL:
            for part, rows in projection_rows(fused, layers).items():
                split |= {f"{names[part]}.{leaf}": value[rows] for leaf, value in stored.items()}
            continue
        ranks = {
            part: int(by_pattern(fields["rank_pattern"], name, fields["r"]))
            for part, name in names.items()
            if _is_adapted(name, fields)
        }
        blocks = _blocks(fused, ranks, fields, layers)
        outputs = sum(layers[fused.rpartition(".")[2]].values())
        if not blocks or _A not in stored or _B not in stored or stored[_B].shape != (outputs, blocks[-1].columns.stop):
            raise ValueError(
                f"{where}: the tensors of {fused} do not match {SPLIT_FIELD} in adapter_config.json; save the adapter "
                "again, or remove the field from the file"
            )
        for block in blocks:
            factor = block.scaling / blocks[0].scaling
            own = {_A: stored[_A][block.columns], _B: stored[_B][block.rows, block.columns] / np.float32(factor)}
            if _BIAS in stored:
                own[_BIAS] = stored[_BIAS][block.rows] / np.float32(factor)
            if _MAGNITUDE in stored:
                own[_MAGNITUDE] = stored[_MAGNITUDE][block.rows]
            split |= {f"{names[block.part]}.{leaf}": np.ascontiguousarray(value) for leaf, value in own.items()}
    return split


def split_dense(
    config: PeftConfig, tensors: Mapping[str, np.ndarray], layers: FusedLayers, where: str
) -> dict[str, np.ndarray]:
    """Split the tensors of a fused adapter that another library trained; key the result by names of projections.

    Each projection gets its rows of B, of the biases and of the magnitudes, and a copy of A.

    Args:
        config: config of the method.
        tensors: tensors of the adapter, for fused layers or single projections.
        layers: fused layers of the base.
        where: the adapter's folder, for error messages.

    Raises:
        ValueError: a fused layer has an adapter that is neither LoRA nor DoRA.
    """
    split: dict[str, np.ndarray] = {}
    for name, value in tensors.items():
        found = locate(name, layers)
        if found is None or found.projection is not None:
            split[name] = value
            continue
        rows = projection_rows(found.fused, layers)
        if found.tensor not in _FULL and not (config.peft_type == "LORA" and found.tensor in _LORA):
            raise ValueError(
                f"{where}: an adapter of type {config.peft_type} for {found.fused} cannot be split into "
                f"{', '.join(rows)}; merge it in Hugging Face PEFT (merge_and_unload), and use the merged model"
            )
        for part, own in rows.items():
            split[f"{projection_name(found.fused, part)}.{found.tensor}"] = value if found.tensor == _A else value[own]
    return split
