"""Test predictor.py from command line to output files, with a tiny model and a byte tokenizer."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from paddlenlp_ext.checkpoint.tokenizer import AutoTokenizer
from paddlenlp_ext.cli import predict
from paddlenlp_ext.cli.predict_arguments import parse_arguments
from paddlenlp_ext.data.prediction_prompts import Prompt, encode_truncated_prompt
from paddlenlp_ext.data.rows.conversation import Conversation
from paddlenlp_ext.data.templates.load import load_template
from paddlenlp_ext.generation.sampling import TokenChooser
from paddlenlp_ext.inference import device_and_dtype
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.peft_model import get_peft_model
from tests.common.models import TINY_LLAMA
from tests.common.scripts import LLM, load_script

SCRIPT = LLM / "predict" / "predictor.py"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
asking = Conversation.asking
ROWS = [
    {"src": "What is two and two?", "tgt": "4"},
    {"src": ["Name a colour.", "Another one."], "tgt": ["Red"]},
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hällo"}]},
]
LENGTHS = ["--src_length", "150", "--max_length", "8", "--decode_strategy", "greedy_search"]


predictor = load_script(SCRIPT)


def save_tokenizer(folder: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.chat_template = CHATML
    fast.save_pretrained(str(folder))


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    changes = {"vocab_size": 258, "initializer_range": 0.3, "tie_word_embeddings": False, "eos_token_id": 257}
    AutoModelForCausalLM.from_config({**TINY_LLAMA, **changes}).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory) -> Path:
    """Save a LoRA adapter that changes the answers."""
    folder = tmp_path_factory.mktemp("adapter")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoRAConfig(rank=4))
    rng = np.random.default_rng(0)
    for parameter in model.parameters():
        if not parameter.stop_gradient:
            parameter.set_value(rng.normal(0, 0.5, parameter.shape).astype(np.float32))
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def data_file(tmp_path) -> Path:
    path = tmp_path / "data.json"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    return path


def answers(model_path: Path, data_file: Path, *words: str) -> list[dict[str, object]]:
    output = data_file.with_name("output.json")
    files = ["--data_file", str(data_file), "--output_file", str(output)]
    predictor.main(["--model_name_or_path", str(model_path), *files, *LENGTHS, *words])
    return [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("words", [["--batch_size", "3"], ["--lora_path", "{adapter}"], ["{drafts}"]])
def test_predictor_with_schema_or_regex_restricts_answers(base, adapter, data_file, words):
    pytest.importorskip("llguidance")
    drafts = ["--speculate_method", "inference_with_reference", "--speculate_max_draft_token_num", "3"]
    words = drafts if words == ["{drafts}"] else [word.format(adapter=adapter) for word in words]
    schema = data_file.with_name("schema.json")
    schema.write_text(json.dumps({"enum": ["ja", "nein"]}))
    lines = answers(base, data_file, "--json_schema", str(schema), *words)
    assert {line["output"] for line in lines} <= {'"ja"', '"nein"'}
    lines = answers(base, data_file, "--regex", "[0-9]{2}:[0-9]{2}", *words)
    assert all(re.fullmatch("[0-9]{2}:[0-9]{2}", str(line["output"])) for line in lines)


def test_predictor_chat_with_regex_restricts_answers(base, monkeypatch, capsys):
    pytest.importorskip("llguidance")
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    predictor.main(["--model_name_or_path", str(base), *LENGTHS, "--regex", "(yes|no)!"])
    assert capsys.readouterr().out in ("yes!\n", "no!\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--regex", "(a"], r"--regex \(a: .*unclosed group"), (["--json_schema", "none.json"], "no such file")],
)
def test_predictor_with_invalid_format_raises_before_model_is_loaded(base, data_file, monkeypatch, words, message):
    pytest.importorskip("llguidance")
    monkeypatch.delattr("paddlenlp_ext.cli.predict.load_predictor")
    with pytest.raises(ValueError, match=message):
        answers(base, data_file, *words)


def test_predictor_answers_equal_generate(base, data_file):
    lines = answers(base, data_file, "--batch_size", "2")
    assert [line["src"] for line in lines] == ["What is two and two?", ["Name a colour.", "Another one."], "Hällo"]
    assert [line["tgt"] for line in lines] == ["4", ["Red", ""], ""]
    tokenizer, model = AutoTokenizer.from_pretrained(base), AutoModelForCausalLM.from_pretrained(base)
    template = load_template(None, tokenizer)
    conversations = [
        (ROWS[0]["src"], (), None),
        ("Another one.", [("Name a colour.", "Red")], None),
        ("Hällo", (), "Be brief."),
    ]
    prompts = [template.encode_prompt(Conversation.asking(*conversation)) for conversation in conversations]
    expected = model.generate(prompts, max_new_tokens=8, eos_token_id=257)
    assert [line["output"] for line in lines] == [tokenizer.decode(e, skip_special_tokens=True) for e in expected]


def test_predictor_ends_at_eos_tokens_of_model(base, data_file, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(base)
    prompt = load_template(None, AutoTokenizer.from_pretrained(base)).encode_prompt(Conversation.asking(ROWS[0]["src"]))
    tokens = model.generate([prompt], max_new_tokens=8, eos_token_id=None)[0]
    model.add_eos_token_ids([tokens[3]])
    model.save_pretrained(tmp_path / "ends")
    save_tokenizer(tmp_path / "ends")
    full_answer, shortened = answers(base, data_file)[0]["output"], answers(tmp_path / "ends", data_file)[0]["output"]
    assert len(shortened) < len(full_answer) and full_answer.startswith(shortened)


def test_predictor_adapter_with_base_or_alone_answers_alike(base, adapter, data_file):
    plain = answers(base, data_file)
    adapted = answers(base, data_file, "--lora_path", str(adapter))
    assert [line["output"] for line in adapted] != [line["output"] for line in plain]
    assert answers(adapter, data_file) == adapted


def test_predictor_system_prompt_is_that_of_rows_without_one(base, data_file, tmp_path):
    own = answers(base, data_file)
    given = answers(base, data_file, "--system", "Be brief.")
    assert given[2] == own[2] and given[0] != own[0]
    row = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": ROWS[0]["src"]}]}
    data_file.write_text(json.dumps(row))
    assert answers(base, data_file)[0]["output"] == given[0]["output"]


def test_predictor_interrupted_run_with_other_model_is_refused_before_loading(base, data_file, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TokenChooser, "choose", interrupted)
        with pytest.raises(KeyboardInterrupt):
            answers(base, data_file)
    draft = data_file.with_name(".output.json.incomplete")
    draft.write_text('{"src": "What is two and two?", "tgt": "4", "output": "kept"}\n')
    with pytest.raises(ValueError, match=r"other inputs \(max_new_tokens\)"):
        monkeypatch.setattr(predict, "load_predictor", None)
        answers(base, data_file, "--max_length", "9")
    with pytest.raises(ValueError, match=r"other inputs \(data_file, template or src_length\)"):
        written = data_file.read_text()
        data_file.write_text(written.replace('"tgt": "4"', '"tgt": "5"'))
        answers(base, data_file)
    data_file.write_text(written)
    monkeypatch.undo()
    assert answers(base, data_file)[0]["output"] == "kept"


def test_predictor_expands_home_in_paths(base, adapter, data_file, monkeypatch):
    monkeypatch.setenv("HOME", str(data_file.parent))
    (data_file.parent / "adapter").symlink_to(adapter)
    paths = ["--data_file", "~/data.json", "--lora_path", "~/adapter", "--output_file", "~/answers/output.json"]
    predictor.main(["--model_name_or_path", str(base), *paths, *LENGTHS])
    assert len((data_file.parent / "answers" / "output.json").read_text(encoding="utf-8").splitlines()) == len(ROWS)


def test_predictor_adapter_without_base_uses_run_config(base, adapter, data_file, tmp_path):
    orphan = tmp_path / "orphan"
    orphan.mkdir()
    fields = json.loads((adapter / "adapter_config.json").read_text())
    (orphan / "adapter_config.json").write_text(json.dumps({**fields, "base_model_name_or_path": None}))
    (orphan / "adapter_model.safetensors").write_bytes((adapter / "adapter_model.safetensors").read_bytes())
    with pytest.raises(ValueError, match="does not name its base model; pass --model_name_or_path BASE --lora_path"):
        answers(orphan, data_file)
    (orphan / "run_config.json").write_text(json.dumps({"model_name_or_path": str(base)}))
    save_tokenizer(orphan)
    assert answers(orphan, data_file) == answers(base, data_file, "--lora_path", str(adapter))
    with pytest.raises(ValueError, match="is an adapter, and --lora_path names another adapter"):
        answers(orphan, data_file, "--lora_path", str(adapter))


def test_predictor_folder_with_model_and_adapter_needs_the_adapters_argument(base, adapter, data_file, tmp_path):
    both = tmp_path / "both"
    shutil.copytree(base, both)
    for file in adapter.glob("adapter*"):
        shutil.copy(file, both)
    with pytest.raises(ValueError, match=r"both contains a model and an adapter; add --lora_path .*both"):
        answers(both, data_file)
    assert answers(both, data_file, "--lora_path", str(both)) == answers(adapter, data_file)


def test_predictor_missing_base_names_the_adapter(base, adapter, data_file, tmp_path):
    lost = tmp_path / "lost"
    shutil.copytree(adapter, lost)
    fields = json.loads((adapter / "adapter_config.json").read_text())
    (lost / "adapter_config.json").write_text(json.dumps({**fields, "base_model_name_or_path": "absent"}))
    with pytest.raises(
        ValueError, match=r"lost names its base model as 'absent'.*--model_name_or_path BASE --lora_path .*lost"
    ):
        answers(lost, data_file)
    assert answers(base, data_file, "--lora_path", str(lost)) == answers(adapter, data_file)


def trained_with(base: Path, folder: Path, settings: dict[str, object]) -> Path:
    """Copy the model and add the run_config.json of a training run."""
    shutil.copytree(base, folder)
    (folder / "run_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize("settings", [{"chat_template": "none"}, {"autoregressive": True, "chat_template": None}])
def test_predictor_uses_template_of_training(base, data_file, tmp_path, caplog, monkeypatch, settings):
    monkeypatch.setattr(predict.logger, "handlers", [caplog.handler])
    monkeypatch.setattr(predict.logger, "propagate", False)
    model = trained_with(base, tmp_path / "run", settings)
    assert answers(model, data_file) == answers(base, data_file, "--chat_template", "none") != answers(base, data_file)
    assert any(f"none, as in training ({next(iter(settings))} in {model}" in r.getMessage() for r in caplog.records)


def test_predictor_prefers_run_of_adapter_to_run_of_model(base, adapter, data_file, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text(CHATML.replace("\n", ":"))
    model = trained_with(base, tmp_path / "run", {"chat_template": "none"})
    tuned = trained_with(adapter, tmp_path / "tuned", {"chat_template": str(template)})
    words = ("--lora_path", str(tuned))
    assert answers(model, data_file, *words) == answers(base, data_file, *words, "--chat_template", str(template))
    template.unlink()
    with pytest.raises(
        ValueError, match=r"run_config\.json: the chat_template of the training run, .*jinja, no longer exists"
    ):
        answers(model, data_file, *words)
    answers(model, data_file, *words, "--chat_template", "none")


def test_predictor_truncates_long_prompts_and_counts_them(base, data_file, caplog, monkeypatch):
    monkeypatch.setattr(predict.logger, "handlers", [caplog.handler])
    monkeypatch.setattr(predict.logger, "propagate", False)
    lines = answers(base, data_file, "--src_length", "60")
    assert any("prompts were truncated to --src_length 60" in record.getMessage() for record in caplog.records)
    template = load_template(None, AutoTokenizer.from_pretrained(base))
    assert (
        len(template.encode_prompt(Conversation.asking(ROWS[0]["src"])))
        <= 60
        < len(template.encode_prompt(Conversation.asking("x" * 60)))
    )
    assert len(lines) == len(ROWS)
    ids, was_truncated = encode_truncated_prompt(
        template, Prompt(Conversation.asking("x" * 60, [("y", "z")]), None), 60
    )
    assert len(ids) == 60 and was_truncated


def test_predictor_without_data_file_chats(base, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\nAnd you?\n/exit\n"))
    predictor.main(["--model_name_or_path", str(base), *LENGTHS, "--chat_template", "none"])
    tokenizer, model = AutoTokenizer.from_pretrained(base), AutoModelForCausalLM.from_pretrained(base)
    template, written, history = load_template("none", tokenizer), "", []
    for question in ("Hi", "And you?"):
        prompt = template.encode_prompt(Conversation.asking(question, history))
        tokens = model.generate([prompt], max_new_tokens=8, eos_token_id=257)[0]
        answer = tokenizer.decode(tokens, skip_special_tokens=True)
        written += answer + "\n"
        history.append((question, answer))
    assert capsys.readouterr().out == written


def test_predictor_chat_names_a_truncated_conversation(base, monkeypatch, caplog):
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{'x' * 15}\n{'x' * 15}\n"))
    monkeypatch.setattr(predict.logger, "handlers", [caplog.handler])
    monkeypatch.setattr(predict.logger, "propagate", False)
    words = ["--src_length", "20", "--max_length", "2", "--chat_template", "none"]
    predictor.main(["--model_name_or_path", str(base), *words])
    truncated = [record for record in caplog.records if "exceed --src_length" in record.getMessage()]
    assert len(truncated) == 1, "the first message fits, and not with its answer"


@pytest.mark.parametrize(("reason", "dtype"), [(None, "bfloat16"), ("no AVX-512", "float32")])
def test_predictor_gpu_and_float16_without_a_gpu_run_on_the_cpu(base, data_file, caplog, monkeypatch, reason, dtype):
    monkeypatch.setattr(device_and_dtype.bf16, "unavailable_reason", lambda: reason)
    monkeypatch.setattr(predict.logger.parent, "propagate", True)
    loaded = []

    def note(model, *_, **__):
        loaded.append(next(iter(model.parameters())).dtype)

    monkeypatch.setattr(predict, "predict_file", note)
    files = ["--model_name_or_path", str(base), "--data_file", str(data_file)]
    predictor.main([*files, *LENGTHS, "--device", "gpu", "--dtype", "float16"])
    assert [str(value) for value in loaded] == [f"paddle.{dtype}"]
    assert "--device gpu: no GPU is available; running on the CPU" in caplog.text
    assert f"--dtype float16 is not available on the CPU; using {dtype}" in caplog.text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--src_length", "250"], "make 258 tokens, more than the model's context of 256"),
        (["--device", "tpu"], "device 'tpu' is not available"),
        (["--lora_path", "absent-folder"], "absent-folder: no adapter here"),
        (["--data_file", "absent.json"], "'absent.json' is not a file"),
        (["--output_file", "ROWS"], "is the data file itself"),
        (["--output_file", "FOLDER"], "is a directory"),
        (["--output_file", "ROWS/output.json"], "data.json is not a directory"),
    ],
)
def test_predictor_invalid_argument_raises(base, data_file, words, message):
    named = [word.replace("ROWS", str(data_file)).replace("FOLDER", str(data_file.parent)) for word in words]
    with pytest.raises(ValueError, match=message):
        answers(base, data_file, *named)
    assert data_file.read_text(encoding="utf-8").startswith(json.dumps(ROWS[0]))


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        ({"rope_type": "linear", "factor": 4.0}, 1024),
        ({"type": "dynamic", "factor": 2.0}, 512),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 256),
    ],
)
def test_check_context_includes_rope_scaling(base, scaling, longest):
    config = {**json.loads((base / "config.json").read_text()), "rope_scaling": scaling}
    files = ["--model_name_or_path", str(base), "--max_length", "6", "--src_length"]
    predict.check_context(parse_arguments([*files, str(longest - 6)]), config)
    with pytest.raises(ValueError, match=f"the model's context of {longest} "):
        predict.check_context(parse_arguments([*files, str(longest - 5)]), config)


@pytest.mark.parametrize(
    ("words", "context", "lengths"),
    [
        ([], 512, (256, 256)),
        (["--max_length", "100"], 512, (412, 100)),
        (["--src_length", "500"], 512, (500, 12)),
        (["--src_length", "600"], 512, (600, 1024)),  # an error of check_context
        (["--src_length", "1024", "--max_length", "1024"], 512, (1024, 1024)),
        ([], 2048, (1024, 1024)),
        ([], None, (1024, 1024)),
    ],
)
def test_fit_context_lowers_only_defaults(words, context, lengths):
    fitted = parse_arguments(["--model_name_or_path", "model", *words]).fit_context(context)
    assert (fitted.src_length, fitted.max_length) == lengths


def test_predictor_with_a_short_context_needs_no_lengths(base, monkeypatch, caplog):
    monkeypatch.setattr(predict, "chat", lambda model, encode, decode, **options: chosen.append(options))
    chosen: list[dict[str, int]] = []
    with caplog.at_level("INFO"):
        predict.predict(parse_arguments(["--model_name_or_path", str(base), "--decode_strategy", "greedy_search"]))
    assert chosen[0]["max_new_tokens"] == 128
    assert "src_length and max_length set to 128, because the context has 256 tokens" in caplog.text


def test_predictor_command_mistake_exits_with_2():
    command = [sys.executable, str(SCRIPT), "--model_name_or_path", "m", "--topk", "5"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert (
        done.stderr
        == "error: 1 problem in the arguments:\n  1. command line: --topk: unknown key 'topk'; did you mean 'top_k'?\n"
    )


def test_predictor_command_help_lists_arguments():
    done = subprocess.run([sys.executable, str(SCRIPT), "--help"], capture_output=True, text=True, check=True)
    assert "--repetition_penalty" in done.stdout and "inference_model" not in done.stdout
