"""Export command export_gguf.py: the written model with and without an adapter, the Modelfile, and errors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import ModuleType

import numpy as np
import paddle
import pytest

from paddlenlp_ext.checkpoint.gguf.gguf_file import open_gguf
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.peft.layers import adapter_layers
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.peft_model import PeftModel, get_peft_model
from paddlenlp_ext.utils.locks import run_lock
from paddlenlp_ext.utils.run_command import run_command
from tests.checkpoint.gguf.llama_cpp_files import make_model, write_model
from tests.common.processes import another_process
from tests.common.scripts import LLM, load_script

IDS = np.random.default_rng(0).integers(0, 96, (2, 12))


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script(LLM / "export_gguf.py")


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return write_model(make_model("llama"), "llama", tmp_path_factory.mktemp("base") / "base.gguf")


@pytest.fixture(scope="module")
def adapter(base: Path) -> Path:
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(str(base)), LoRAConfig(rank=3, rslora=True))
    paddle.seed(0)
    for _, layer in adapter_layers(model):
        layer.lora_B.weight.set_value(0.1 * paddle.randn(layer.lora_B.weight.shape))
    model.save_pretrained(base.parent / "adapter")
    return base.parent / "adapter"


def run(script: ModuleType, *arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        run_command(script.main, [str(argument) for argument in arguments])
        raise SystemExit(0)
    return ended.value.code


@paddle.no_grad()
def logits(model) -> np.ndarray:
    model.eval()
    return model(paddle.to_tensor(IDS)).numpy()


def test_export_gguf_merges_the_adapter_and_writes_a_modelfile(script, base, adapter, tmp_path, capsys):
    out = tmp_path / "new" / "out.gguf"
    arguments = ("--model_name_or_path", base, "--lora_path", adapter, "--output_file", out, "--device", "cpu")
    assert run(script, *arguments, "--outtype", "f32") == 0
    assert f"{out}: 74 tensors in f32, 1 MB, read back and compared" in capsys.readouterr().out
    assert {path.name for path in out.parent.iterdir()} == {"out.gguf", "out.Modelfile"}
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(str(base)), str(adapter))
    expected, found = logits(adapted), logits(AutoModelForCausalLM.from_pretrained(str(out)))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    assert np.abs(expected - logits(AutoModelForCausalLM.from_pretrained(str(base)))).max() > 0.1
    assert open_gguf(out).metadata["general.name"] == "adapter"
    assert (out.parent / "out.Modelfile").read_text().endswith('\nPARAMETER stop "$"\n')


def test_export_gguf_writes_the_given_chat_template(script, base, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '$' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    out = tmp_path / "out.gguf"
    assert run(script, "--model_name_or_path", base, "--output_file", out, "--chat_template", template) == 0
    assert open_gguf(out).metadata["tokenizer.chat_template"] == template.read_text()
    assert '{{ "user:" }}{{ end }}{{ else }}{{ "$user:" }}' in (tmp_path / "out.Modelfile").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--output_file", "out.bin"), "output_file out.bin: must end in .gguf"),
        (("--output_file", "BASE"), "base.gguf exists; choose another name, or pass --overwrite true"),
        (("--output_file", "BASE", "--overwrite", "true"), "this file is the model to export"),
        (("--output_file", "a.gguf", "--outtype", "q4_k"), '"q4_k" is not one of: f32, f16, bf16, q8_0, q4_0, q4_1'),
        (("--output_file", "BASE/a.gguf"), "base.gguf is not a directory; choose another path"),
    ],
)
def test_export_gguf_invalid_argument_is_a_one_line_error(script, base, arguments, message, capsys, tmp_path):
    words = [word.replace("BASE", str(base)) for word in arguments]
    assert run(script, "--model_name_or_path", base, *words) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_export_gguf_replaces_no_modelfile_and_writes_into_no_active_run(script, base, tmp_path, capsys):
    out, arguments = tmp_path / "out.gguf", ("--model_name_or_path", base, "--output_file", tmp_path / "out.gguf")
    (tmp_path / "out.Modelfile").write_text("mine")
    assert run(script, *arguments) == 2
    assert f"output_file {out}: {tmp_path}/out.Modelfile exists; choose another name" in capsys.readouterr().err
    with another_process(run_lock(tmp_path)):
        assert run(script, *arguments, "--overwrite", "true") == 2
    assert f"{tmp_path}: in use by a run" in capsys.readouterr().err
    assert (tmp_path / "out.Modelfile").read_text() == "mine" and not out.exists()


def test_export_gguf_does_not_replace_the_base_that_an_adapter_names(script, base, adapter, capsys):
    before = base.read_bytes()
    assert run(script, "--model_name_or_path", adapter, "--output_file", base, "--overwrite", "true") == 2
    assert "this file is the model to export" in capsys.readouterr().err
    assert base.read_bytes() == before


def test_export_gguf_adapter_only_over_a_base_with_another_config_raises(script, base, adapter, tmp_path, capsys):
    shutil.copytree(adapter, tmp_path / "adapter")
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "base_config_overrides": {"rope_theta": 5e5}}))
    arguments = ("--model_name_or_path", base, "--lora_path", tmp_path / "adapter", "--adapter_only", "true")
    assert run(script, *arguments, "--output_file", tmp_path / "a.gguf") == 2
    assert "changes rope_theta in the config of its base model" in capsys.readouterr().err


def test_export_gguf_on_a_full_disk_names_the_file_and_leaves_nothing(script, base, tmp_path, capsys, monkeypatch):
    from paddlenlp_ext.models import gguf_export

    def fail(path: Path, *rest: object) -> None:
        path.write_bytes(b"begun")
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(gguf_export, "write_gguf", fail)
    out = tmp_path / "out.gguf"
    assert run(script, "--model_name_or_path", base, "--output_file", out) == 2
    assert f"{out}: no space is left on the device; free some space" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_export_gguf_adapter_only_writes_the_adapter(script, base, adapter, tmp_path, capsys):
    out = tmp_path / "adapter.gguf"
    arguments = ("--model_name_or_path", base, "--lora_path", adapter, "--output_file", out, "--adapter_only", "true")
    assert run(script, *arguments) == 0
    assert f"{out}: adapter of 56 matrices" in capsys.readouterr().out
    assert open_gguf(out).metadata["general.type"] == "adapter" and len(open_gguf(out).tensors) == 112
    assert run(script, *arguments, "--overwrite", "true", "--outtype", "q8_0") == 2
    assert "an adapter is written in f32, not q8_0" in capsys.readouterr().err
    assert run(script, *arguments[:2], "--output_file", tmp_path / "b.gguf", "--adapter_only", "true") == 2
    assert "adapter_only: pass --lora_path ADAPTER" in capsys.readouterr().err
