"""Mixers with a recurrence: documents, caches with padding and prefixes, and methods that have no meaning for them."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.generation.padded_kv_cache import KVCache
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.peft.methods.prefix_tuning import PrefixTuningConfig
from paddlenlp_ext.peft.peft_model import get_peft_model
from tests.common.marks import needs_cpp
from tests.common.models import slow_decays
from tests.common.same_bits import assert_same_bits
from tests.generation.tiny_models import FAMILIES, SIZES, random_prompts, tiny_model

MIXERS = {
    "qwen3_5_gated_delta": "linear_attn",
    "olmo_hybrid_split_delta": "linear_attn",
    "granite_4_mamba2": "mamba",
    "falcon_h1_two_mixers": "mamba",
    "kimi_linear_delta": "self_attn",
    "nemotron_h_single_blocks": "mamba",
}
"""Family of a model -> name of the mixer in its first layer."""
LENGTHS = (70, 1, 129, 2, 1, 64)
each_family = pytest.mark.parametrize("family", MIXERS)


def new_model(family):
    return slow_decays(AutoModelForCausalLM.from_config({**SIZES, **FAMILIES[family]}))


def outputs_and_gradients(family, model, rows, documents=None, read=slice(None)):
    """Return the hidden states, and the gradients of the input embeddings and the mixer for the positions `read`."""
    embeddings = []

    def keep(layer, inputs, output):
        output.stop_gradient = False
        output.retain_grads()
        embeddings.append(output)

    hook = model.model.embed_tokens.register_forward_post_hook(keep)
    hidden = model.hidden_states(paddle.to_tensor([rows]), document_lengths=documents)
    hook.remove()
    weights = paddle.to_tensor(np.random.default_rng(3).standard_normal(hidden.shape).astype("float32"))
    (hidden * weights)[:, read].sum().backward()
    gradients = {name: each.grad.numpy() for name, each in model.named_parameters() if MIXERS[family] in name}
    model.clear_gradients()
    return hidden.numpy()[0], {"embeddings": embeddings[0].grad.numpy()[0], **gradients}


@each_family
def test_head_tensors_of_a_recurrent_mixer_are_its_parameters_with_values_for_each_head(family):
    mixer = getattr(tiny_model(family).model.layers[0], MIXERS[family])
    of_heads = [(getattr(owner, name), axis) for owner, name, axis in mixer.head_tensors()]
    named = {name: each for name, each in mixer.named_parameters() if name.split(".")[-1] in ("A_log", "D", "dt_bias")}
    assert sorted(each.name for each, _ in of_heads) == sorted(each.name for each in named.values())
    assert all(each.shape[axis] % mixer.matrix_shape[0] == 0 for each, axis in of_heads)


@each_family
def test_recurrent_mixer_of_a_changed_neighbour_has_the_same_bits(family):
    model, rows = new_model(family), random_prompts((sum(LENGTHS),))[0]
    model.train()
    start, end = sum(LENGTHS[:2]), sum(LENGTHS[:3])
    changed = [*rows[:start], *random_prompts((end - start,), seed=5)[0], *rows[end:]]
    others = np.r_[:start, end : len(rows)]
    (before, gradients), (after, new_gradients) = (
        outputs_and_gradients(family, model, ids, [list(LENGTHS)]) for ids in (rows, changed)
    )
    # a changed neighbour changes the numbers of rows in the products of experts
    assert_same = assert_same_bits if family == "nemotron_h_single_blocks" else np.testing.assert_array_equal
    assert_same(before[others], after[others])
    assert_same(gradients["embeddings"][others], new_gradients["embeddings"][others])
    assert np.abs(before[start:end] - after[start:end]).max() > 0.1


@each_family
def test_recurrent_mixer_of_packed_documents_equals_the_documents_alone(family):
    model, rows = new_model(family), random_prompts((sum(LENGTHS),))[0]
    model.train()
    packed, gradients = outputs_and_gradients(family, model, rows, [list(LENGTHS)])
    start = 0
    for length in LENGTHS:
        part = slice(start, start + length)
        alone = model.hidden_states(paddle.to_tensor([rows[part]])).numpy()[0]
        np.testing.assert_allclose(packed[part], alone, rtol=0, atol=1e-5 * np.abs(alone).max())
        _, of_part = outputs_and_gradients(family, model, rows, [list(LENGTHS)], part)
        nearest = np.abs(of_part["embeddings"]).max(-1).nonzero()[0]
        assert start <= nearest.min() and nearest.max() < start + length, "a gradient leaks into a neighbour"
        start += length
    assert all(np.abs(gradient).max() > 0 for gradient in gradients.values())


@each_family
def test_branches_of_a_prompt_equal_the_sequences_alone(family):
    model, (prompt, left, right) = new_model(family), random_prompts((69, 3, 66))
    packed = model.hidden_states(
        paddle.to_tensor([prompt + left + right]), document_lengths=[[69, 3, 66]], document_parents=[[None, 0, 0]]
    )
    for start, branch in ((69, left), (72, right)):
        alone = model.hidden_states(paddle.to_tensor([prompt + branch]))[:, 69:].numpy()
        found = packed[:, start : start + len(branch)].numpy()
        np.testing.assert_allclose(found, alone, rtol=0, atol=1e-5 * np.abs(alone).max())


@each_family
@paddle.no_grad()
@pytest.mark.parametrize("chunks", [(9,), (1,) * 9, (2, 3, 4)])
def test_recurrent_mixer_with_a_cache_equals_the_whole_pass(family, chunks):
    """Test rows with padding, and new positions in chunks that are shorter and longer than the kernel of 4."""
    model, rows = tiny_model(family), random_prompts((5, 2))
    more = random_prompts((9, 9), seed=1)
    cache = KVCache([0, 3])
    model.hidden_states(paddle.to_tensor([rows[0], [0] * 3 + rows[1]]), cache=cache)
    start, found = 0, []
    for size in chunks:
        ids = paddle.to_tensor([row[start : start + size] for row in more])
        found.append(model.hidden_states(ids, cache=cache).numpy())
        start += size
    found = np.concatenate(found, axis=1)
    for index, row in enumerate(rows):
        expected = model.hidden_states(paddle.to_tensor([row + more[index]])).numpy()[0, len(row) :]
        np.testing.assert_allclose(found[index], expected, rtol=0, atol=5e-5 * np.abs(expected).max())


@each_family
@paddle.no_grad()
@needs_cpp
def test_single_positions_are_added_to_the_matrices_in_place(family):
    model, cache = tiny_model(family), KVCache([0, 2])
    mixer = getattr(model.model.layers[0], MIXERS[family])
    shapes = mixer.state_shapes(paddle.float32)
    for width in (5, 1):
        model.hidden_states(paddle.to_tensor(random_prompts((width, width))), cache=cache)
    _, before = cache.state(0, shapes)
    copy = before.numpy().copy()
    model.hidden_states(paddle.to_tensor(random_prompts((1, 1))), cache=cache)
    _, after = cache.state(0, shapes)
    saved = after.numpy().copy()
    assert after.data_ptr() == before.data_ptr() and (saved != copy).any()
    cache.save_states()
    model.hidden_states(paddle.to_tensor(random_prompts((1, 1))), cache=cache)
    np.testing.assert_array_equal(after.numpy(), saved)
    assert cache.state(0, shapes)[1].data_ptr() != after.data_ptr()


@each_family
@paddle.no_grad()
def test_padding_of_several_passes_leaves_no_trace_in_the_state(family):
    """Test a row that starts in the second pass over the cache."""
    model, (first, second) = tiny_model(family), random_prompts((9, 4))
    padded = np.array([first, [7] * 5 + second])
    cache = KVCache([0, 5])
    for part in (slice(0, 3), slice(3, 7), slice(7, 9)):
        found = model.hidden_states(paddle.to_tensor(padded[:, part]), cache=cache).numpy()
    for row, ids in enumerate((first, second)):
        expected = model.hidden_states(paddle.to_tensor([ids])).numpy()[0, -2:]
        np.testing.assert_allclose(found[row], expected, rtol=0, atol=5e-5 * np.abs(expected).max())


@each_family
def test_prefix_tuning_of_a_recurrent_mixer_raises(family):
    message = rf"prefix_tuning: model\.layers\.0\.{MIXERS[family]} is a (GatedDeltaNet|SplitGatedDeltaNet|Mamba2|Kimi)"
    with pytest.raises(ValueError, match=message):
        get_peft_model(new_model(family), PrefixTuningConfig(num_virtual_tokens=3))
