"""Estimated sizes of states, compared with the tensors of a cache and with the memory of a forward pass."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy as np
import paddle
import pytest

from paddlenlp_ext.generation.padded_kv_cache import KVCache
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.nn.recompute import RecomputePlan
from paddlenlp_ext.nn.token_mixer import TokenMixer
from paddlenlp_ext.trainer.memory.estimate import estimate_memory
from paddlenlp_ext.trainer.memory.layer_activations import CPU_CPP
from paddlenlp_ext.trainer.memory.recurrent_states import decoding_state_bytes, training_state_bytes
from tests.common.marks import needs_cpp
from tests.generation.tiny_models import FAMILIES, SIZES, tiny_model
from tests.trainer.memory.allocated import allocated_bytes

RECURRENT = (
    "qwen3_5_gated_delta",
    "olmo_hybrid_split_delta",
    "granite_4_mamba2",
    "falcon_h1_two_mixers",
    "kimi_linear_delta",
    "nemotron_h_single_blocks",
)
LENGTH, NUM_DOCUMENTS = 64, 16
WIDE = {
    "qwen3_5_text": {"linear_key_head_dim": 32, "linear_value_head_dim": 32},
    "granitemoehybrid": {"mamba_d_state": 64, "layer_types": ["mamba", "mamba"]},
}
"""Sizes with matrices of at least 4 KB."""


@pytest.mark.parametrize("family", [*RECURRENT, "lfm2_convolutions", "llama_grouped_heads"])
@paddle.no_grad()
def test_decoding_state_bytes_equal_the_states_of_a_cache(family):
    model, cache = tiny_model(family), KVCache([0])
    model.hidden_states(paddle.to_tensor([[1, 2, 3, 4, 5]]), cache=cache)
    size = 0
    for mixer in model.sublayers():
        if isinstance(mixer, TokenMixer) and (shapes := mixer.state_shapes(paddle.float32)):
            size += sum(x.size * x.element_size() for x in cache.state(mixer.layer_index, shapes))
    assert decoding_state_bytes(model, paddle.float32) == size
    assert (size > 0) == (family != "llama_grouped_heads")


def test_decoding_state_in_16_bits_has_smaller_windows_and_equal_matrices():
    model = tiny_model("qwen3_5_gated_delta")
    windows, matrices = 3 * (2 * 2 * 6 + 4 * 10), 4 * 6 * 10
    assert decoding_state_bytes(model, paddle.bfloat16) == 2 * windows + 4 * matrices
    assert decoding_state_bytes(tiny_model("lfm2_convolutions"), paddle.bfloat16) == 2 * 3 * SIZES["hidden_size"]


def bytes_held(model, documents, parents) -> int:
    """Return the bytes that a forward pass over the documents leaves for the backward pass."""
    ids = paddle.to_tensor(np.random.default_rng(0).integers(1, SIZES["vocab_size"], (1, sum(documents))))
    before = allocated_bytes()
    hidden = model.hidden_states(ids, document_lengths=[documents], document_parents=[parents])
    after = allocated_bytes()
    assert not hidden.stop_gradient
    return after - before


@pytest.fixture
def frozen_garbage() -> Iterator[None]:
    """Exclude the objects of other tests from garbage collection, which would take seconds."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@needs_cpp
@pytest.mark.usefixtures("frozen_garbage")
@pytest.mark.parametrize("model_type", list(WIDE))
def test_states_of_documents_are_saved_only_if_a_document_continues_another(model_type):
    family = next(changes for changes in FAMILIES.values() if changes["model_type"] == model_type and len(changes) > 4)
    model = AutoModelForCausalLM.from_config({**SIZES, **family, **WIDE[model_type]})
    model.train()
    documents = [LENGTH // NUM_DOCUMENTS] * NUM_DOCUMENTS
    children = [None] + [0] * (NUM_DOCUMENTS - 1)
    cases = {"one": ([LENGTH], [None]), "alone": (documents, [None] * NUM_DOCUMENTS), "children": (documents, children)}
    held = {}
    for name, case in cases.items():
        bytes_held(model, *case)  # allocates tables, which are made once
        held[name] = sorted(bytes_held(model, *case) for _ in range(3))[1]
    state = training_state_bytes(model, range(2), None)
    assert abs(held["alone"] - held["one"]) < state
    assert held["children"] - held["alone"] == pytest.approx(NUM_DOCUMENTS * state, rel=0.05)


def test_recomputed_layers_hold_the_matrices_of_one_layer():
    model = AutoModelForCausalLM.from_config({**SIZES, **FAMILIES["qwen3_5_gated_delta"], "num_hidden_layers": 4})
    matrix = 4.0 * 4 * 6 * 10  # layers 0 and 2 are recurrent
    assert training_state_bytes(model, range(4), None) == 2 * matrix
    assert training_state_bytes(model, range(4), RecomputePlan()) == matrix
    assert training_state_bytes(model, [0, 1, 0, 1], RecomputePlan(excluded_layers=frozenset([0]))) == 3 * matrix


def test_states_are_a_part_of_the_estimate():
    model = tiny_model("qwen3_5_gated_delta")
    step = {"micro_batch_tokens": 1000, "target_tokens": 300, "recompute": None, "numerics": CPU_CPP}
    without, with_states = (estimate_memory(model, **step, num_states=count) for count in (0, 1000))
    state = 1000 * 4.0 * 4 * 6 * 10
    assert (without.states, with_states.states) == (0, state)
    assert with_states.total - without.total >= state
