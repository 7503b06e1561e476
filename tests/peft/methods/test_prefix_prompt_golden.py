"""Compare prefix tuning, prompt tuning and p-tuning with Hugging Face PEFT.

The golden files are written by tests/golden/generators/make_prefix_prompt_golden.py.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from paddlenlp_ext.models.decoder_config import DecoderConfig
from paddlenlp_ext.peft.methods.p_tuning import PTuningConfig
from paddlenlp_ext.peft.methods.prefix_tuning import PrefixTuningConfig
from paddlenlp_ext.peft.peft_model import PeftModel, get_peft_model
from tests.golden import DATA
from tests.golden.cases.prefix_prompt_cases import CASES, EPSILON, LEARNING_RATE, STEPS, WEIGHT_DECAY
from tests.peft.methods import golden_checks as shared


def own_tensors(case: str, golden: dict[str, np.ndarray], kind: str) -> dict[str, np.ndarray]:
    """Return PEFT's tensors (`start`, `gradient`, `trained`) with this package's names and shapes."""
    theirs = shared.part_of(golden, kind)
    config, embedding = DecoderConfig.from_dict(shared.MODELS[CASES[case]["base"]]), theirs["embedding.weight"]
    layers = [f"model.layers.{index}.self_attn" for index in range(config.num_hidden_layers)]
    if CASES[case]["method"] == "p_tuning":
        own = {name.replace("_head", "").replace(".", "_"): value for name, value in theirs.items()}
        own["embedding"] = own.pop("embedding_weight")
        return {f"model.embed_tokens.prompt_encoder.{name}": value for name, value in own.items()}
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


def has_network(case: str) -> bool:
    """Return whether a network computes the prefix or prompt."""
    return CASES[case]["method"] == "p_tuning" or "prefix_projection" in CASES[case]["options"]


def trainable_model(case: str, golden: dict[str, np.ndarray]) -> PeftModel:
    """Build the model of a case, with its network, which PEFT's files do not contain."""
    options = CASES[case]["options"]
    if not has_network(case):
        return PeftModel.from_pretrained(shared.base_model(CASES[case]["base"]), DATA / "adapters" / case)
    if CASES[case]["method"] == "p_tuning":
        config = PTuningConfig(**options)
    else:
        config = PrefixTuningConfig(
            num_tokens=options["num_virtual_tokens"],
            projection=True,
            projection_hidden_size=options["encoder_hidden_size"],
        )
    model = get_peft_model(shared.base_model(CASES[case]["base"]), config)
    model.load_tensors(own_tensors(case, golden, "start"), case)
    return model


@pytest.mark.parametrize("case", CASES)
def test_prefix_prompt_peft_folder_gives_peft_logits(case: str):
    base, folder = CASES[case]["base"], DATA / "adapters" / case
    model = PeftModel.from_pretrained(shared.base_model(base), folder)
    shared.close(model(shared.ids_of(base)), shared.golden_of(folder)["logits"])


@pytest.mark.parametrize("case", CASES)
def test_prefix_prompt_gradients_equal_peft(case: str):
    golden = shared.golden_of(DATA / "adapters" / case)
    model = trainable_model(case, golden)
    shared.check_loss_and_backward(model, CASES[case]["base"], golden)
    shared.check_gradients(model.adapter_state(), own_tensors(case, golden, "gradient"))


@pytest.mark.parametrize("case", CASES)
def test_prefix_prompt_adamw_steps_give_peft_values(case: str):
    golden = shared.golden_of(DATA / "adapters" / case)
    model = trainable_model(case, golden).train()
    optimizer = shared.adamw(model, LEARNING_RATE, WEIGHT_DECAY, EPSILON)
    shared.take_steps(optimizer, STEPS, lambda: shared.loss_of(model, CASES[case]["base"]))
    shared.check_tensors(model.adapter_state(), own_tensors(case, golden, "trained"))


@pytest.mark.parametrize("case", CASES)
def test_prefix_prompt_peft_adapter_round_trips(case: str, tmp_path: Path):
    """Compare the prompt embeddings and the fields of the config with PEFT's files."""
    theirs = DATA / "adapters" / case
    trainable_model(case, shared.golden_of(theirs)).save_pretrained(tmp_path)
    with (
        safe_open(theirs / "adapter_model.safetensors", "np") as expected,
        safe_open(tmp_path / "adapter_model.safetensors", "np") as written,
    ):
        assert list(expected.keys()) == ["prompt_embeddings"]
        tolerance = shared.TOLERANCE if has_network(case) else 0
        np.testing.assert_allclose(
            written.get_tensor("prompt_embeddings"), expected.get_tensor("prompt_embeddings"), rtol=0, atol=tolerance
        )
    shared.check_config_fields(tmp_path, theirs, but=())
