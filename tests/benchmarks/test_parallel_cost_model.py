"""Cost model of parallel layouts: bytes sent and memory, compared with numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.parallel_cost_model import Layout, Step, bytes_sent, memory, numbers
from paddlenlp_ext.config.parallel_degrees import Degrees
from paddlenlp_ext.models.decoder_config import DecoderConfig
from paddlenlp_ext.nn.recompute import RecomputePlan

# D 8, I 16, 2 heads of 4 with 1 key-value head, V 32: a layer's matrices are q 64, k 32, v 32, o 64 and 3 x 128 = 576.
SHAPE = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
LAYER, TABLE = 576 + 16, 256
HIDDEN_BYTES = 10 * 8 * 4  # of [tokens, hidden]
STEP = Step(tokens=10, target_tokens=5, micro_batches=3)


def config(**changes):
    return DecoderConfig.from_dict({**SHAPE, **changes})


def sent(layout: Layout, step: Step = STEP, process: int = 0, **changes) -> dict[str, float]:
    return bytes_sent(config(**changes), layout, step, process)


def test_bytes_sent_of_one_process_is_zero():
    assert sent(Layout(degrees=Degrees())) == {"tensor": 0, "pipeline": 0, "replicas": 0}


def test_numbers_of_a_process_match_the_model():
    full = numbers(config(), Layout(degrees=Degrees()), STEP, 0)
    assert (full.layers, full.ends, full.held) == (4 * LAYER, 2 * TABLE + 8, 4 * LAYER + 2 * TABLE + 8)
    half = numbers(config(), Layout(degrees=Degrees(tensor=2)), STEP, 0)
    assert half.held == 4 * (288 + 16) + TABLE + 8 and half.partial == 0
    sequence = numbers(config(), Layout(degrees=Degrees(tensor=2), sequence_parallel=True), STEP, 0)
    assert sequence.partial == 4 * 16 + 8
    # LoRA of rank 2: inputs of q, k, v, gate, up (5 x 8) and outputs of o, down (2 x 8) are not sharded.
    lora = numbers(config(), Layout(degrees=Degrees(tensor=2)), Step(tokens=1, target_tokens=1, lora_rank=2), 0)
    assert lora.partial == 2 * 4 * (40 + 16)
    assert lora.trained == lora.partial + 2 * 4 * (8 + 4 + 4 + 16 + 16 + 8 + 16) // 2


def test_bytes_sent_with_tensor_parallelism_matches_the_formula():
    """3 micro-batches: 17 all-reduces of hidden states, embedding included, and those of the lm_head; 2(t-1)/t is 1."""
    head = 5 * 8 * 4 + 5 * 20
    layout = Layout(degrees=Degrees(tensor=2))
    assert sent(layout)["tensor"] == 3 * (17 * HIDDEN_BYTES + head)
    recomputed = Step(tokens=10, target_tokens=5, micro_batches=3, plan=RecomputePlan())
    assert sent(layout, recomputed)["tensor"] == 3 * ((17 + 8) * HIDDEN_BYTES + head)
    selective = Step(tokens=10, target_tokens=5, micro_batches=3, plan=RecomputePlan(saved_regions={"mlp_row_ln": 3}))
    assert sent(layout, selective)["tensor"] == 3 * ((17 + 5) * HIDDEN_BYTES + head)
    sequence = Layout(degrees=Degrees(tensor=2), sequence_parallel=True)
    assert sent(sequence)["tensor"] == 3 * (18 * HIDDEN_BYTES + head) + (4 * 16 + 8) * 4


def test_bytes_sent_with_pipeline_matches_the_formula():
    """4 stages: the ends send once per micro-batch, the others twice; tied ends exchange the table's gradient."""
    layout = Layout(degrees=Degrees(pipeline=4))
    assert [sent(layout, process=p)["pipeline"] for p in range(4)] == [3 * n * HIDDEN_BYTES for n in (1, 2, 2, 1)]
    tied = [sent(layout, process=p, tie_word_embeddings=True)["pipeline"] for p in range(4)]
    assert tied == [3 * HIDDEN_BYTES + TABLE * 4, 6 * HIDDEN_BYTES, 6 * HIDDEN_BYTES, 3 * HIDDEN_BYTES + TABLE * 4]
    virtual = Layout(degrees=Degrees(pipeline=2), virtual=2)
    assert [sent(virtual, process=p)["pipeline"] for p in range(2)] == [9 * HIDDEN_BYTES, 9 * HIDDEN_BYTES]


def test_bytes_sent_with_pipeline_and_sequence_parallelism_is_split():
    """2 stages of 2 layers: 8 all-reduces each, half of one to gather at the ends, the embedding's on the first."""
    layout = Layout(degrees=Degrees(tensor=2, pipeline=2), sequence_parallel=True)
    assert [sent(layout, process=p)["pipeline"] for p in range(2)] == [3 * HIDDEN_BYTES / 2] * 2
    head, norms = 5 * 8 * 4 + 5 * 20, 2 * 16 * 4
    assert sent(layout, process=0)["tensor"] == 3 * (9.5 * HIDDEN_BYTES) + norms
    assert sent(layout, process=1)["tensor"] == 3 * (8.5 * HIDDEN_BYTES + head) + norms + 8 * 4
    middle = Layout(degrees=Degrees(tensor=2, pipeline=4), sequence_parallel=True)
    assert sent(middle, process=1)["tensor"] == 3 * 4 * HIDDEN_BYTES + 16 * 4
    full, sequence = (
        memory(config(), one, STEP)["activations"] for one in (replace(layout, sequence_parallel=False), layout)
    )
    assert full - sequence == 2 * 10 * 4 * 2 * 8  # 2 layers x 2 micro-batches x half of two norm inputs


def test_bytes_sent_with_replicas_and_sharding_matches_the_formula():
    held = 4 * (4 * LAYER + 2 * TABLE + 8)  # bytes
    gathered = 4 * (8 * LAYER + 2 * TABLE + 8)
    assert sent(Layout(degrees=Degrees(data=4)))["replicas"] == 1.5 * held
    assert sent(Layout(degrees=Degrees(sharding=4), stage=1))["replicas"] == 1.5 * held + 0.75 * held
    assert sent(Layout(degrees=Degrees(sharding=4), stage=2))["replicas"] == 3 * 0.75 * held + 0.75 * held
    assert sent(Layout(degrees=Degrees(sharding=4), stage=3))["replicas"] == 3 * 0.75 * (held + gathered)
    both = sent(Layout(degrees=Degrees(data=2, sharding=2), stage=2))["replicas"]
    assert both == 3 * 0.5 * held + 0.5 * held + held / 2


def test_memory_of_each_part_matches_the_formula():
    held = 4 * LAYER + 2 * TABLE + 8
    parts = memory(config(), Layout(degrees=Degrees(sharding=4), stage=2), STEP)
    assert (parts["weights"], parts["gradients"], parts["optimizer"]) == (4 * held, held, 2 * held)
    # a layer saves 4 x 8 for its norms, 8 each for q and the result, 4 each for k and v, 3 x 16 for the feed-forward
    assert parts["activations"] == 10 * 4 * 4 * (32 + 24 + 48)
    assert parts["loss"] == 4 * 2 * 5 * 32
    assert memory(config(), Layout(degrees=Degrees(sharding=4), stage=3), STEP)["weights"] == held
    two_bytes = Step(tokens=10, target_tokens=5, value_bytes=2, plan=RecomputePlan())
    parts = memory(config(), Layout(degrees=Degrees(tensor=2), sequence_parallel=True), two_bytes)
    assert parts["activations"] == 10 * 2 * (4 * 4 + (2 * 4 + 2 * 8 + 12 + 24))
    assert parts["optimizer"] == 12 * (4 * (288 + 16) + TABLE + 8)


def test_memory_with_pipeline_counts_micro_batches_in_flight():
    layout = Layout(degrees=Degrees(pipeline=2))
    first, last = (memory(config(vocab_size=4), layout, STEP, process)["activations"] for process in range(2))
    assert first == 2 * last == 2 * 10 * 4 * 2 * (32 + 24 + 48)


@pytest.mark.parametrize("stage", [1, 2])
def test_bytes_sent_of_a_sharded_adapter_is_gradients_on_all_ranks(stage):
    step = Step(tokens=10, target_tokens=5, micro_batches=3, lora_rank=2)
    trained = 4 * numbers(config(), Layout(degrees=Degrees()), step, 0).trained
    assert sent(Layout(degrees=Degrees(sharding=2), stage=stage), step)["replicas"] == trained + 0.5 * trained
