"""Short convolutions: caches with padding, prefixes and branches, and methods that have no meaning for them."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.generation.padded_kv_cache import KVCache
from paddlenlp_ext.generation.prefill_and_decode import forward, prefill
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.nn.attention import AttentionLayer
from paddlenlp_ext.nn.short_convolution import ShortConvolution
from paddlenlp_ext.peft.methods.bottleneck import BottleneckConfig
from paddlenlp_ext.peft.methods.prefix_tuning import PrefixTuningConfig
from paddlenlp_ext.peft.peft_model import get_peft_model
from tests.generation.tiny_models import FAMILIES, SIZES, random_prompts, tiny_model

FAMILY = "lfm2_convolutions"


def new_model():
    return AutoModelForCausalLM.from_config({**SIZES, **FAMILIES[FAMILY]})


def test_decoder_layers_have_the_mixers_of_layer_types():
    layers = tiny_model(FAMILY).model.layers
    assert [type(layer.mixer).__bases__[0].__name__ for layer in layers] == ["TokenMixer", "AttentionLayer"]
    assert isinstance(layers[0].conv, ShortConvolution) and isinstance(layers[1].self_attn, AttentionLayer)


@paddle.no_grad()
@pytest.mark.parametrize("chunks", [(9,), (1,) * 9, (2, 3, 4)])
def test_short_convolution_with_a_cache_equals_the_whole_pass(chunks):
    """Test rows with padding, and new positions in chunks that are shorter and longer than the kernel of 4."""
    model, rows = tiny_model(FAMILY), random_prompts((5, 2))
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


@paddle.no_grad()
@pytest.mark.parametrize("length", [1, 2, 6])
def test_short_convolution_after_a_prefix_equals_the_whole_pass(length):
    """Test prefixes that are shorter and longer than the kernel, as a shared prompt in the cache of a server."""
    model, (prompt, row) = tiny_model(FAMILY), random_prompts((length, 5))
    first = KVCache([0])
    model.hidden_states(paddle.to_tensor([prompt]), cache=first)
    cache = KVCache([0, 0])
    cache.set_prefix(*first.as_prefix())
    ids = paddle.to_tensor([row, row])
    positions = paddle.to_tensor(np.arange(length, length + 5)[None].repeat(2, 0))
    found = [
        model.hidden_states(ids[:, part], position_ids=positions[:, part], cache=cache).numpy()
        for part in (slice(0, 2), slice(2, 3), slice(3, 5))
    ]
    expected = model.hidden_states(paddle.to_tensor([prompt + row])).numpy()[:, length:]
    np.testing.assert_allclose(np.concatenate(found, 1), expected.repeat(2, 0), rtol=0, atol=5e-5)


@paddle.no_grad()
def test_cache_of_a_short_convolution_has_the_size_of_the_window():
    """Compare the state after prompts of different lengths: the last three of the products b * u."""
    model, (prompt,) = tiny_model(FAMILY), random_prompts((300,))
    mixer, products = model.model.layers[0].conv, []
    hooks = [
        layer.register_forward_post_hook(lambda layer, x, y: products.append(y))
        for layer in (mixer.b_proj, mixer.u_proj)
    ]
    for length in (2, 9, 300):
        products.clear()
        cache = KVCache([0])
        model.hidden_states(paddle.to_tensor([prompt[:length]]), cache=cache)
        key_values, states = cache.as_prefix()
        assert list(key_values) == [1] and list(states) == [0]
        expected = np.concatenate([np.zeros([1, 3, SIZES["hidden_size"]]), (products[0] * products[1]).numpy()], axis=1)
        ((window,),) = states.values()
        np.testing.assert_array_equal(window.numpy(), expected[:, -3:])
    for hook in hooks:
        hook.remove()


@paddle.no_grad()
def test_decoding_of_selected_rows_equals_the_whole_pass():
    """Test the rows of beams, which are copied, reordered and left out, among rows with padding."""
    model, rows, more = tiny_model(FAMILY), random_prompts((5, 2)), random_prompts((3,) * 3, seed=1)
    cache, _ = prefill(model, rows)
    for index, selected in enumerate(((1, 0, 1), (2, 1, 1), (0, 2, 1))):
        cache.select_rows(selected)
        rows = [[*rows[row], more[position][index]] for position, row in enumerate(selected)]
        found = forward(model, [row[-1:] for row in rows], cache).numpy()[:, 0]
        expected = [model.hidden_states(paddle.to_tensor([row])).numpy()[0, -1] for row in rows]
        np.testing.assert_allclose(found, expected, rtol=0, atol=5e-5)


def test_branches_of_a_prompt_equal_the_sequences_alone():
    model, (prompt, left, right) = new_model(), random_prompts((5, 3, 4))
    model.train()
    packed = model.hidden_states(
        paddle.to_tensor([prompt + left + right]), document_lengths=[[5, 3, 4]], document_parents=[[None, 0, 0]]
    )
    packed[:, 5:].sum().backward()
    trained = [(name, parameter) for name, parameter in model.named_parameters() if name != "lm_head.weight"]
    gradients = {name: parameter.grad.numpy() for name, parameter in trained}
    model.clear_gradients()
    start = 5
    for branch in (left, right):
        alone = model.hidden_states(paddle.to_tensor([prompt + branch]))[:, 5:]
        alone.sum().backward()
        found = packed[:, start : start + len(branch)].numpy()
        np.testing.assert_allclose(found, alone.numpy(), rtol=0, atol=1e-5)
        start += len(branch)
    for name, parameter in trained:
        gradient = parameter.grad.numpy()
        np.testing.assert_allclose(gradients[name], gradient, rtol=0, atol=1e-5 * np.abs(gradient).max(), err_msg=name)


def test_prefix_tuning_of_a_short_convolution_raises():
    with pytest.raises(ValueError, match=r"prefix_tuning: model\.layers\.0\.conv is a ShortConvolution"):
        get_peft_model(new_model(), PrefixTuningConfig(num_virtual_tokens=3))


def test_bottleneck_adapters_wrap_both_kinds_of_mixers():
    names = BottleneckConfig(where="attention").targets(new_model())
    assert names == ["model.layers.0.conv", "model.layers.1.self_attn"]
