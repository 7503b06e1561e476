"""Run the commands that the documents print, with another model, other paths and lengths, and processes without GPUs.

The documents' commands run in PaddleNLP's folder `llm/`, with its `config/` and the user's `data/`. Here that folder is
temporary. Its configuration files are those of the repository with a tiny model and two optimizer steps, in float32
where matmuls in bfloat16 are not available on the CPU.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import paddle
import pytest

from paddlenlp_ext import AutoModelForCausalLM
from paddlenlp_ext.checkpoint.open_weights import open_weights
from paddlenlp_ext.ops.cpp import bf16
from tests.common.models import write_tiny_data, write_tiny_model
from tests.common.scripts import LLM, load_script, script_environment

SCRIPTS = ("run_finetune.py", "finetune_generation.py", "predict/predictor.py", "predict/reft_predictor.py")
MERGES = ("merge_lora_params.py", "merge_vera_params.py", "merge_lokr_params.py")
SHORT_RUN = {
    "model_name_or_path": "./base_model",
    "max_steps": 2,
    "max_length": 64,
    "src_length": 32,
    "gradient_accumulation_steps": 1,
    "warmup_ratio": 0.0,
    "save_strategy": "no",
    "evaluation_strategy": "no",
    "load_best_model_at_end": False,
    "data_cache_dir": "./cache",
    **({} if bf16.unavailable_reason() is None else {"bf16": False, "fp16_opt_level": "O1"}),
}
TRAINING = (
    "python run_finetune.py ./config/llama/lora_argument.json",
    "python run_finetune.py ./config/llama/qlora_argument.json",
    "python run_finetune.py ./config/llama/pt_argument.json",
    "python run_finetune.py ./config/llama/vera_argument.json",
    "python run_finetune.py ./config/llama/lokr_argument.json",
    "python run_finetune.py ./config/llama/reft_argument.json",
)
"""Commands for one device, in the order of the documents."""
MERGING = (
    "python merge_lora_params.py --model_name_or_path ./base_model --lora_path ./checkpoints/lora_ckpts "
    '--output_path ./checkpoints/lora_merge --device "gpu" --safe_serialization True',
    "python merge_vera_params.py --model_name_or_path ./base_model --vera_path ./checkpoints/vera_ckpts "
    '--merge_vera_model_path ./checkpoints/vera_merge --device "gpu" --safe_serialization True',
    "python merge_lokr_params.py --model_name_or_path ./base_model --lokr_path ./checkpoints/lokr_ckpts "
    '--merge_lokr_model_path ./checkpoints/lokr_merge --device "gpu" --safe_serialization True',
)
REFT_PREDICTION = (
    "python ./predict/reft_predictor.py --model_name_or_path ./base_model --reft_path ./checkpoints/lokr_ckpts "
    '--output_file output.json --batch_size 1 --data_file "./data/dev.json" --max_length 4096'
)
LAUNCH = "python -u -m paddle.distributed.launch"
LAUNCHED = (
    f'{LAUNCH} --gpus "0,1,2,3,4,5,6,7" run_finetune.py ./config/llama/sft_argument.json',
    f'{LAUNCH} --gpus "0,1,2,3" finetune_generation.py '
    "--config ./config/llama/sft_argument.json --lora ./config/llama/lora_argument.json",
    f'{LAUNCH} --gpus "0,1,2,3" finetune_generation.py '
    "--config ./config/llama/sft_argument.json --q_lora ./config/llama/lora_argument.json",
    *(
        f'{LAUNCH} --gpus "0,1,2,3,4,5,6,7" run_finetune.py ./config/llama/{name}_argument.json'
        for name in ("lora", "qlora", "pt", "vera", "lokr", "reft")
    ),
)


NUM_GPUS = paddle.device.cuda.device_count() if paddle.is_compiled_with_cuda() else 0


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> Path:
    """Return a folder like PaddleNLP's llm/, with a model in base_model/ and rows in data/."""
    folder = tmp_path_factory.mktemp("llm")
    (folder / "predict").mkdir()
    for script in (*SCRIPTS, *MERGES):
        (folder / script).symlink_to(LLM / script)
    (folder / "config" / "llama").mkdir(parents=True)
    for path in (LLM / "config" / "llama").glob("*.json"):
        keys = json.loads(path.read_text())
        if "train_dataset_path" in keys or "do_ptq" in keys or "do_gptq" in keys:
            continue  # preference training and quantization, which other commands run
        assert keys["dataset_name_or_path"] == "./data"
        (folder / "config" / "llama" / path.name).write_text(json.dumps({**keys, **SHORT_RUN}))
    write_tiny_model(folder / "base_model")
    write_tiny_data(folder / "data")
    return folder


def run_here(command: str) -> None:
    """Run a command without a launcher in this process."""
    python, script, *arguments = shlex.split(command)
    assert python == "python"
    load_script(LLM / script).main(arguments)


@pytest.fixture(scope="module")
def trained(llm: Path) -> Path:
    """Return the folder after every training command for one device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(llm)
        for command in TRAINING:
            run_here(command)
    return llm


@pytest.mark.parametrize("method", ["lora", "qlora", "pt", "vera", "lokr", "reft"])
def test_documented_training_command_writes_an_adapter(trained, method):
    folder = trained / "checkpoints" / f"llama_{method}_ckpts"
    source = open_weights(folder / "adapter_model.safetensors")
    assert any(np.abs(source.read(name)).max() > 0 for name in source.names())
    assert json.loads((folder / "run_config.json").read_text())["max_steps"] == 2


@pytest.mark.parametrize("command", MERGING, ids=["lora", "vera", "lokr"])
def test_documented_merge_command_changes_weights(trained, command, monkeypatch):
    monkeypatch.chdir(trained)
    method = command.split("merge_")[1].split("_")[0]
    named, written = Path(f"checkpoints/{method}_ckpts"), Path(f"checkpoints/{method}_merge")
    shutil.copytree(f"checkpoints/llama_{method}_ckpts", named)
    run_here(command)
    base, merged = open_weights(Path("base_model")), open_weights(written)
    assert any(np.abs(base.read(name) - merged.read(name)).max() > 0 for name in base.names())


def test_documented_reft_prediction_writes_an_answer_per_row(trained, monkeypatch):
    monkeypatch.chdir(trained)
    # The document prints the folder of another method, and a length that exceeds the tiny model's context.
    command = REFT_PREDICTION.replace("lokr_ckpts", "llama_reft_ckpts").replace("4096", "64") + " --src_length 32"
    run_here(command)
    rows = Path("data/dev.json").read_text(encoding="utf-8").splitlines()
    answers = [json.loads(line) for line in Path("output.json").read_text(encoding="utf-8").splitlines()]
    assert [answer["src"] for answer in answers] == [json.loads(row)["src"] for row in rows]


def test_documented_loading_of_a_model_with_flash_attention_works(llm):
    model_name_or_path, dtype = str(llm / "base_model"), "float32"
    model = AutoModelForCausalLM.from_pretrained(model_name_or_path, dtype=dtype, use_flash_attention=True)
    assert model.generate([[5, 6, 7]], max_new_tokens=2)


@pytest.mark.parametrize("switch", ["--lora", "--q_lora"])
def test_documented_generation_command_trains_lora(llm, switch, monkeypatch):
    monkeypatch.chdir(llm)
    files = f"--config ./config/llama/sft_argument.json {switch} ./config/llama/lora_argument.json"
    output = f"./checkpoints/generation{switch}"
    run_here(f"python finetune_generation.py {files} --output_dir {output}")
    config = json.loads((llm / output / "run_config.json").read_text())
    assert config["lora"] is True
    assert config.get("weight_quantize_algo") == (None if switch == "--lora" else "nf4")


all_launched = pytest.mark.parametrize(
    "command", LAUNCHED, ids=lambda command: "-".join(Path(word).stem for word in command.split()[6:])
)


@pytest.mark.layouts
@all_launched
def test_documented_launch_command_trains_on_two_processes(llm, command, tmp_path):
    words = shlex.split(command)
    # Paddle's launcher refuses --gpus on a machine without GPUs; docs/parallel.md has this replacement.
    at = words.index("--gpus")
    words[at : at + 2] = ["--nproc_per_node", "2", "--backend", "gloo"]
    launch(llm, [*words, "--device", "cpu"], tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(NUM_GPUS < 2, reason="needs two GPUs")
@all_launched
def test_documented_launch_command_trains_on_gpus(llm, command, tmp_path):
    words = shlex.split(command)
    words[words.index("--gpus") + 1] = ",".join(map(str, range(min(NUM_GPUS, 8))))
    launch(llm, words, tmp_path)


def launch(llm: Path, words: list[str], tmp_path: Path) -> None:
    """Run a launch command with an output folder, and check that it writes weights."""
    at = words.index("paddle.distributed.launch") + 1
    words = [*words[:at], "--log_dir", str(tmp_path / "log"), *words[at:], "--output_dir", str(tmp_path / "out")]
    result = subprocess.run(
        [sys.executable, *words[1:]],
        cwd=llm,
        env=script_environment(OMP_NUM_THREADS="1", HOME=os.environ.get("HOME", "")),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert list((tmp_path / "out").glob("*.safetensors"))
