"""Prefixes and prompts of Hugging Face PEFT give the same numbers here (golden/make_prefix_prompt_golden.py)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from safetensors import safe_open

from paddlenlp_ext.models.config import DecoderConfig
from paddlenlp_ext.models.decoder import CausalLM
from paddlenlp_ext.ops.linear_cross_entropy import linear_cross_entropy
from paddlenlp_ext.peft.base import PeftModel, get_peft_model
from paddlenlp_ext.peft.prefix import PrefixConfig
from paddlenlp_ext.train.optim import build_optimizer

GOLDEN = Path(__file__).parents[1] / "golden"
sys.path.insert(0, str(GOLDEN))
from model_cases import CASES as MODELS  # noqa: E402
from model_cases import make_inputs, make_weight  # noqa: E402
from prefix_prompt_cases import CASES, EPSILON, LEARNING_RATE, STEPS, WEIGHT_DECAY  # noqa: E402

TOLERANCE = 1e-5


def base_model(case: str) -> CausalLM:
    base = CASES[case]["base"]
    model = CausalLM(DecoderConfig.from_dict(MODELS[base]))
    for name, parameter in model.named_parameters():
        parameter.set_value(make_weight(base, name, tuple(parameter.shape)))
    return model


def golden_of(case: str) -> dict[str, np.ndarray]:
    return dict(np.load(GOLDEN / "adapters" / case / "golden.npz"))


def own_tensors(case: str, golden: dict[str, np.ndarray], kind: str) -> dict[str, np.ndarray]:
    """PEFT's tensors (`start`, `gradient`, `trained`) under the names and in the shapes that they have here."""
    theirs = {name.removeprefix(f"{kind}:"): value for name, value in golden.items() if name.startswith(f"{kind}:")}
    config, embedding = DecoderConfig.from_dict(MODELS[CASES[case]["base"]]), theirs["embedding.weight"]
    layers = [f"model.layers.{index}.self_attn" for index in range(config.num_hidden_layers)]
    if CASES[case]["method"] == "prompt":
        return {"model.embed_tokens.prompt_embeddings": embedding}
    if "transform.0.weight" not in theirs:
        parts = np.split(embedding, len(layers), axis=1)
        shape = (len(embedding), 2, config.num_key_value_heads, config.head_dim)
        return {f"{layer}.prefix": part.reshape(shape) for layer, part in zip(layers, parts, strict=True)}
    weights = np.split(theirs["transform.2.weight"], len(layers))
    biases = np.split(theirs["transform.2.bias"], len(layers))
    return {
        "prefix_encoder.embedding": embedding,
        "prefix_encoder.weight": theirs["transform.0.weight"],
        "prefix_encoder.bias": theirs["transform.0.bias"],
        **{f"{layer}.prefix_weight": part for layer, part in zip(layers, weights, strict=True)},
        **{f"{layer}.prefix_bias": part for layer, part in zip(layers, biases, strict=True)},
    }


def learning_model(case: str, golden: dict[str, np.ndarray]) -> PeftModel:
    """With a projection where PEFT had one: its file has the result alone."""
    options = CASES[case]["options"]
    if "prefix_projection" not in options:
        return PeftModel.from_pretrained(base_model(case), GOLDEN / "adapters" / case)
    config = PrefixConfig(
        num_tokens=options["num_virtual_tokens"],
        projection=True,
        projection_hidden_size=options["encoder_hidden_size"],
    )
    model = get_peft_model(base_model(case), config)
    model.load_tensors(own_tensors(case, golden, "start"), case)
    return model


def loss_of(model: PeftModel, case: str) -> paddle.Tensor:
    input_ids, labels = (paddle.to_tensor(array) for array in make_inputs(CASES[case]["base"]))
    hidden = model.hidden_states(input_ids).flatten(0, 1)
    return linear_cross_entropy(hidden, model.head_weight(), labels.flatten())[0] / int((labels != -100).sum())


def close(ours: paddle.Tensor, golden: np.ndarray) -> None:
    np.testing.assert_allclose(ours.numpy(), golden, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("case", CASES)
def test_a_folder_of_peft_has_pefts_logits(case: str):
    model = PeftModel.from_pretrained(base_model(case), GOLDEN / "adapters" / case)
    close(model(paddle.to_tensor(make_inputs(CASES[case]["base"])[0])), golden_of(case)["logits"])


@pytest.mark.parametrize("case", CASES)
def test_gradients(case: str):
    golden = golden_of(case)
    model = learning_model(case, golden)
    loss = loss_of(model, case)
    np.testing.assert_allclose(float(loss), golden["loss"], rtol=1e-6)
    loss.backward()
    wanted = own_tensors(case, golden, "gradient")
    state = model.adapter_state()
    assert state.keys() == wanted.keys()
    for name, tensor in state.items():
        close(tensor.grad, wanted[name])


@pytest.mark.parametrize("case", CASES)
def test_values_after_some_steps_of_adamw(case: str):
    golden = golden_of(case)
    model = learning_model(case, golden).train()
    options = SimpleNamespace(
        optim="adamw",
        learning_rate=LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        adam_beta1=0.9,
        adam_beta2=0.999,
        adam_epsilon=EPSILON,
    )
    optimizer = build_optimizer(model, options)
    for _ in range(STEPS):
        loss_of(model, case).backward()
        optimizer.step()
        optimizer.clear_grad()
    wanted = own_tensors(case, golden, "trained")
    for name, tensor in model.adapter_state().items():
        close(tensor, wanted[name])


@pytest.mark.parametrize("case", CASES)
def test_saved_again_it_reads_as_pefts_own(case: str, tmp_path: Path):
    """Same key, same bytes; a projection's learned parts beside it, and no field that PEFT does not write."""
    theirs, golden = GOLDEN / "adapters" / case, golden_of(case)
    model = learning_model(case, golden)
    model.save_pretrained(tmp_path)
    with (
        safe_open(theirs / "adapter_model.safetensors", "np") as wanted,
        safe_open(tmp_path / "adapter_model.safetensors", "np") as written,
    ):
        assert list(wanted.keys()) == ["prompt_embeddings"]
        tolerance = TOLERANCE if "prefix_projection" in CASES[case]["options"] else 0
        np.testing.assert_allclose(
            written.get_tensor("prompt_embeddings"), wanted.get_tensor("prompt_embeddings"), rtol=0, atol=tolerance
        )
    ours = json.loads((tmp_path / "adapter_config.json").read_text())
    config = json.loads((theirs / "adapter_config.json").read_text())
    for field in ours:
        assert ours[field] == config[field], field
