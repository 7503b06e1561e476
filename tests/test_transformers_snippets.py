"""Snippets from the documentation of transformers as programs of this package, with only the import lines changed.

Models on a hub are replaced by local folders, `torch` by `paddle`, and PyTorch's tensors by NumPy arrays.
"""

from __future__ import annotations

import copy
import pickle
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
        ({}, "set exactly one of load_in_4bit and load_in_8bit"),
        ({"load_in_4bit": True, "load_in_8bit": True}, "set exactly one of load_in_4bit and load_in_8bit"),
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


# -- https://huggingface.co/docs/transformers/models#loading-models --------------------------------------------------
@pytest.mark.parametrize("device_map", ["auto", "cpu", None, {"": "cpu"}])
def test_model_loaded_with_dtype_and_device_map_reports_both(model_id: str, device_map):
    from paddlenlp_ext import AutoModelForCausalLM, LoraConfig, get_peft_model

    AutoModelForCausalLM.from_pretrained(model_id, dtype="bfloat16").save_pretrained("stored-in-bfloat16")
    model = AutoModelForCausalLM.from_pretrained("stored-in-bfloat16", dtype="auto", device_map=device_map)
    for each in (model, get_peft_model(model, LoraConfig())):
        assert each.dtype == paddle.bfloat16 and each.device.is_cpu_place()


@pytest.mark.parametrize("device_map", ["cuda", "balanced", 0, {"model.layers.0": "cpu", "lm_head": "disk"}])
def test_device_map_that_cannot_be_obeyed_is_refused(model_id: str, device_map):
    from paddlenlp_ext import AutoModelForCausalLM

    with pytest.raises(ValueError, match=r"device_map=.*: models are loaded on Paddle's current device, which is cpu"):
        AutoModelForCausalLM.from_pretrained(model_id, device_map=device_map)


def test_config_to_dict_builds_the_same_model(model_id: str):
    from paddlenlp_ext import AutoModelForCausalLM

    config = AutoModelForCausalLM.from_pretrained(model_id).config
    copied = config.to_dict()
    rebuilt = AutoModelForCausalLM.from_config(copied).config
    assert rebuilt.source == config.source == copied and rebuilt.num_hidden_layers == config.num_hidden_layers
    copied.clear()
    assert config.to_dict()["model_type"] == config.model_type


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
    with pytest.raises(ValueError, match="gradient_checkpointing_kwargs: offload is not supported"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"offload": True})


# -- https://huggingface.co/docs/transformers/llm_tutorial -------------------------------------------------------------
TEXTS = ["red apple blue", "green"]


@pytest.mark.parametrize("return_tensors", ["np", "pd", None])
@pytest.mark.parametrize("padding", ["left", "right", False])
def test_batch_decode_of_generate_continues_the_texts(model_id: str, return_tensors: str | None, padding):
    from paddlenlp_ext import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_id)
    texts = TEXTS if padding or return_tensors is None else TEXTS[:1]
    tokenizer.padding_side = padding or "left"
    model = AutoModelForCausalLM.from_pretrained(model_id, device_map="auto")
    model_inputs = tokenizer(texts, return_tensors=return_tensors, padding=bool(padding))
    generated_ids = model.generate(**model_inputs, max_new_tokens=5, eos_token_id=[])
    answers = model.generate([tokenizer(text).input_ids for text in texts], max_new_tokens=5, eos_token_id=[])
    expected = [tokenizer.decode([*tokenizer(text).input_ids, *new]) for text, new in zip(texts, answers, strict=True)]
    found = tokenizer.batch_decode(generated_ids)
    without_padding = [text.replace(tokenizer.pad_token, " ").split() for text in found]
    assert without_padding == [text.split() for text in expected]
    assert tokenizer.decode(generated_ids[0]) == found[0]


def test_generate_takes_the_ids_of_a_single_text(model_id: str):
    from paddlenlp_ext import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(model_id), AutoModelForCausalLM.from_pretrained(model_id)
    one = model.generate(**tokenizer(TEXTS[0]), max_new_tokens=3)
    batch = model.generate(**tokenizer(TEXTS[:1], return_tensors="np"), max_new_tokens=3)
    assert one.tolist() == batch.tolist()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_tokenizer_for_paddle_tensors_is_copied_and_saved_under_its_name(model_id: str, copied):
    from transformers import AutoTokenizer as TransformersTokenizer

    from paddlenlp_ext import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_id)
    again = copied(tokenizer)
    ids = again(TEXTS, padding=True, return_tensors="pd")["input_ids"]
    assert isinstance(ids, paddle.Tensor) and ids.shape[0] == 2
    again.save_pretrained("copied")
    loaded = TransformersTokenizer.from_pretrained("copied")
    assert type(loaded).__name__ == type(tokenizer).__name__ and loaded(TEXTS) == tokenizer(TEXTS)


# -- https://huggingface.co/docs/transformers/generation_strategies, main_classes/text_generation ----------------------
def test_generation_config_gives_the_options_of_generate(model_id: str):
    from transformers import GenerationConfig

    from paddlenlp_ext import AutoModelForCausalLM

    model, ids = AutoModelForCausalLM.from_pretrained(model_id), np.array(PADDED["input_ids"][:1])
    options = {"max_new_tokens": 6, "do_sample": True, "temperature": 2.0, "top_k": 7}
    expected = model.generate(ids, **options).tolist()
    generation_config = GenerationConfig(**options)
    assert model.generate(ids, generation_config=generation_config).tolist() == expected
    assert model.generate(ids, generation_config=generation_config, max_new_tokens=2).shape == [1, 7]
    assert model.generate(ids, max_length=8, eos_token_id=[]).shape == [1, 8]
    assert model.generate(ids, eos_token_id=[]).shape == [1, 25]  # 20 new tokens, as in transformers
    model.generation_config = generation_config
    assert model.generation_config.top_k == 7 and model.generate(ids).tolist() == expected
    model.generation_config.do_sample = False
    assert model.generate(ids).tolist() == model.generate(ids, do_sample=False, max_new_tokens=6).tolist()
    model.save_pretrained("with-config")
    assert AutoModelForCausalLM.from_pretrained("with-config").generation_config.temperature == 2.0


def test_num_return_sequences_samples_each_row_several_times(model_id: str):
    from paddlenlp_ext import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_id)
    batch = {name: np.array(values) for name, values in PADDED.items()}
    options = {"do_sample": True, "temperature": 9.0, "max_new_tokens": 8, "eos_token_id": []}
    sequences = model.generate(**batch, num_return_sequences=3, **options).numpy()
    assert sequences.shape == (6, 13)
    np.testing.assert_array_equal(sequences[:, :5], np.repeat(batch["input_ids"], 3, axis=0))
    assert len({tuple(row) for row in sequences}) == 6
    with pytest.raises(ValueError, match="num_return_sequences=2: pass 1, or a larger number together with"):
        model.generate(**batch, num_return_sequences=2, max_new_tokens=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_p": 0.1}, "generate: min_p=0.1 is not available"),
        ({"generation_config": {"no_repeat_ngram_size": 2}}, "generation_config: no_repeat_ngram_size=2 is not avail"),
        ({"max_length": 5}, "max_length 5 counts the prompt, whose length is 5"),
        ({"do_sample": True, "num_beams": 2}, "do_sample=True with num_beams=2 is not available"),
    ],
)
def test_generate_refuses_options_of_transformers_that_it_lacks(model_id: str, options: dict, message: str):
    from paddlenlp_ext import AutoModelForCausalLM

    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(model_id).generate(np.array([[5, 10, 4, 10, 5]]), **options)


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
