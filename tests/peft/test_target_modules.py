"""Target modules: selection of layers, and the shortest list of names that selects them."""

from __future__ import annotations

import pytest

from paddlenlp_ext.peft.target_modules import linear_names, select_targets, shortest_targets
from tests.common.adapters import tiny_model

LEAVES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_linear_names_are_all_of_the_decoder_without_lm_head(family: str):
    names = linear_names(tiny_model(family))
    assert len(names) == 2 * len(LEAVES)
    assert {name.rpartition(".")[2] for name in names} == set(LEAVES)


@pytest.mark.parametrize(
    ("expected", "count"),
    [
        (None, 14),
        ("all-linear", 14),
        (["q_proj"], 2),
        ("q_proj", 2),
        (["self_attn.q_proj", "mlp.up_proj"], 4),
        (["model.layers.1.mlp.up_proj"], 1),
        ([".*q_proj.*", ".*v_proj.*"], 4),
        (r".*\.layers\.1\..*(q|k)_proj", 2),
        (["q_proj", ".*q_proj"], 2),
    ],
)
def test_select_targets_accepts_names_paths_and_patterns(expected: list[str] | str | None, count: int):
    names = linear_names(tiny_model())
    chosen = select_targets(names, expected, "lora_target_modules")
    assert len(chosen) == count
    assert chosen == [name for name in names if name in chosen]


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        (
            ["q_proj", "q_porj"],
            "'q_porj' matches no linear layer of this model; did you mean 'q_proj'.*Known: q_proj, ",
        ),
        ([".*query.*"], "'.*query.*' matches no linear layer"),
        (
            ["lm_head"],
            r"lm_head cannot have an adapter .*leave it out, or .* \(modules_to_save, and ensure_weight_tying if",
        ),
        (["embed_tokens"], r"embed_tokens cannot have an adapter .* in full \(modules_to_save\)"),
        (["proj"], "'proj' matches no"),
        (["("], r"'\(' is not a regular expression"),
        ([], "is an empty list"),
    ],
)
def test_select_targets_without_match_raises(expected: list[str], message: str):
    with pytest.raises(ValueError, match=message):
        select_targets(linear_names(tiny_model()), expected, "lora_target_modules")


def test_shortest_targets_are_leaf_names_where_unambiguous():
    model = tiny_model()
    names = linear_names(model)
    assert shortest_targets(names, model) == LEAVES
    assert shortest_targets([name for name in names if "q_proj" in name], model) == ["q_proj"]
    one = ["model.layers.1.self_attn.q_proj"]
    assert shortest_targets(one, model) == one
