"""Assignment of layers to pipeline stages, and its cost model."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from paddlenlp_ext.nn.recompute import RecomputePlan
from paddlenlp_ext.parallel.pipeline.cost_model import FlopEstimate
from paddlenlp_ext.parallel.pipeline.stages import StagePlan, plan_stages


def config(layers: int, vocabulary: int = 61, tied: bool = True) -> SimpleNamespace:
    return SimpleNamespace(
        num_hidden_layers=layers,
        hidden_size=32,
        intermediate_size=48,
        active_size=48,
        num_attention_heads=4,
        layer_shapes=[SimpleNamespace(head_dim=8, value_dim=8, source=None)],
        mixer_weights=2 * 32 * (32 + 16),
        layer_embeddings=None,
        attention_share=1.0,
        gated=True,
        num_outputs=vocabulary,
        tie_word_embeddings=tied,
    )


LAYER = 3 * 32 * (2 * 32 + 2 * 16 + 3 * 48)


@pytest.mark.parametrize("layers, chunks, vocabulary", [(7, 3, 61), (8, 2, 1000), (9, 4, 4000), (6, 6, 61), (10, 3, 7)])
def test_plan_stages_minimizes_the_largest_cost(layers, chunks, vocabulary):
    def largest_cost(bounds: tuple[int, ...]) -> int:
        loads = [(end - start) * LAYER for start, end in itertools.pairwise(bounds)]
        return max(*loads[:-1], loads[-1] + 3 * vocabulary * 32)

    plan = plan_stages(config(layers, vocabulary), chunks)
    all_bounds = [(0, *inner, layers) for inner in itertools.combinations(range(1, layers), chunks - 1)]
    assert largest_cost(plan.bounds) == min(largest_cost(bounds) for bounds in all_bounds)
    assert plan.loads[-1] == (plan.bounds[-1] - plan.bounds[-2]) * LAYER + 3 * vocabulary * 32


@pytest.mark.parametrize(("vocabulary", "bounds"), [(61, (0, 3, 6, 9, 12)), (2 * LAYER // (3 * 32), (0, 4, 7, 10, 12))])
def test_plan_stages_of_12_layers_gives_3_to_each_of_4_stages_unless_lm_head_costs_layers(vocabulary, bounds):
    sizes = [end - start for start, end in itertools.pairwise(plan_stages(config(12, vocabulary), 4).bounds)]
    expected = [end - start for start, end in itertools.pairwise(bounds)]
    assert sorted(sizes[:-1]) == sorted(expected[:-1]) and sizes[-1] == expected[-1]


def test_plan_stages_with_a_large_lm_head_gives_its_stage_fewer_layers():
    plan = plan_stages(config(8, vocabulary=4 * LAYER // (3 * 32)), 2)
    assert plan.bounds == (0, 6, 8)
    assert "layers 6-7, norm and head (1.00 times the mean cost)" in plan.table()


def test_flop_estimate_counts_target_tokens_and_visible_keys():
    rows = [SimpleNamespace(loss_mask=np.array([False] + [True] * 2 + [False] * 2)) for _ in range(1000)]
    rows += [SimpleNamespace(loss_mask=np.array([False] + [True] * 8)) for _ in range(1000)]
    work = FlopEstimate.from_rows(rows, trains_matrices=False)
    assert work == FlopEstimate(10 / 12, (4**2 + 8**2) / 2 / 12, trains_matrices=False)
    matrices, attention = LAYER // 3, 32 * work.keys
    assert work.layer_cost(config(4)) == 2 * matrices + 7 * attention
    assert work.lm_head_cost(config(4, 1000)) == pytest.approx(2 * 1000 * 32 * 10 / 12)


@pytest.mark.parametrize(
    "granularity, again",
    [("full", LAYER // 3 + 2 * 32 * 5), ("full_attn", 32 * (2 * 32 + 2 * 16) + 2 * 32 * 5), ("core_attn", 2 * 32 * 5)],
)
def test_flop_estimate_with_recompute_counts_it_again(granularity, again):
    less, more = (FlopEstimate(keys=5, recompute=plan) for plan in (None, RecomputePlan(granularity, frozenset({1}))))
    assert more.layer_cost(config(4)) - less.layer_cost(config(4)) == pytest.approx(again * 3 / 4)


def test_flop_estimate_without_rows_counts_all_tokens_as_targets():
    assert FlopEstimate.from_rows(None) == FlopEstimate.from_rows([]) == FlopEstimate(1.0, 0.0)


def test_plan_stages_with_few_target_tokens_gives_the_last_stage_more_layers():
    heavy = config(8, vocabulary=4 * LAYER // (3 * 32))
    assert plan_stages(heavy, 2, work=FlopEstimate(target_fraction=0.5)).bounds == (0, 5, 8)


@pytest.mark.parametrize(
    "name, holders",
    [
        ("model.embed_tokens.weight", (0, 2)),
        ("base_model.model.embed_tokens.base.weight", (0, 2)),
        ("base_model.model.embed_tokens.prompt_embeddings", (0,)),
        ("model.layers.1.mlp.up_proj.weight", (1,)),
        ("base_model.model.layers.3.self_attn.q_proj.lora_A.weight", (0,)),
        ("model.norm.weight", (2,)),
        ("lm_head.weight", (2,)),
        ("base_model.score.weight", (2,)),
        ("prefix_encoder.weight", (0, 1, 2)),
    ],
)
def test_stage_plan_holders_follow_the_parameters_name(name, holders):
    plan = StagePlan(3, tuple(range(7)), (1,) * 6, is_tied=True)
    assert plan.holders(name) == holders


@pytest.mark.parametrize("degree, each, remedy", [(2, 3, "virtual_pp_degree of at most 2"), (8, 1, "at most 4 stages")])
def test_plan_stages_with_more_chunks_than_layers_raises(degree, each, remedy):
    with pytest.raises(ValueError, match=remedy):
        plan_stages(config(4), degree, each)
