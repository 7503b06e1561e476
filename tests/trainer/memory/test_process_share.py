"""Shares of processes in the memory of a training step: benchmarks/memory.py compares them with measurements."""

from __future__ import annotations

import math

import paddle
import pytest

from paddlenlp_ext.config.parallel_degrees import Degrees
from paddlenlp_ext.config.sections.parallel import ParallelConfig
from paddlenlp_ext.models.causal_lm import CausalLM
from paddlenlp_ext.models.decoder_config import DecoderConfig
from paddlenlp_ext.paddle_compat import has_storage
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.peft_model import get_peft_model
from paddlenlp_ext.trainer.memory.estimate import estimate_memory
from paddlenlp_ext.trainer.memory.layer_activations import CPU_CPP
from paddlenlp_ext.trainer.memory.process_share import process_shares
from tests.common.models import TINY_LLAMA

CONFIG = {**TINY_LLAMA, "num_hidden_layers": 4, "tie_word_embeddings": False}
STEP = {"micro_batch_tokens": 4096, "target_tokens": 64, "recompute": None, "numerics": CPU_CPP}


def skeleton(**keys):
    with paddle.LazyGuard():
        return CausalLM(DecoderConfig.from_dict({**CONFIG, **keys}))


def estimates(degrees, num_micro=1, keys=None, **parallel):
    """Return the estimate of one process of each stage."""
    model = skeleton(**(keys or {}))
    shares = process_shares(model, degrees, ParallelConfig(**parallel), num_micro)
    return [estimate_memory(model, **STEP, share=share) for share in shares]


@pytest.fixture(scope="module")
def whole():
    return estimates(Degrees())[0]


def test_process_shares_single_process_equals_no_share(whole):
    assert whole == estimate_memory(skeleton(), **STEP)


def test_process_shares_tensor_parallel_halves_weights_and_shards_activations(whole):
    (half,) = estimates(Degrees(tensor=2))
    replicated = 4.0 * 32 * (9 + 2 * (CONFIG["vocab_size"] % 2))  # norms, and the odd row of embedding and lm_head
    assert half.weights == pytest.approx((whole.weights + replicated) / 2)
    assert half.optimizer == pytest.approx((whole.optimizer + 2 * replicated) / 2)
    assert whole.activations / 2 < half.activations < whole.activations
    (split,) = estimates(Degrees(tensor=2), sequence_parallel=True)
    hidden = 4.0 * 32 * STEP["micro_batch_tokens"]
    assert half.activations - split.activations == pytest.approx((2 * 4 + 1) * hidden / 2)


def test_process_shares_pipeline_holds_a_micro_batch_for_each_later_stage(whole):
    first, last = estimates(Degrees(pipeline=2), num_micro=4)
    assert first.weights + last.weights == pytest.approx(whole.weights)
    hidden = 4.0 * 32 * STEP["micro_batch_tokens"]  # input of the last norm
    num_last = round(2 * (last.activations - hidden) / ((whole.activations - hidden) / 4)) / 2
    num_first = round(2 * first.activations / ((whole.activations - hidden) / 4)) / 2
    assert num_first == 2 * (4 - num_last)
    (only_one, _) = estimates(Degrees(pipeline=2), num_micro=1)
    assert only_one.activations == pytest.approx(first.activations / 2)


@pytest.mark.parametrize(("stage", "shards_weights"), [("stage1", False), ("stage2", False), ("stage3", True)])
def test_process_shares_zero_divides_what_its_stage_says(whole, stage, shards_weights):
    (share,) = estimates(Degrees(sharding=2), sharding=stage)
    assert share.optimizer == pytest.approx(whole.optimizer / 2, rel=0.05)
    assert (share.weights < whole.weights) == shards_weights
    adapted = get_peft_model(CausalLM(DecoderConfig.from_dict(CONFIG)), LoRAConfig(rank=2))
    for model, shards_gradients in ((skeleton(), stage != "stage1"), (adapted, False)):
        (plan,) = process_shares(model, Degrees(data=3, sharding=2), ParallelConfig(sharding=stage), 1)
        assert plan.shards_gradients == shards_gradients
        assert plan.replicas == 6


def test_process_shares_experts_are_divided_and_their_rows_are_held():
    keys = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    (whole,), (share,) = (estimates(Degrees(data=n, expert=n), keys=keys) for n in (1, 2))
    experts = 4 * 4 * 3 * CONFIG["hidden_size"] * CONFIG["intermediate_size"]
    assert whole.weights - share.weights == pytest.approx(4.0 * experts / 2)
    rows = 4 * 2 * STEP["micro_batch_tokens"] * CONFIG["hidden_size"]
    assert share.activations - whole.activations == pytest.approx(4.0 * rows)
    assert math.isclose(share.process, whole.process)


@pytest.mark.parametrize("adapted", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize(
    ("degrees", "options"),
    [
        (Degrees(tensor=2), {}),
        (Degrees(tensor=2, pipeline=2), {"sequence_parallel": True}),
        (Degrees(data=2, expert=2), {}),
        (Degrees(sharding=2), {"sharding": "stage3"}),
    ],
    ids=["tensor", "tensor-pipeline-sequence", "expert", "zero3"],
)
def test_process_shares_model_without_values_allocates_nothing_and_equals_a_built_model(degrees, options, adapted):
    keys = {**CONFIG, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}

    def build():
        model = CausalLM(DecoderConfig.from_dict(keys))
        return get_peft_model(model, LoRAConfig(rank=2)) if adapted else model

    def plan(model):
        shares = process_shares(model, degrees, ParallelConfig(**options), 4)
        return [estimate_memory(model, **STEP, share=share) for share in shares]

    with paddle.LazyGuard():
        outline = build()
    assert plan(outline) == plan(build())
    assert not [name for name, parameter in outline.named_parameters() if has_storage(parameter)]
