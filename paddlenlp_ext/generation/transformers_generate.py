"""`generate` with the arguments of transformers: padded input_ids, attention_mask, do_sample, streamer.

Shapes: B batch, S sequence, N longest continuation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import paddle

from paddlenlp_ext.generation.generate import GenerationModel, generate


class Streamer(Protocol):
    """Interface of the streamers of transformers."""

    def put(self, value: np.ndarray) -> None:
        """Receive token ids: first the prompt [1, S], then each new token [1], without the end token."""
        ...

    def end(self) -> None:
        """Signal the end of the text."""
        ...


def generate_for(
    model: GenerationModel,
    prompts: Sequence[Sequence[int]] | paddle.Tensor | np.ndarray | None,
    *,
    input_ids: paddle.Tensor | np.ndarray | None = None,
    attention_mask: paddle.Tensor | np.ndarray | None = None,
    do_sample: bool | None = None,
    pad_token_id: int | None = None,
    streamer: Streamer | None = None,
    **options: Any,
) -> list[list[int]] | paddle.Tensor:
    """Continue prompts: return lists of new tokens for lists, and prompts with new tokens for a padded batch.

    Args:
        model: the language model; its `eos_token_ids` end a row unless `eos_token_id` is given.
        prompts: lists of token ids of any length, or a padded batch [B, S].
        input_ids: the padded batch, instead of `prompts`.
        attention_mask: [B, S], 0 for padding.
        do_sample: True for sampling, False for greedy search; None: `decode_strategy` decides.
        pad_token_id: padding after the end of a row; None: the first end token, or 0 if there is none.
        streamer: receives the prompt and then each new token, such as a `TextStreamer` of transformers; only for a
            single prompt and without beam search.
        options: further arguments of `generate`.

    Returns:
        Lists of new tokens, or int64 [B, S + N].

    Raises:
        ValueError: arguments exclude each other, or see `generate`.
    """
    if (prompts is None) == (input_ids is None):
        raise ValueError("generate: pass either prompts or input_ids, not both")
    if do_sample is not None:
        if "decode_strategy" in options:
            raise ValueError("generate: do_sample and decode_strategy both choose the strategy; pass only one of them")
        options["decode_strategy"] = "sampling" if do_sample else "greedy_search"
    options = {"eos_token_id": model.eos_token_ids, **options}
    batch = prompts if input_ids is None else input_ids
    assert batch is not None, "checked above"
    if not isinstance(batch, (paddle.Tensor, np.ndarray)):
        if attention_mask is not None or pad_token_id is not None:
            raise ValueError("generate: lists of tokens have no padding; remove attention_mask and pad_token_id")
        return _generate(model, batch, streamer, options)
    ids_BS = np.asarray(batch)
    mask_BS = np.ones(ids_BS.shape, bool) if attention_mask is None else np.asarray(attention_mask).astype(bool)
    if ids_BS.ndim != 2 or ids_BS.shape != mask_BS.shape:
        raise ValueError(
            f"generate: input_ids has shape {list(ids_BS.shape)} and attention_mask {list(mask_BS.shape)}; pass both "
            "as [batch, length]"
        )
    rows = [row[mask].tolist() for row, mask in zip(ids_BS, mask_BS, strict=True)]
    new = _generate(model, rows, streamer, options)
    if pad_token_id is None:
        ends = options["eos_token_id"]
        pad_token_id = ends if isinstance(ends, int) else next(iter(ends or ()), 0)
    width = max(map(len, new), default=0)
    new_BN = [tokens + [pad_token_id] * (width - len(tokens)) for tokens in new]
    return paddle.to_tensor(np.concatenate([ids_BS, np.array(new_BN, np.int64).reshape(len(new), width)], axis=1))


def _generate(
    model: GenerationModel, prompts: Sequence[Sequence[int]], streamer: Streamer | None, options: dict[str, Any]
) -> list[list[int]]:
    """Continue prompts of any length; send prompt and new tokens to the streamer.

    Raises:
        ValueError: see `generate`; or a streamer for several prompts or for beam search.
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
