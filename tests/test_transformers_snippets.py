"""Snippets from the documentation of transformers as programs of this package, with only the import lines changed.

Models on a hub are replaced by local folders, `torch` by `paddle`, and PyTorch's tensors by NumPy arrays.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

PADDED = {"input_ids": [[5, 10, 4, 10, 5], [6, 11, 4, 0, 0]], "attention_mask": [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]}


@pytest.fixture
def model_id(run_folders: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a model folder in the working directory."""
    monkeypatch.chdir(run_folders)
    return "model"


def loss_and_gradients(model: paddle.nn.Layer) -> tuple[float, dict[str, np.ndarray]]:
    """Return the loss of a padded batch, and its gradients by parameter."""
    model.train()
    batch = {name: paddle.to_tensor(values) for name, values in PADDED.items()}
    loss = model(**batch, labels=batch["input_ids"]).loss
    loss.backward()
    gradients = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
    model.clear_gradients()
    return float(loss), gradients


# -- https://huggingface.co/docs/transformers/quantization/bitsandbytes ------------------------------------------------
@pytest.mark.parametrize("dtype", ["auto", "bfloat16", paddle.bfloat16, paddle.float32])
def test_torch_dtype_is_the_dtype_of_the_parameters(model_id: str, dtype):
    from paddlenlp_ext import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(model_id, torch_dtype="bfloat16").save_pretrained("stored-in-bfloat16")
    model = AutoModelForCausalLM.from_pretrained("stored-in-bfloat16", torch_dtype=dtype)
    assert model.dtype_name == ("float32" if dtype is paddle.float32 else "bfloat16")
    assert AutoModelForCausalLM.from_pretrained("stored-in-bfloat16").dtype_name == "float32"


def test_nf4_config_loads_the_same_model_as_the_options_of_this_package(model_id: str):
    from paddlenlp_ext import AutoModelForCausalLM, BitsAndBytesConfig, QuantizationConfig

    nf4_config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=paddle.bfloat16,
    )
    model_nf4 = AutoModelForCausalLM.from_pretrained(model_id, quantization_config=nf4_config)
    assert model_nf4.dtype_name == "bfloat16"
    expected = AutoModelForCausalLM.from_pretrained(
        model_id, dtype="bfloat16", quantization_config=QuantizationConfig(algo="nf4", double_quant=True)
    )
    assert model_nf4.quantization == expected.quantization
    ids = paddle.to_tensor(PADDED["input_ids"])
    np.testing.assert_array_equal(model_nf4(ids).astype("float32").numpy(), expected(ids).astype("float32").numpy())


def test_load_in_8bit_leaves_skipped_modules_in_full_precision(model_id: str):
    from paddlenlp_ext import AutoModelForCausalLM, BitsAndBytesConfig
    from paddlenlp_ext.quantization.quantize_model import quantized_layers

    config = BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=["lm_head", "o_proj", "layers.1"])
    model_8bit = AutoModelForCausalLM.from_pretrained(model_id, torch_dtype="auto", quantization_config=config)
    names = ("q_proj", "k_proj", "v_proj")
    expected = {f"model.layers.0.self_attn.{name}" for name in names}
    expected |= {f"model.layers.0.mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")}
    assert quantized_layers(model_8bit).keys() == expected
    assert {layer.algo for layer in quantized_layers(model_8bit).values()} == {"weight_only_int8"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "set one of load_in_4bit and load_in_8bit"),
        ({"load_in_4bit": True, "load_in_8bit": True}, "set one of load_in_4bit and load_in_8bit"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "int4"}, "bnb_4bit_quant_type='int4'.* nf4 or fp4"),
        ({"load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage='bfloat16'"),
        ({"load_in_8bit": True, "llm_int8_threshold": 10.0}, "llm_int8_threshold=10.0.* activations are not quantized"),
        ({"load_in_8bit": True, "llm_int8_enable_fp32_cpu_offload": True}, "llm_int8_enable_fp32_cpu_offload=True"),
    ],
)
def test_bits_and_bytes_config_refuses_what_has_no_meaning_here(arguments: dict, message: str):
    from paddlenlp_ext import BitsAndBytesConfig

    with pytest.raises(ValueError, match=message):
        BitsAndBytesConfig(**arguments)


def test_compute_dtype_that_is_not_the_dtype_of_the_parameters_is_an_error(model_id: str):
    from paddlenlp_ext import AutoModelForCausalLM, BitsAndBytesConfig

    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype="bfloat16")
    with pytest.raises(ValueError, match=r"torch_dtype=float32, bnb_4bit_compute_dtype=bfloat16: .* one dtype"):
        AutoModelForCausalLM.from_pretrained(model_id, torch_dtype="float32", quantization_config=config)


# -- https://huggingface.co/docs/transformers/grad_checkpointing -------------------------------------------------------
@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing_kwargs": {"use_reentrant": False}}])
@pytest.mark.parametrize("with_adapter", [False, True])
def test_gradient_checkpointing_keeps_loss_and_gradients(model_id: str, options: dict, with_adapter: bool):
    from paddlenlp_ext import AutoModelForCausalLM, LoraConfig, get_peft_model

    model = AutoModelForCausalLM.from_pretrained(model_id)
    if with_adapter:
        model = get_peft_model(model, LoraConfig(r=4))
    expected_loss, expected = loss_and_gradients(model)
    model.gradient_checkpointing_enable(**options)
    assert model.is_gradient_checkpointing and model.model.recompute_plan is not None
    loss, gradients = loss_and_gradients(model)
    assert loss == expected_loss and gradients.keys() == expected.keys() != set()
    for name, gradient in gradients.items():
        np.testing.assert_allclose(gradient, expected[name], rtol=1e-5, atol=1e-7)
    model.gradient_checkpointing_disable()
    assert not model.is_gradient_checkpointing and model.model.recompute_plan is None
    with pytest.raises(ValueError, match="gradient_checkpointing_kwargs: offload is not known"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"offload": True})


# -- https://huggingface.co/docs/transformers/internal/generation_utils#transformers.TextStreamer ----------------------
@pytest.mark.parametrize("skip_prompt", [False, True])
def test_text_streamer_prints_prompt_and_answer(model_id: str, capsys: pytest.CaptureFixture[str], skip_prompt: bool):
    from transformers import TextStreamer

    from paddlenlp_ext import AutoModelForCausalLM, AutoTokenizer

    tok = AutoTokenizer.from_pretrained(model_id)
    model = AutoModelForCausalLM.from_pretrained(model_id)
    inputs = tok(["red apple blue"], return_tensors="np")
    streamer = TextStreamer(tok, skip_prompt=skip_prompt)
    capsys.readouterr()
    tokens = model.generate(**inputs, streamer=streamer, max_new_tokens=8)
    printed = capsys.readouterr().out
    start = inputs["input_ids"].shape[1] if skip_prompt else 0
    assert tokens.shape[1] > inputs["input_ids"].shape[1]
    assert printed == tok.decode(tokens[0].numpy()[start:]) + "\n"


def test_streamer_and_on_token_receive_the_new_tokens(model_id: str):
    from paddlenlp_ext import AutoModelForCausalLM

    class Recorder:
        def __init__(self):
            self.values, self.ended = [], 0

        def put(self, value):
            self.values.append(value.tolist())

        def end(self):
            self.ended += 1

    model, streamer, tokens = AutoModelForCausalLM.from_pretrained(model_id), Recorder(), []
    options: dict[str, Any] = {"max_new_tokens": 4, "eos_token_id": None, "decode_strategy": "sampling"}
    options["on_token"] = lambda row, token: tokens.append(token)
    (answer,) = model.generate([[5, 10]], streamer=streamer, **options)
    assert streamer.values == [[[5, 10]], *([token] for token in answer)] and streamer.ended == 1
    assert tokens == answer and len(answer) == 4
    with pytest.raises(ValueError, match="a streamer needs a single prompt, not 2"):
        model.generate([[5], [6]], streamer=streamer, max_new_tokens=1)
    with pytest.raises(ValueError, match="beam search cannot stream"):
        model.generate([[5]], streamer=streamer, max_new_tokens=1, decode_strategy="beam_search", num_beams=2)
