"""Forward pass of a batch: the last layer skips the feed-forward of positions that the loss does not read."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest

from paddlenlp_ext.data.collate import PackedBatch, collate
from paddlenlp_ext.data.preference.collate_reward_pairs import collate_reward_pairs
from paddlenlp_ext.data.preference.tokenized_pair import TokenizedPair
from paddlenlp_ext.data.tokenization.encoded_row import EncodedRow
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.nn.recompute import RecomputePlan
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.methods.prefix_tuning import PrefixTuningConfig
from paddlenlp_ext.peft.methods.prompt_tuning import PromptTuningConfig
from paddlenlp_ext.peft.methods.reft import ReFTConfig
from paddlenlp_ext.peft.peft_model import get_peft_model
from paddlenlp_ext.trainer.forward_backward import hidden_states, loss_sum
from tests.generation.tiny_models import FAMILIES, SIZES

LAYER_KINDS = ("llama_grouped_heads", "olmo2_post_norm", "gemma3_sandwich", "cohere2_parallel", "minicpm3_latents")
ADAPTERS = {
    "lora": LoRAConfig(r=2),
    "reft": ReFTConfig(rank=2, position="f2+l2"),
    "prompt_tuning": PromptTuningConfig(num_virtual_tokens=3),
    "prefix_tuning": PrefixTuningConfig(num_virtual_tokens=3),
}


def rows(*lengths: int) -> list[EncodedRow]:
    """Return rows of random tokens; the last three tokens of a row are target tokens."""
    generator = np.random.default_rng(3)
    return [
        EncodedRow(generator.integers(1, 97, length).astype(np.int32), np.arange(length) >= length - 3, index)
        for index, length in enumerate(lengths)
    ]


def build(family: str) -> Any:
    return AutoModelForCausalLM.from_config({**SIZES, **FAMILIES[family]})


def loss_and_gradients(model: TrainableModel, batch: PackedBatch) -> dict[str, np.ndarray]:
    model.train()
    loss, _ = loss_sum(model, batch)
    loss.backward()
    values = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
    model.clear_gradients(set_to_zero=False)
    return {**values, "loss": loss.numpy()}


def assert_skipping_keeps_gradients(model: TrainableModel, batch: PackedBatch) -> None:
    """Compare loss and gradients with a pass in which the last layer computes all positions."""
    layer = model.get_base_model().model.layers[-1]
    layer = getattr(layer, "base", layer)  # ReFT wraps the layer
    skipped = loss_and_gradients(model, batch)
    layer.skips_unread = False
    full = loss_and_gradients(model, batch)
    assert skipped.keys() == full.keys()
    for name, value in full.items():
        np.testing.assert_allclose(skipped[name], value, rtol=0, atol=2e-6 * np.abs(value).max(), err_msg=name)


@pytest.mark.parametrize("family", LAYER_KINDS)
def test_skipped_feed_forward_keeps_loss_and_gradients_of_every_layer_kind(family: str):
    assert_skipping_keeps_gradients(build(family), collate([rows(7, 12), rows(9)], pad_to_length=20))


@pytest.mark.parametrize("method", ADAPTERS)
def test_skipped_feed_forward_keeps_loss_and_gradients_of_adapters(method: str):
    model = get_peft_model(build("llama_grouped_heads"), ADAPTERS[method])
    generator = np.random.default_rng(4)
    for parameter in model.parameters():
        if not parameter.stop_gradient and parameter.ndim > 1 and not parameter.numpy().any():
            parameter.set_value(generator.normal(0, 0.2, parameter.shape).astype(np.float32))
    assert_skipping_keeps_gradients(model, collate([rows(7, 12), rows(9)], pad_to_length=20))


@pytest.mark.parametrize("granularity", ["full", "full_attn", "core_attn"])
def test_skipped_feed_forward_keeps_loss_and_gradients_with_recompute(granularity: str):
    model = build("llama_grouped_heads")
    model.enable_recompute(RecomputePlan(granularity))
    assert_skipping_keeps_gradients(model, collate([rows(7, 12, 9)]))


def rows_of_feed_forwards(model: TrainableModel, batch: PackedBatch) -> list[int]:
    """Return the number of positions that the feed-forward of each layer computes in a forward pass."""
    seen: list[int] = []
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda _, inputs: seen.append(int(np.prod(inputs[0].shape[:-1]))))
    with paddle.no_grad():
        hidden_states(model, batch)
    return seen


def test_hidden_states_compute_the_last_feed_forward_for_target_tokens_only():
    batch = collate([rows(7, 12, 9)])
    assert rows_of_feed_forwards(build("llama_grouped_heads"), batch) == [25, 9]


def test_hidden_states_of_a_reward_batch_compute_the_last_feed_forward_for_scored_positions():
    tokens = np.arange(1, 12, dtype=np.int32)
    pair = TokenizedPair(tokens, np.arange(11) >= 5, 0, (5, 8), (True, False), scores_last_tokens=True)
    batch = collate_reward_pairs([[pair]])
    assert rows_of_feed_forwards(build("llama_grouped_heads"), batch) == [batch.num_positions, 2]


@pytest.mark.parametrize("is_target", [True, False])
def test_hidden_states_compute_all_positions_if_all_or_none_are_targets(is_target: bool):
    batch = collate([[EncodedRow(np.arange(1, 14, dtype=np.int32), np.full(13, is_target), 0)]])
    assert rows_of_feed_forwards(build("llama_grouped_heads"), batch) == [12, 12]


@pytest.mark.parametrize(("dropout", "training", "num_last"), [(0.1, True, 25), (0.1, False, 9), (0.0, True, 9)])
def test_hidden_states_compute_all_positions_with_dropout(dropout: float, training: bool, num_last: int):
    model = get_peft_model(build("llama_grouped_heads"), LoRAConfig(r=2, lora_dropout=dropout))
    (model.train if training else model.eval)()
    assert rows_of_feed_forwards(model.get_base_model(), collate([rows(7, 12, 9)])) == [25, num_last]


def test_hidden_states_compute_all_positions_of_experts():
    batch = collate([rows(7, 12, 9)])
    assert rows_of_feed_forwards(build("mixtral_experts"), batch) == [25, 25]
