"""ReFT: Representation Finetuning for Language Models (Wu et al. 2024, arXiv:2404.03592).

    LoReFT    h' = h + R^T (f(W h + b) - R h)        R [r, D] with orthonormal rows, also during training

h is the output of a decoder layer at the first n and last m positions of each prompt. The adapter changes no weights,
so it cannot be merged. `method_internals/reft_interventions.py` implements the variants.

    position "f2+l1"     padding   prompt                answer
    tokens                 _  _    t0  t1  t2  t3  t4    a0  a1
    changed                        ^^  ^^          ^^

Positions are counted within each document, from the first token of the prompt; padding does not count. In a prompt
with fewer than n + m tokens, every position is changed once.

| pass | prompt |
| --- | --- |
| training | all tokens before the last answer of the document, including earlier turns of a conversation |
| generation | the prompt; generated tokens are not changed |
| other passes | the first `prompt_lengths` tokens; by default, the full document |

Shapes: B batch, S sequence, D hidden size, P selected positions.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional as F

from paddlenlp_ext.config.options import option
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.nn.training_hooks import TrainingHooks
from paddlenlp_ext.ops.attention import AttentionLayout, DocumentParents
from paddlenlp_ext.peft.adapter import Adapter
from paddlenlp_ext.peft.config import PeftConfig, refuse_unread_fields
from paddlenlp_ext.peft.layers import AdapterLayer
from paddlenlp_ext.peft.method_internals.reft_interventions import (
    ACTIVATIONS,
    INTERVENTION_TYPES,
    TINY,
    build_intervention,
)
from paddlenlp_ext.peft.registry import PEFT_METHODS


@dataclass(frozen=True)
class PositionSpec:
    """Number of positions to change at the start (`first`) and at the end (`last`) of a prompt."""

    first: int
    last: int


@dataclass(frozen=True)
class Document:
    """Location of a document in the flattened batch of a forward pass.

    Attributes:
        origin: index of position 0 in the flattened batch; out of range if position 0 is in the cache.
        begin, end: first position that the forward pass computes, and last position plus 1.
        prompt_length: number of positions of the prompt.
    """

    origin: int
    begin: int
    end: int
    prompt_length: int


def parse_positions(text: str) -> PositionSpec:
    """Parse the option `position`: "f7+l7", "f7" or "l3".

    Raises:
        ValueError: the text has another format, or selects no position.
    """
    counts: dict[str, int] = {}
    for part in text.replace(" ", "").split("+"):
        match = re.fullmatch(r"([fl])(\d+)", part)
        if match is None or match[1] in counts:
            break
        counts[match[1]] = int(match[2])
    else:
        if any(counts.values()):
            return PositionSpec(counts.get("f", 0), counts.get("l", 0))
    raise ValueError(
        f'position={text!r} selects no positions; use "f7" for the first 7 of the prompt, "l7" for its last 7, or '
        '"f7+l7" for both'
    )


def packed_documents(
    document_lengths: Sequence[Sequence[int]],
    prompt_lengths: Sequence[Sequence[int]] | None,
    document_parents: DocumentParents | None = None,
) -> list[Document]:
    """Return the documents of a forward pass without a cache.

    Args:
        document_lengths: lengths of the documents in each row of the batch.
        prompt_lengths: prompt length of each document; 0: no position is changed; None: the full document is prompt.
            If a document continues a parent document, the length includes the positions of the parent. The length of a
            parent includes the prompt positions in the documents that continue it.
        document_parents: parent of each document: the document that it continues, or None.

    Raises:
        ValueError: the prompt lengths do not match the documents, or are missing although documents have parents.
    """
    layout = AttentionLayout.from_documents(document_lengths, document_parents=document_parents)
    starts, lengths = (x.tolist() for x in layout.documents())
    begins = layout.first_positions().tolist()
    ends = [begin + length for begin, length in zip(begins, lengths, strict=True)]
    if prompt_lengths is None and layout.document_parents is not None:
        raise ValueError("documents that continue another need prompt_lengths; pass the prompt length of each document")
    rows = document_lengths if prompt_lengths is None else prompt_lengths
    prompts = [length for row in rows for length in row]
    if [len(row) for row in rows] != [len(row) for row in document_lengths] or any(
        not 0 <= prompt <= length for prompt, length in zip(prompts, layout.sequence_lengths(), strict=True)
    ):
        raise ValueError(f"prompt_lengths {rows} do not match documents of {document_lengths} tokens")
    return [
        Document(start - begin, begin, end, prompt)
        for start, begin, end, prompt in zip(starts, begins, ends, prompts, strict=True)
    ]


def cached_documents(
    key_starts: Sequence[int], num_seen: int, num_new: int, prompt_ends: Sequence[int]
) -> list[Document]:
    """Return the documents of a forward pass with a cache, one document per row.

    Args:
        key_starts: column of the first token of each row.
        num_seen: number of columns in the cache before the forward pass.
        num_new: number of columns that the forward pass computes.
        prompt_ends: column at which the prompt of each row ends.
    """
    return [
        Document(
            origin=row * num_new + start - num_seen,
            begin=num_seen - start,
            end=num_seen + num_new - start,
            prompt_length=prompt_end - start,
        )
        for row, (start, prompt_end) in enumerate(zip(key_starts, prompt_ends, strict=True))
    ]


def selected_indices(documents: Sequence[Document], positions: PositionSpec) -> np.ndarray:
    """Return the selected positions as indices into the flattened batch, int64, ascending and unique."""
    chosen: list[int] = []
    for document in documents:
        head_end = min(positions.first, document.prompt_length)
        tail_begin = max(head_end, document.prompt_length - positions.last)
        for begin, end in ((0, head_end), (tail_begin, document.prompt_length)):
            begin, end = max(begin, document.begin), min(end, document.end)
            chosen.extend(range(document.origin + begin, document.origin + end))
    return np.array(chosen, dtype=np.int64)


_INTERVENTION_ALIASES = {"LoReftIntervention": "LoreftIntervention"}
_FIELDS = ("layers", "position", "intervention_type", "rank", "act_fn", "add_bias", "dropout")


class ReftAdapter(Adapter):
    """Adapter that selects the positions to change, and passes the positions to the layers."""

    peft_config: ReFTConfig

    def hidden_states(
        self,
        input_ids: paddle.Tensor,
        position_ids: paddle.Tensor | None = None,
        document_lengths: Sequence[Sequence[int]] | None = None,
        cache: Any = None,
        prompt_lengths: Sequence[Sequence[int]] | None = None,
        document_parents: DocumentParents | None = None,
    ) -> paddle.Tensor:
        """Return the last hidden states [B, S, D].

        Args:
            input_ids, position_ids, document_lengths, cache, document_parents: arguments of the base model.
            prompt_lengths: prompt length of each document, for each row of the batch; None: the full document, or
                with a cache the positions before `cache.prompt_end`.

        Raises:
            ValueError: the prompt lengths do not match the documents, or both prompt lengths and a cache are passed.
        """
        num_rows, row_length = input_ids.shape
        if cache is None:
            rows = document_lengths or [[row_length]] * num_rows
            documents = packed_documents(rows, prompt_lengths, document_parents)
        elif prompt_lengths is not None:
            raise ValueError(
                "prompt_lengths cannot be combined with a cache, which records the prompts; leave out prompt_lengths"
            )
        else:
            seen = cache.length
            prompt_end = getattr(cache, "prompt_end", None) or seen or row_length
            prompt_ends = prompt_end if isinstance(prompt_end, list) else [prompt_end] * num_rows
            documents = cached_documents(cache.key_starts.tolist(), seen, row_length, prompt_ends)
        indices = selected_indices(documents, parse_positions(self.peft_config.position))
        chosen = SelectedPositions(paddle.to_tensor(indices) if len(indices) else None)
        decoder = self.base_model.model
        inputs = decoder.attention_inputs(
            input_ids, position_ids, document_lengths, cache, document_parents=document_parents
        )
        inputs = dataclasses.replace(inputs, adapter_inputs=chosen)
        return decoder.forward_embeddings(decoder.embed(input_ids), inputs)


@PEFT_METHODS.register("reft")
@dataclass(kw_only=True)
class ReFTConfig(PeftConfig):
    """Options of ReFT; PaddleNLP's JSON keys without the prefix "reft_" are accepted too.

    >>> ReFTConfig(position="f2+l2", layers="0;3").rank
    8
    """

    peft_type: ClassVar[str] = "REFT"
    mergeable: ClassVar[bool] = False
    reads_prompts: ClassVar[bool] = True
    adapter_class: ClassVar[type[TrainingHooks] | None] = ReftAdapter
    free_on_resume: ClassVar[frozenset[str]] = PeftConfig.free_on_resume | {"layers"}
    excludes: ClassVar[Mapping[str, str]] = {
        "sequence_parallel": "positions are selected from full sequences, and a process has only a shard of each"
    }

    layers: str = option(
        "all", help='decoder layers whose output is changed: "all", or numbers as in "0;1;2"', aliases=("layers",)
    )
    position: str = option(
        "f7+l7",
        help="prompt positions to change: f7 (the first 7), l7 (the last 7), f7+l7 (both)",
        aliases=("position",),
    )
    intervention_type: str = option(
        "LoreftIntervention",
        help="type of intervention on the hidden states",
        choices=INTERVENTION_TYPES,
        synonyms=_INTERVENTION_ALIASES,
        aliases=("intervention_type",),
    )
    rank: int = option(
        8,
        help="rank of the subspace in which hidden states are changed",
        minimum=1,
        aliases=("rank",),
        arguments=("r",),
    )
    act_fn: str = option(
        "linear", help="activation f of the intervention", choices=tuple(ACTIVATIONS), aliases=("act_fn",)
    )
    add_bias: bool = option(
        False,
        help="add the bias c to the projection of NoreftIntervention; the bias b is always used",
        aliases=("add_bias",),
    )
    dropout: float = option(
        0.0, help="dropout on the changed hidden states during training", minimum=0, below=1, aliases=("dropout",)
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.intervention_type == TINY and (self.act_fn != "linear" or self.add_bias):
            raise ValueError(f"{TINY} has neither activation nor bias; leave act_fn at linear and add_bias at false")
        parse_positions(self.position)
        _layer_numbers(self.layers)

    def targets(self, model: TrainableModel) -> list[str]:
        known = [name for name, _ in model.named_sublayers() if re.fullmatch(r"(.*\.)?layers\.\d+", name)]
        numbers = _layer_numbers(self.layers)
        if numbers is None:
            return known
        beyond = [number for number in numbers if number >= len(known)]
        if beyond:
            raise ValueError(
                f"layers={self.layers!r}: layer {beyond[0]} does not exist; this model has layers 0 to {len(known) - 1}"
            )
        return [known[number] for number in numbers]

    def wrap(self, name: str, base: Any, seed: int) -> ReftLayer:
        intervention = build_intervention(
            self.intervention_type,
            base.hidden_size,
            self.rank,
            self.act_fn,
            self.add_bias,
            seed,
            f"{name}.intervention",
        )
        return ReftLayer(base, intervention, self.dropout)

    def to_adapter_config(self, model: TrainableModel) -> dict[str, Any]:
        return {field: getattr(self, field) for field in _FIELDS}

    @classmethod
    def from_adapter_config(cls, fields: Mapping[str, Any]) -> ReFTConfig:
        refuse_unread_fields(fields, set(_FIELDS))
        return cls(**{field: fields[field] for field in _FIELDS if field in fields})


@dataclass(frozen=True)
class SelectedPositions:
    """Positions that a forward pass changes: `index` [P] into the flattened batch, int64; None: no positions."""

    index: paddle.Tensor | None


class ReftLayer(AdapterLayer):
    """Decoder layer with an intervention on its output at selected positions.

    Args:
        base: decoder layer.
        intervention: layer that maps hidden states [P, D] to [P, D] (`build_intervention`).
        dropout: dropout probability on the changed hidden states during training.
    """

    def __init__(self, base: nn.Layer, intervention: nn.Layer, dropout: float) -> None:
        super().__init__(base)
        self.intervention = intervention
        self.dropout = dropout

    def adapter_forward(self, x_BSD: paddle.Tensor, inputs: Any) -> paddle.Tensor:
        """Map x [B, S, D] to [B, S, D]; recomputation changes the same positions, because `inputs` has them."""
        h_BSD = self.base(x_BSD, inputs)
        chosen = inputs.adapter_inputs
        assert isinstance(chosen, SelectedPositions), "ReFT layers run only in ReftAdapter.hidden_states"
        if chosen.index is None:
            return h_BSD
        h_TD = h_BSD.flatten(0, 1)
        with paddle.amp.auto_cast(enable=False):
            changed_PD = self.intervention(paddle.gather(h_TD, chosen.index).astype("float32"))
        changed_PD = F.dropout(changed_PD, self.dropout, training=self.training) if self.dropout else changed_PD
        return paddle.scatter(h_TD, chosen.index, changed_PD.astype(h_TD.dtype)).reshape(h_BSD.shape)


def _layer_numbers(layers: str) -> list[int] | None:
    """Return the layer numbers in a string such as "0;1;2", in ascending order; None for "all"."""
    text = layers.replace(" ", "") if isinstance(layers, str) else ""
    if text == "all":
        return None
    if not re.fullmatch(r"\d+([;,]\d+)*", text):
        raise ValueError(f'layers={layers!r} selects no layers; use "all", or numbers as in "0;1;2"')
    return sorted({int(number) for number in re.split("[;,]", text)})
