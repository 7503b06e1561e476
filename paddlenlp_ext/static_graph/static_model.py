"""Run an exported model with `paddle.inference`, through the model interface of `generation.generate`.

Shapes: B batch, S new positions, V vocabulary.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import inference

from paddlenlp_ext._runtime import threads_per_process
from paddlenlp_ext.checkpoint.config_json import read_generation_config
from paddlenlp_ext.devices import capabilities, device_name, place_program
from paddlenlp_ext.generation.padded_kv_cache import KVCache
from paddlenlp_ext.models.decoder_config import DecoderConfig
from paddlenlp_ext.nn.rope import LENGTH_DEPENDENT
from paddlenlp_ext.nn.rotary_embedding import RotaryEmbeddings
from paddlenlp_ext.ops.attention.key_value_cache import KeyValueCache
from paddlenlp_ext.utils.files import read_json_object

STATIC_GRAPH = "static_graph"
"""Key of config.json that describes the exported program."""
MOST_POSITIONS = 256
"""Largest number of new positions of a pass."""
_STATES = 0
"""Index under which a cache stores the states of all layers."""
_DESCRIBED = ("cache_dtype", "cache_shapes", "dtype", "quant_type")


def program_files(prefix: str) -> tuple[str, str]:
    """Return the file names of a program and of its weights."""
    return f"{prefix}.json", f"{prefix}.pdiparams"


class StaticModel:
    """Exported model with the interface `generation.prefill_and_decode.GenerationModel`.

    `hidden_states` returns the logits of the last position, because the program does not return hidden states.

    Args:
        folder: folder that `static_graph.export.export_model` has written.
        prefix: file name of program and weights, without suffix.

    Attributes:
        dtype_name: dtype of unquantized weights.
        quant_type: quantized format of the linear layers; None: not quantized.

    Raises:
        ValueError: the folder lacks an exported program, config.json does not describe the program, or Paddle cannot
            load the program.
    """

    def __init__(self, folder: str | os.PathLike[str], prefix: str = "model") -> None:
        folder = Path(folder)
        source = read_json_object(folder / "config.json")
        description = source.get(STATIC_GRAPH)
        program, weights = (folder / name for name in program_files(prefix))
        if not isinstance(description, dict) or not program.is_file() or not weights.is_file():
            raise ValueError(
                f"{folder}: not an exported model: {program.name}, {weights.name} or the key {STATIC_GRAPH!r} of "
                "config.json is missing; run pnx export static first, or use --mode dynamic"
            )
        missing = [key for key in _DESCRIBED if key not in description]
        if missing:
            raise ValueError(f"{folder / 'config.json'}: {STATIC_GRAPH} has no {missing[0]}; export the model again")
        self.config = DecoderConfig.from_dict(source)
        self.generation_config = read_generation_config(folder)
        self._rotary = RotaryEmbeddings(self.config.ropes)
        self._frequencies_vary = any(rope.rope_type in LENGTH_DEPENDENT for rope in self.config.ropes)
        self.dtype_name: str = description["dtype"]
        self.quant_type: str | None = description["quant_type"]
        self._cache_dtype, self._shapes = description["cache_dtype"], description["cache_shapes"]
        self._states = [(shape, getattr(paddle, dtype)) for shape, dtype in description.get("state_shapes", ())]
        try:
            self._predictor = _create_predictor(program, weights)
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            raise ValueError(
                f"{folder}: Paddle cannot load {program.name} and {weights.name} ({reason}); export the model again"
            ) from error

    @property
    def eos_token_ids(self) -> list[int]:
        """Token ids at which generation ends."""
        return self.generation_config["eos_token_id"]

    def add_eos_token_ids(self, token_ids: set[int]) -> None:
        """Add token ids at which generation ends."""
        self.generation_config["eos_token_id"] = sorted({*self.eos_token_ids, *token_ids})

    def hidden_states(
        self,
        input_ids: paddle.Tensor,
        position_ids: paddle.Tensor | None = None,
        *,
        cache: KeyValueCache | None = None,
    ) -> paddle.Tensor:
        """Return the logits of the last position, [B, 1, V], and update the cache.

        The program runs over `MOST_POSITIONS` positions at a time, because it materializes all scores of a pass.
        Frequencies of a dynamic RoPE depend on the longest row, so the program then runs over all positions at once.

        Args:
            input_ids: token ids, [B, S].
            position_ids: positions, [B, S], used only to check the rotary frequencies; the program counts the tokens
                of each row from 0.
            cache: cache without a prefix; None: a new cache.
        """
        batch, length = input_ids.shape
        cache = KVCache([0] * batch) if cache is None else cache
        assert isinstance(cache, KVCache), "an exported model requires a KVCache, without continuous batching"
        if position_ids is not None:
            cache.note_frequency_sets(self._rotary.frequency_sets(position_ids))
        size = length if self._frequencies_vary else MOST_POSITIONS
        # contiguous, because the predictor ignores strides
        parts = [input_ids[:, start : start + size].contiguous() for start in range(0, length, size)]
        *_, logits_BV = (self._run(part, cache) for part in parts)
        return logits_BV.clone().unsqueeze(1)  # cloned, because the predictor reuses the memory of the logits

    def _run(self, input_ids_BS: paddle.Tensor, cache: KVCache) -> paddle.Tensor:
        """Run the program, and return the logits of the last position, [B, V]."""
        batch, length = input_ids_BS.shape
        cached = cache.tensors or [
            paddle.zeros([batch, heads, 0, size], self._cache_dtype) for heads, size in self._shapes
        ]
        num_slots = cached[0].shape[2] if cached else 0
        mask_BC = paddle.to_tensor(_mask(cache, num_slots, length))
        cache.begin_pass(length)
        states = cache.state(_STATES, self._states) if self._states else ()
        outputs = self._predictor.run([input_ids_BS, mask_BC, *cached, *states])
        # On some devices, the predictor returns its outputs on the CPU, but the cache is on the device.
        device = paddle.get_device()
        logits_BV, *new = (each if device_name(each.place) == device else each.to(device) for each in outputs)
        self._store(cache, new)
        return logits_BV

    def _store(self, cache: KVCache, new: Sequence[paddle.Tensor]) -> None:
        """Store the new keys, values and states that the program has returned."""
        key_values, states = new[: len(self._shapes)], new[len(self._shapes) :]
        for layer, (k_BKSH, v_BKSE) in enumerate(zip(key_values[::2], key_values[1::2], strict=True)):
            cache.append(layer, k_BKSH.transpose([0, 2, 1, 3]), v_BKSE.transpose([0, 2, 1, 3]), window=None)
        if states:  # cloned, because the predictor reuses the memory of its outputs
            cache.keep_state(_STATES, tuple(state.clone() for state in states))

    def decode_tokens(self, tokens_BS: Sequence[Sequence[int]], cache: KeyValueCache) -> None:
        """Return None, so that the caller uses `hidden_states` and `logits`."""

    def logits(self, hidden: paddle.Tensor) -> paddle.Tensor:
        """Return `hidden` unchanged, because `hidden_states` returns logits."""
        return hidden


def _mask(cache: KVCache, num_slots: int, length: int) -> np.ndarray:
    """Return the attention mask, int64 [B, slots + length], over the cache slots and the new positions."""
    columns_C = np.concatenate([np.arange(num_slots), np.arange(cache.length, cache.length + length)])
    is_used_C = np.arange(num_slots + length) < cache.length
    is_used_C[num_slots:] = True
    return (is_used_C & (columns_C >= cache.key_starts.numpy()[:, None])).astype(np.int64)


def _create_predictor(program: Path, weights: Path) -> Any:
    config = inference.Config(str(program), str(weights))
    if capabilities(paddle.get_device()).cpp:
        config.disable_gpu()
        config.disable_mkldnn()  # oneDNN would plan kernels again in every step, because the cache length changes
        requested = os.environ.get("MKL_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS")
        config.set_cpu_math_library_num_threads(int(requested or threads_per_process()))
    else:
        place_program(config, paddle.get_device())
    config.disable_glog_info()
    return inference.create_predictor(config)
