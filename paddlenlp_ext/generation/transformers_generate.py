"""`generate` with the arguments of the transformers library: padded input_ids, generation_config, streamer.

Shapes: B batch, R returned sequences of a row, S sequence, N longest continuation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import paddle

from paddlenlp_ext.generation.generate import GenerationModel, generate


class Streamer(Protocol):
    """Interface of a streamer of the transformers library, such as `TextStreamer`."""

    def put(self, value: np.ndarray) -> None:
        """Receive token ids: first the prompt [1, S], then each new token [1] except the end token."""
        ...

    def end(self) -> None:
        """Signal the end of the text."""
        ...


_OPTIONS = (
    *("do_sample", "eos_token_id", "length_penalty", "max_length", "max_new_tokens", "min_new_tokens", "num_beams"),
    *("num_return_sequences", "pad_token_id", "repetition_penalty", "temperature", "top_k", "top_p"),
)
"""Options of transformers' `GenerationConfig` that `generate_for` supports."""
_DEFAULTS = {"max_new_tokens": 20, "top_k": 50}
"""Defaults of transformers that differ from the defaults of `generation.generate.generate`."""
_UNAVAILABLE: dict[str, Any] = {
    **dict.fromkeys(("encoder_repetition_penalty", "guidance_scale", "num_beam_groups", "typical_p"), 1),
    **dict.fromkeys(("diversity_penalty", "epsilon_cutoff", "eta_cutoff", "min_length", "min_p", "penalty_alpha"), 0),
    **dict.fromkeys(("encoder_no_repeat_ngram_size", "no_repeat_ngram_size"), 0),
    **dict.fromkeys(("early_stopping", "output_attentions", "output_hidden_states", "output_logits"), False),
    **dict.fromkeys(("output_scores", "renormalize_logits", "return_dict_in_generate", "token_healing"), False),
    **dict.fromkeys(("bad_words_ids", "begin_suppress_tokens", "constraints", "exponential_decay_length_penalty")),
    **dict.fromkeys(("force_words_ids", "forced_bos_token_id", "forced_eos_token_id", "max_time", "sequence_bias")),
    **dict.fromkeys(("prompt_lookup_num_tokens", "stop_strings", "suppress_tokens", "watermarking_config")),
}
"""Unavailable options of transformers, each with the value that has no effect; None has no effect either."""
_WITHOUT_EFFECT = ("use_cache",)


class GenerationDefaults(dict[str, Any]):
    """Keys of generation_config.json, also accessible as attributes, as in transformers: `generation_config.top_p`."""

    def __getattr__(self, name: str) -> Any:
        """Return the value of a key; None for an option of transformers that is not set."""
        if name not in self and name not in _OPTIONS and name not in _UNAVAILABLE:
            raise AttributeError(f"generation_config has no option {name!r}")
        return self.get(name)

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def to_dict(self) -> dict[str, Any]:
        """Return a copy of the keys."""
        return dict(self)


def generate_for(
    model: GenerationModel,
    prompts: Sequence[Sequence[int]] | paddle.Tensor | np.ndarray | None,
    *,
    input_ids: paddle.Tensor | np.ndarray | Sequence[Any] | None = None,
    attention_mask: paddle.Tensor | np.ndarray | Sequence[Any] | None = None,
    generation_config: Any = None,
    streamer: Streamer | None = None,
    **options: Any,
) -> list[list[int]] | paddle.Tensor:
    """Continue prompts, given as lists of token ids or as a padded batch.

    Options that are not passed are taken from `generation_config`. For a padded batch, options that `generation_config`
    lacks are taken from `model.generation_config`, and then from transformers' defaults (20 new tokens; `top_k` 50 for
    sampling).

    Args:
        model: the language model; a row ends at one of its `eos_token_ids` unless `eos_token_id` is set.
        prompts: lists of token ids of any length, or a padded batch [B, S].
        input_ids: replaces `prompts`, in a format that tokenizers return: a padded tensor or array [B, S], lists of
            token ids, which are padded on the left, or the token ids of a single text.
        attention_mask: mask in the shape of `input_ids`, 0 for padding.
        generation_config: `GenerationConfig` of the transformers library, or a dict of options.
        streamer: object that receives the prompt and then each new token; requires a single prompt, and a strategy
            other than beam search.
        options: arguments of `generate`, and of the transformers library: `do_sample` (True for sampling, False for
            greedy search or beam search), `max_length` (length of prompt and continuation), `num_return_sequences` (R
            samples of each row), `pad_token_id` (padding token; by default the first end token, or 0 without end
            tokens).

    Returns:
        Lists of new tokens if the prompts are lists. For a padded batch, the prompts followed by the new tokens,
        int64 [B * R, S + N]; the R sequences of a row are adjacent.

    Raises:
        ValueError: two arguments contradict each other, an option of transformers is not available, or `generate`
            rejects an argument.
    """
    batch = _only_prompt(prompts, input_ids)
    is_padded = input_ids is not None or isinstance(batch, (paddle.Tensor, np.ndarray))
    if not is_padded and (attention_mask is not None or "pad_token_id" in options):
        raise ValueError("generate: lists of tokens have no padding; remove attention_mask and pad_token_id")
    if options.get("do_sample") is not None and "decode_strategy" in options:
        raise ValueError("generate: do_sample and decode_strategy both choose the strategy; pass only one of them")
    levels = [_DEFAULTS, _set_options(model.generation_config, "model.generation_config")] if is_padded else []
    levels += [_set_options(generation_config, "generation_config"), _without_neutral(options)]
    options = {"eos_token_id": model.eos_token_ids, **_joined(levels)}
    pad_token_id = options.pop("pad_token_id", None)
    if pad_token_id is None:
        ends = options["eos_token_id"]
        pad_token_id = ends if isinstance(ends, int) else next(iter(ends or ()), 0)
    ids_BS = mask_BS = None
    if is_padded:
        ids_BS, mask_BS = _as_batch(batch, attention_mask, pad_token_id)
        batch = [row[mask].tolist() for row, mask in zip(ids_BS, mask_BS, strict=True)]
    copies = options.pop("num_return_sequences", 1)
    if (length := options.pop("max_length", None)) is not None:
        width = max(map(len, batch), default=0) if ids_BS is None else ids_BS.shape[1]
        if length <= width:
            raise ValueError(
                f"generate: max_length {length} counts the prompt, whose length is {width}, so no new tokens fit; "
                "raise max_length, or pass max_new_tokens"
            )
        options["max_new_tokens"] = length - width
    _choose_strategy(options)
    if is_padded and options["decode_strategy"] != "sampling":
        options = {name: value for name, value in options.items() if name not in ("temperature", "top_k", "top_p")}
    if copies != 1 and (copies < 1 or options.get("decode_strategy") != "sampling"):
        raise ValueError(
            f"generate: num_return_sequences={copies}: pass 1, or a larger number together with do_sample=True"
        )
    new = _generate(model, [row for row in batch for _ in range(copies)], streamer, options)
    if ids_BS is None:
        return new
    width = max(map(len, new), default=0)
    new_BN = [tokens + [pad_token_id] * (width - len(tokens)) for tokens in new]
    old_BS = np.repeat(ids_BS, copies, axis=0)
    return paddle.to_tensor(np.concatenate([old_BS, np.array(new_BN, np.int64).reshape(len(new), width)], axis=1))


def _only_prompt(prompts: Any, input_ids: Any) -> Any:
    """Return `prompts` or `input_ids`.

    Raises:
        ValueError: `prompts` and `input_ids` are both given, or neither is.
    """
    if prompts is None and input_ids is None:
        raise ValueError(
            "generate: there is no prompt; pass lists of token ids as prompts, or the result of tokenizer(text, "
            'return_tensors="pd") as **inputs'
        )
    if prompts is not None and input_ids is not None:
        raise ValueError("generate: prompts and input_ids both set the prompt; pass only one of them")
    return prompts if input_ids is None else input_ids


def _set_options(config: Any, where: str) -> dict[str, Any]:
    """Return the options of a `GenerationConfig` or dict that have an effect; {} for None.

    Raises:
        ValueError: an unavailable option is set.
    """
    values = {} if config is None else dict(config if isinstance(config, Mapping) else config.to_dict())
    known = {name: value for name, value in values.items() if name in (*_OPTIONS, *_UNAVAILABLE) and value is not None}
    return _without_neutral(known, where)


def _without_neutral(options: Mapping[str, Any], where: str = "generate") -> dict[str, Any]:
    """Return the options that have an effect.

    Raises:
        ValueError: an unavailable option is set to a value that has an effect.
    """
    for name, value in options.items():
        if name in _UNAVAILABLE and value is not None and value != _UNAVAILABLE[name]:
            raise ValueError(f"{where}: {name}={value!r} is not available; leave it out, or set it to None")
    return {name: value for name, value in options.items() if name not in (*_UNAVAILABLE, *_WITHOUT_EFFECT)}


def _joined(levels: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the options of several levels; later levels override earlier levels.

    `max_length` or `max_new_tokens` in a level overrides both in earlier levels. Within a level, `max_new_tokens` takes
    precedence.
    """
    options: dict[str, Any] = {}
    for level in levels:
        for one, other in (("max_length", "max_new_tokens"), ("max_new_tokens", "max_length")):
            if level.get(one) is not None:
                options.pop(other, None)
        options |= level
    if options.get("max_new_tokens") is not None:
        options.pop("max_length", None)
    return options


def _choose_strategy(options: dict[str, Any]) -> None:
    """Replace `do_sample` with `decode_strategy`; a passed `decode_strategy` takes precedence.

    Raises:
        ValueError: the options request sampling with several beams.
    """
    samples, beams = options.pop("do_sample", None), options.get("num_beams", 1)
    if "decode_strategy" in options:
        return
    if samples and beams > 1:
        raise ValueError(
            f"generate: do_sample=True with num_beams={beams} is not available; pass do_sample=False or num_beams=1"
        )
    options["decode_strategy"] = "beam_search" if beams > 1 else "sampling" if samples else "greedy_search"


def _as_batch(input_ids: Any, attention_mask: Any, pad_token_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Return ids, int64 [B, S], and mask, bool [B, S]; rows of different lengths are padded on the left.

    Raises:
        ValueError: ids and mask have different shapes, or are not a batch.
    """
    ids = _rows(input_ids)
    mask = [np.ones_like(row) for row in ids] if attention_mask is None else _rows(attention_mask)
    shapes = [[list(row.shape) for row in rows] for rows in (ids, mask)]
    if shapes[0] != shapes[1] or any(len(shape) != 1 for shape in shapes[0]):
        raise ValueError(
            f"generate: the rows of input_ids have the shapes {shapes[0]}, but the rows of attention_mask have the "
            f"shapes {shapes[1]}; pass both as [batch, length]"
        )
    width = max(map(len, ids), default=0)
    ids_BS = [np.pad(row, (width - len(row), 0), constant_values=pad_token_id) for row in ids]
    mask_BS = [np.pad(row, (width - len(row), 0)) for row in mask]
    return np.array(ids_BS, np.int64).reshape(-1, width), np.array(mask_BS, bool).reshape(-1, width)


def _rows(values: Any) -> list[np.ndarray]:
    """Return the rows of a batch; a list of numbers is a single row."""
    if isinstance(values, Sequence) and values and isinstance(values[0], int):
        values = [values]
    return [np.asarray(row) for row in (values if isinstance(values, Sequence) else np.asarray(values))]


def _generate(
    model: GenerationModel, prompts: Sequence[Sequence[int]], streamer: Streamer | None, options: dict[str, Any]
) -> list[list[int]]:
    """Continue prompts of any length; send the prompt and the new tokens to the streamer.

    Raises:
        ValueError: `generate` rejects an argument, or the streamer is used with several prompts or with beam search.
    """
    if streamer is None:
        return generate(model, prompts, **options)
    if len(prompts) != 1:
        raise ValueError(f"generate: a streamer needs a single prompt, not {len(prompts)}")
    if options.get("decode_strategy") == "beam_search":
        raise ValueError("generate: beam search cannot stream; remove streamer, or use another strategy")
    on_token = options.pop("on_token", None)

    def put(row: int, token: int) -> None:
        streamer.put(np.array([token], np.int64))
        if on_token is not None:
            on_token(row, token)

    streamer.put(np.array(prompts, np.int64))
    new = generate(model, prompts, on_token=put, **options)
    streamer.end()
    return new
