"""ReFT: selected positions, interventions, and orthonormality of the basis."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import paddle
import pytest

from paddlenlp_ext.data.collate import collate
from paddlenlp_ext.data.tokenization.encoded_row import EncodedRow
from paddlenlp_ext.peft.layers import adapter_layers
from paddlenlp_ext.peft.merge.merge_adapter import merge_adapter
from paddlenlp_ext.peft.method_internals.reft_interventions import (
    INTERVENTION_TYPES,
    TINY,
    OrthonormalColumns,
    random_orthonormal,
)
from paddlenlp_ext.peft.methods.reft import ReFTConfig
from paddlenlp_ext.peft.peft_model import PeftModel, get_peft_model
from paddlenlp_ext.trainer.forward_backward import loss_sum
from paddlenlp_ext.utils.prompt_lengths import compute_prompt_lengths
from tests.common.adapters import INPUT_IDS, logits_of, loss_of, tiny_model, train

GENERATOR = np.random.default_rng(5)


def trained(steps: int = 3, **fields: object) -> PeftModel:
    model = get_peft_model(tiny_model(), ReFTConfig(**{"rank": 3, "position": "f2+l2", **fields}))
    train(model, steps)
    return model


def rows(*lengths_of_turns: tuple[int, ...]) -> list[EncodedRow]:
    """Return rows of alternating prompts and answers with the given numbers of tokens."""
    made = []
    for index, turns in enumerate(lengths_of_turns):
        loss_mask = np.repeat([number % 2 == 1 for number in range(len(turns))], turns)
        made.append(EncodedRow(GENERATOR.integers(1, 61, sum(turns)).astype(np.int32), loss_mask, index))
    return made


def changed_positions(model: PeftModel, **inputs: object) -> list[list[int]]:
    """Return the positions of each batch row where the upper layer's output differs from the base model's."""
    layer = model.base_model.model.layers[1]
    seen = []
    handle = layer.register_forward_post_hook(lambda _, __, output: seen.append(output.numpy()))
    with paddle.no_grad():
        model.hidden_states(**inputs)
        with model.disable_adapter():
            model.hidden_states(**inputs)
    handle.remove()
    return [np.flatnonzero(np.abs(on - off).max(-1) > 1e-6).tolist() for on, off in zip(*seen, strict=True)]


# -- positions --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("position", "prompt", "expected"),
    [
        ("f2+l3", 9, [0, 1, 6, 7, 8]),
        ("f2", 9, [0, 1]),
        ("l3", 9, [6, 7, 8]),
        ("l2+f1", 9, [0, 7, 8]),
        ("f4+l4", 5, [0, 1, 2, 3, 4]),
        ("f7", 3, [0, 1, 2]),
        ("f7+l7", 1, [0]),
        ("f7+l7", 0, []),
    ],
)
def test_selected_indices_changes_first_and_last_positions_once(position: str, prompt: int, expected: list[int]):
    model = trained(position=position, layers="1")
    inputs = {"input_ids": paddle.to_tensor(INPUT_IDS[:1]), "prompt_lengths": [[prompt]]}
    assert changed_positions(model, **inputs) == [expected]


def test_reft_overlapping_positions_have_the_gradient_of_one_change():
    """Compare with a difference quotient: an index that occurs twice would count twice in the backward pass only."""
    model = trained(position="f4+l4", layers="1")
    generator = np.random.default_rng(1)
    trainable = [parameter for parameter in model.parameters() if not parameter.stop_gradient]
    start = [parameter.numpy().copy() for parameter in trainable]
    directions = [generator.standard_normal(value.shape).astype(np.float32) for value in start]
    readout = paddle.to_tensor(generator.standard_normal((1, 5, 36)).astype(np.float32))

    def output() -> paddle.Tensor:
        return (model.hidden_states(paddle.to_tensor(INPUT_IDS[:1, :5])) * readout).sum()

    output().backward()
    slope = sum(
        float((parameter.grad.numpy() * direction).sum())
        for parameter, direction in zip(trainable, directions, strict=True)
    )
    moved = []
    for step in (1e-2, -1e-2):
        for parameter, value, direction in zip(trainable, start, directions, strict=True):
            parameter.set_value(value + step * direction)
        with paddle.no_grad():
            moved.append(float(output()))
    assert slope == pytest.approx((moved[0] - moved[1]) / 2e-2, rel=0.02)


def test_reft_without_prompt_lengths_uses_full_document():
    model = trained(layers="1")
    assert changed_positions(model, input_ids=paddle.to_tensor(INPUT_IDS)) == [[0, 1, 9, 10]] * 2
    packed = {"input_ids": paddle.to_tensor(INPUT_IDS[:1]), "document_lengths": [[6, 5]]}
    assert changed_positions(model, **packed) == [[0, 1, 4, 5, 6, 7, 9, 10]]


def test_reft_batch_prompts_end_at_last_answer():
    batch = collate([rows((5, 4), (3, 2, 4, 3)), rows((7, 2))], pad_to_length=24)
    # A row of L tokens takes L - 1 positions; the last position of a prompt predicts the answer's first token.
    assert batch.document_lengths == ((8, 11, 5), (8, 16))
    assert batch.prompt_lengths == ((5, 9, 0), (7, 0))
    only_targets = EncodedRow(np.arange(1, 6, dtype=np.int32), np.ones(5, bool), 0)
    assert collate([[only_targets]]).prompt_lengths == ((1,),)


def test_reft_packed_and_padded_rows_match_single_rows():
    model = trained()
    documents = rows((6, 3), (3, 2, 5, 4), (9, 2), (2, 3))
    batches = [collate([[row]]) for row in documents]
    packed, padded = collate([documents]), collate([[row] for row in documents], pad_to_length=16)
    losses = [float(loss_sum(model, batch)[0]) for batch in (packed, padded)]
    np.testing.assert_allclose(losses, sum(float(loss_sum(model, batch)[0]) for batch in batches), rtol=1e-6)
    with model.disable_adapter():
        assert abs(float(loss_sum(model, packed)[0]) - losses[0]) > 0.01


def test_compute_prompt_lengths_branches_count_from_the_start_of_their_parent():
    labels = np.array([[-100, -100, -100, 7, 8, 9, 5, -100, -100]])
    assert compute_prompt_lengths(labels, [[3, 2, 2, 2]], [[None, 0, 0, None]]) == ((4, 4, 4, 0),)


def test_reft_branches_without_prompt_lengths_raise():
    with pytest.raises(ValueError, match="document_parents needs prompt_lengths"):
        trained().hidden_states(
            paddle.to_tensor(INPUT_IDS[:1]), document_lengths=[[8, 3]], document_parents=[[None, 0]]
        )


def test_reft_wrong_prompt_lengths_raise():
    model, ids = trained(), paddle.to_tensor(INPUT_IDS)
    for wrong in ([[12], [3]], [[3]], [[3, 3], [3, 3]], [[-1], [2]]):
        with pytest.raises(ValueError, match="pass one prompt length per document"):
            model(ids, prompt_lengths=wrong)


# -- generation -------------------------------------------------------------------------------------------------------
def test_reft_generation_changes_prompt_positions_only():
    """Compare generation from left-padded prompts with forward passes over each growing row."""
    model = trained(10, position="f2+l3")
    prompts = [GENERATOR.integers(1, 61, length).tolist() for length in (3, 11, 6, 1)]
    together = model.generate(prompts, max_new_tokens=6, batch_size=4)
    for prompt, tokens in zip(prompts, together, strict=True):
        grown = list(prompt)
        for token in tokens:
            with paddle.no_grad():
                logits = model(paddle.to_tensor([grown]), prompt_lengths=[[len(prompt)]])[0, -1]
            assert int(logits.argmax()) == token
            grown.append(token)
    with model.disable_adapter():
        assert model.generate(prompts, max_new_tokens=6, batch_size=4) != together


# -- interventions ----------------------------------------------------------------------------------------------------
def test_orthonormal_columns_start_at_given_matrix_and_stay_orthonormal():
    start = random_orthonormal(GENERATOR.standard_normal((37, 6)))
    columns = OrthonormalColumns(start)
    np.testing.assert_allclose(columns.matrix().numpy(), start, atol=1e-6)
    for scale in (0.1, 1.0, 30.0):
        columns.reflectors.set_value((scale * GENERATOR.standard_normal((37, 6))).astype(np.float32))
        rotation = columns.matrix().numpy()
        np.testing.assert_allclose(rotation.T @ rotation, np.eye(6), atol=5e-6)
        assert np.abs(rotation - start).max() > 0.05
    square = OrthonormalColumns(random_orthonormal(GENERATOR.standard_normal((5, 5)))).matrix().numpy()
    np.testing.assert_allclose(square.T @ square, np.eye(5), atol=1e-6)


def test_reft_training_keeps_basis_orthonormal():
    model = trained(0)
    layers = [layer for _, layer in adapter_layers(model)]
    before = [layer.intervention.basis.matrix().numpy() for layer in layers]
    train(model, 30)
    for start, layer in zip(before, layers, strict=True):
        rotation = layer.intervention.basis.matrix().numpy()
        assert np.abs(rotation - start).max() > 0.02
        np.testing.assert_allclose(rotation.T @ rotation, np.eye(3), atol=2e-6)


@pytest.mark.parametrize("intervention_type", INTERVENTION_TYPES)
def test_reft_every_type_starts_as_base_and_trains(intervention_type: str, tmp_path: Path):
    model = get_peft_model(tiny_model(), ReFTConfig(rank=4, intervention_type=intervention_type))
    np.testing.assert_allclose(logits_of(model), logits_of(tiny_model()), atol=1e-5)
    before = float(loss_of(model))
    assert train(model, 40, until=0.8 * before) <= 0.8 * before
    model.save_pretrained(tmp_path)
    assert np.array_equal(logits_of(PeftModel.from_pretrained(tiny_model(), tmp_path)), logits_of(model))


@pytest.mark.parametrize("intervention_type", ["LoreftIntervention", "DireftIntervention", "NoreftIntervention"])
@pytest.mark.parametrize("act_fn", ["relu", "tanh"])
def test_reft_every_activation_trains(intervention_type: str, act_fn: str):
    model = get_peft_model(tiny_model(), ReFTConfig(rank=4, intervention_type=intervention_type, act_fn=act_fn))
    before = float(loss_of(model))
    assert train(model, 40, until=0.8 * before) <= 0.8 * before


def test_tiny_intervention_matches_formula():
    layer = next(layer for _, layer in adapter_layers(trained(intervention_type=TINY)))
    matrices = {name: tensor.numpy() for name, tensor in layer.intervention.named_parameters()}
    h = GENERATOR.standard_normal((5, 36)).astype(np.float32)
    expected = h + h @ matrices["param_A"] @ np.diag(matrices["param_a"]) @ matrices["param_B"] @ np.diag(
        matrices["param_b"]
    )
    np.testing.assert_allclose(layer.intervention(paddle.to_tensor(h)).numpy(), expected, atol=1e-5)
    assert np.abs(expected - h).max() > 1e-3


def test_reft_dropout_acts_in_training_only():
    model = trained(dropout=0.5)
    assert np.array_equal(logits_of(model), logits_of(model))
    model.train()
    assert np.abs(logits_of(model) - logits_of(model)).max() > 1e-3


def test_reft_recompute_keeps_positions_of_each_pass():
    """Run two forward passes before the backward pass of the first."""
    model = trained()
    model.base_model.enable_recompute()
    model.train()
    one, other = collate([rows((6, 3))]), collate([rows((2, 7))])
    gradients = []
    for between in (False, True):
        loss = loss_sum(model, one)[0]
        if between:
            loss_sum(model, other)
        loss.backward()
        gradients.append([p.grad.numpy().copy() for p in model.parameters() if p.grad is not None])
        for parameter in model.parameters():
            parameter.clear_gradient(set_to_zero=False)
    assert gradients[0]
    for single, interrupted in zip(*gradients, strict=True):
        assert np.array_equal(single, interrupted)


# -- errors and files -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"position": "7"}, "position='7' selects no positions"),
        ({"position": "f0+l0"}, "selects no positions"),
        ({"position": "f1+f2"}, "selects no positions"),
        ({"layers": "0-3"}, "layers='0-3' selects no layers"),
        ({"rank": 0}, "rank: 0 is out of range"),
        ({"dropout": 1.0}, "dropout: 1.0 is out of range"),
        ({"intervention_type": "TinyIntervantion"}, "did you mean 'TinyIntervention'"),
        ({"act_fn": "swish"}, 'act_fn: "swish" is not one of: linear'),
        ({"intervention_type": TINY, "act_fn": "relu"}, "neither activation nor bias"),
    ],
)
def test_reft_invalid_config_raises(fields: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        ReFTConfig(**fields)


def test_reft_layer_or_rank_beyond_model_raises():
    with pytest.raises(ValueError, match="layer 2 does not exist; this model has layers 0 to 1"):
        get_peft_model(tiny_model(), ReFTConfig(layers="0;2"))
    with pytest.raises(ValueError, match="rank=37 is out of range; allowed: at most the model's hidden size, 36"):
        get_peft_model(tiny_model(), ReFTConfig(rank=37))


def test_reft_documented_spelling_and_layer_list_are_accepted(capsys: pytest.CaptureFixture[str]):
    model = get_peft_model(tiny_model(), ReFTConfig(layers="1", intervention_type="LoReftIntervention"))
    assert model.peft_config.intervention_type == "LoreftIntervention"
    assert [name for name, _ in adapter_layers(model.base_model)] == ["model.layers.1"]
    model.print_trainable_parameters()
    assert "layers x1" in capsys.readouterr().out


def test_merge_files_reft_raises(tmp_path: Path):
    trained().save_pretrained(tmp_path / "reft")
    with pytest.raises(ValueError, match="REFT is not a change of weights and cannot be merged"):
        merge_adapter(tmp_path / "reft", tmp_path / "merged", lambda folder: tiny_model(), base="nowhere")
    assert not (tmp_path / "merged").exists()


def test_reft_paddlenlp_pickle_raises(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"representations": [], "position": "f7+l7"}')
    (tmp_path / "intkey_layer.0.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ValueError, match=r"pickled \(intkey_layer.0.bin\).*rejected"):
        PeftModel.from_pretrained(tiny_model(), tmp_path)
