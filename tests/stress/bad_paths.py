"""Give every program bad paths, inputs and outputs: each must end with a one-line error, never with a traceback.

    python -m tests.stress.bad_paths
    python -m tests.stress.bad_paths predictor.py

As root, the programs run as the user `nobody`, for whom file permissions apply.
"""

from __future__ import annotations

import argparse
import gzip
import importlib
import json
import logging
import os
import pkgutil
import random
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import paddle
import uvicorn

import paddlenlp_ext
from paddlenlp_ext.models.auto import AutoModelForCausalLM, AutoModelForSequenceClassification
from paddlenlp_ext.peft.methods.lokr import LoKrConfig
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.methods.reft import ReFTConfig
from paddlenlp_ext.peft.methods.vera import VeRAConfig
from paddlenlp_ext.peft.peft_model import get_peft_model
from paddlenlp_ext.utils.run_command import run_command
from tests.common.models import TINY_LLAMA
from tests.data.tiny_tokenizers import CHATML, make_tokenizer

NOBODY = 65534
PATIENCE_S = 60
ROWS = [{"src": "a b", "tgt": "c d"}, {"src": "b", "tgt": "a"}]
PAIRS = [{"prompt": "a b", "chosen": "b", "rejected": "c d"}, {"prompt": "b", "chosen": "a", "rejected": "d"}]
SHORT = {"src_length": "200", "max_length": "2", "batch_size": "2"}
TRAINING = {"max_steps": "1", "do_train": "true", "device": "cpu", "disable_tqdm": "true", "max_length": "64"}
ADAPTERS = {
    "adapter": LoRAConfig(rank=2),
    "vera": VeRAConfig(rank=4),
    "lokr": LoKrConfig(rank=2),
    "reft": ReFTConfig(rank=2),
}
Keys = Mapping[str, str]
"""Arguments of a program by name; that of the name "" has no name on the command line."""


def programs(folder: Path) -> dict[str, tuple[str, Keys]]:
    """Return the programs with valid arguments: name -> module, arguments; those with a slash are varied."""
    model, adapter, rows = f"{folder}/model", f"{folder}/adapter", f"{folder}/rows.jsonl"
    predict = {"model_name_or_path": model, "lora_path": adapter, "data_file": rows, **SHORT}
    train = {"model_name_or_path": model, "data_cache_dir": f"{folder}/own/cache", **TRAINING}
    sft = {**train, "dataset_name_or_path": f"{folder}/set", "output_dir": f"{folder}/own/out"}
    pairs = {**train, "train_dataset_path": f"{folder}/pairs.jsonl", "output_dir": f"{folder}/own/out"}
    pairs = {"max_seq_len" if key == "max_length" else key: value for key, value in pairs.items()}
    merged = {"model_name_or_path": model, "output_path": f"{folder}/own/merged"}
    evaluated = {"model_name_or_path": model, "output_dir": f"{folder}/own/scores", "max_length": "64"}
    return {
        "predictor.py": ("llm.predict.predictor", {**predict, "output_file": f"{folder}/own/out.json"}),
        "reft_predictor.py": (
            "llm.predict.reft_predictor",
            {"model_name_or_path": model, "reft_path": f"{folder}/reft", "data_file": rows}
            | {"output_file": f"{folder}/own/out.json", "src_length": "200", "max_length": "202"},
        ),
        "export_model.py": (
            "llm.predict.export_model",
            {"model_name_or_path": model, "lora_path": adapter, "output_path": f"{folder}/own/exported"},
        ),
        "export_gguf.py": (
            "llm.export_gguf",
            {"model_name_or_path": model, "lora_path": adapter, "output_file": f"{folder}/own/out.gguf"}
            | {"chat_template": f"{folder}/chat.jinja"},
        ),
        "run_quantization.py": (
            "llm.run_quantization",
            {"model_name_or_path": model, "dataset_name_or_path": f"{folder}/set", "output_dir": f"{folder}/own/packed"}
            | {"do_gptq": "true", "group_size": "16", "max_length": "64", "data_cache_dir": f"{folder}/own/cache"},
        ),
        "run_evaluation.py": (
            "llm.run_evaluation",
            {**evaluated, "lora_path": adapter, "task": "perplexity", "data_file": rows},
        ),
        "run_evaluation.py --tasks": ("llm.run_evaluation", {**evaluated, "tasks": f"{folder}/task.json"}),
        "serve": (
            "paddlenlp_ext.serve.__main__",
            {"model_name_or_path": model, "lora_path": adapter, "api_key_file": f"{folder}/question"}
            | {"chat_template": f"{folder}/chat.jinja", "port": "0"},
        ),
        "chat": (
            "llm.predict.predictor",
            {"model_name_or_path": model, "chat_template": f"{folder}/chat.jinja", **SHORT},
        ),
        "reward_predictor.py": (
            "llm.predict.reward_predictor",
            {"model_name_or_path": f"{folder}/reward", "data_file": f"{folder}/pairs.jsonl"}
            | {"output_file": f"{folder}/own/out.json", "chat_template": "none"},
        ),
        "merge_lora_params.py": ("llm.merge_lora_params", {**merged, "lora_path": adapter}),
        "merge_peft_params.py": ("llm.merge_peft_params", {**merged, "peft_path": adapter}),
        "merge_vera_params.py": ("llm.merge_vera_params", {**merged, "vera_path": f"{folder}/vera"}),
        "merge_lokr_params.py": ("llm.merge_lokr_params", {**merged, "lokr_path": f"{folder}/lokr"}),
        "copy": ("llm.merge_lora_params", merged),
        "merge_tp_and_pp_params.py": (
            "llm.merge_tp_and_pp_params",
            {**merged, "tp": "2", "pp": "1", "allow_pickle": "true"},
        ),
        "run_finetune.py --audit_only": ("llm.run_finetune", {**sft, "audit_only": "true"}),
        "run_finetune.py": ("llm.run_finetune", sft),
        "run_finetune.py FILE": ("llm.run_finetune", {"": f"{folder}/run.json", "output_dir": f"{folder}/own/out"}),
        "finetune_generation.py": ("llm.finetune_generation", sft),
        "run_dpo.py": ("llm.run_dpo", pairs),
        "run_reward.py": ("llm.run_reward", pairs | {"chat_template": "none"}),
    }


def bad_paths(folder: Path, good: str) -> dict[str, str]:
    """Return bad values for a path argument."""
    end = ".gguf" if good.endswith(".gguf") else ""  # without it, the path is not looked at
    return {
        "missing": f"{folder}/missing/x{end}",
        "long name": f"{folder}/{'x' * 300}{end}",
        "long path": f"{folder}/{'x/' * 3000}y{end}",
        "NUL": f"{good.removesuffix(end)}\0x{end}",
        "surrogate": f"{folder}/\udcff{end}",
        "empty": "",
        "below a file": f"{folder}/rows.jsonl/x{end}",
        "file": f"{folder}/rows.jsonl",
        "binary file": f"{folder}/binary.jsonl",
        "broken gzip": f"{folder}/broken.jsonl.gz",
        "folder": f"{folder}/set",
        "empty folder": f"{folder}/empty",
        "unreadable file": f"{folder}/unreadable.jsonl",
        "closed folder": f"{folder}/closed/x{end}",
        "unreadable model": f"{folder}/unreadable",
        "read-only folder": f"{folder}/read-only/x{end}",
        "loop of links": f"{folder}/loop",
        "full device": "/dev/full",
        "home of nobody": "~nobody-at-all/x",
        "pipe": f"{folder}/pipe",
    }


def streams(folder: Path) -> dict[str, tuple[str | None, str | None]]:
    """Return paths for standard input and output; None: closed."""
    return {
        "closed stdin": (None, f"{folder}/own/stdout"),
        "undecodable stdin": (f"{folder}/binary.jsonl", f"{folder}/own/stdout"),
        "closed stdout": (f"{folder}/question", None),
        "full stdout": (f"{folder}/question", "/dev/full"),
    }


def write_inputs(folder: Path) -> None:
    """Write models, an adapter and data, and paths that cannot be used."""
    tokenizer = make_tokenizer(bos="<s>", eos="<|im_end|>")
    tokenizer.chat_template = CHATML
    config = {**TINY_LLAMA, "vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder / "model")
    AutoModelForSequenceClassification.from_pretrained(folder / "model").save_pretrained(folder / "reward")
    for name, method in ADAPTERS.items():
        adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(folder / "model"), method)
        for parameter in adapted.parameters():
            if not parameter.stop_gradient:
                parameter.set_value(paddle.full_like(parameter, 0.1))
        adapted.save_pretrained(folder / name)
    for name in ("model", "reward"):
        tokenizer.save_pretrained(folder / name)
    for name in ("set", "empty", "own", "closed", "read-only", "unreadable"):
        (folder / name).mkdir()
    for name, rows in (("rows", ROWS), ("pairs", PAIRS), ("set/train", ROWS), ("set/dev", ROWS), ("unreadable", ROWS)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "unreadable/config.json").write_text("{}")
    (folder / "unreadable/adapter_config.json").write_text("{}")
    (folder / "binary.jsonl").write_bytes(b'{"src": "\xff\xfe"}\n' + random.Random(1).randbytes(4096))
    (folder / "broken.jsonl.gz").write_bytes(gzip.compress(json.dumps(ROWS[0]).encode())[:-9])
    (folder / "chat.jinja").write_text(CHATML)
    (folder / "task.json").write_text(json.dumps({"task": "perplexity", "data_file": f"{folder}/rows.jsonl"}))
    run = {"model_name_or_path": f"{folder}/model", "dataset_name_or_path": f"{folder}/set", "device": "cpu"}
    (folder / "run.json").write_text(json.dumps({**run, "do_train": True, "max_steps": 1, "max_length": 64}))
    (folder / "question").write_text("a b\n")
    (folder / "loop").symlink_to("loop")
    os.mkfifo(folder / "pipe")
    for name, mode in (
        ("unreadable.jsonl", 0),
        ("unreadable/config.json", 0),
        ("unreadable/adapter_config.json", 0),
        ("closed", 0),
        ("read-only", 0o555),
        ("own", 0o777),
        (".", 0o755),
    ):
        (folder / name).chmod(mode)


def attempts(folder: Path, keys: Keys) -> Iterator[tuple[str, Keys, tuple[str | None, str | None]]]:
    """Yield each attempt with its name: arguments, standard input and output."""
    usual = (f"{folder}/question", f"{folder}/own/stdout")
    if "tp" not in keys:  # the model has no shards
        yield "valid", keys, usual
    for name, pair in streams(folder).items():
        yield name, keys, pair
    for key, good in keys.items():
        if "/" in good:
            for name, bad in bad_paths(folder, good).items():
                yield f"{key}: {name}", {**keys, key: bad}, usual


def end_of(module: str, keys: Keys, folder: Path, source: str | None, output: str | None) -> tuple[int, str]:
    """Run a program in a forked process; return its exit code and standard error."""
    log = folder / "stderr"
    child = os.fork()
    if child == 0:
        code = 70
        try:
            signal.alarm(PATIENCE_S)
            _connect(2, str(log), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            _connect(1, output, os.O_WRONLY | os.O_CREAT)
            _connect(0, source, os.O_RDONLY)
            sys.stdin, sys.stdout = source and os.fdopen(0), output and os.fdopen(1, "w")  # type: ignore[assignment]
            sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace")
            for handler in logging.getLogger("paddlenlp_ext").handlers:
                handler.stream = sys.stderr  # type: ignore[attr-defined]
            if os.geteuid() == 0:
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            os.environ.update(HOME=f"{folder}/own", XDG_CACHE_HOME=f"{folder}/own/cache", PADDLENLP_EXT_NATIVE="0")
            os.chdir(folder / "own")
            argv = [word for key in keys for word in (f"--{key}", keys[key]) if word != "--"]
            run_command(importlib.import_module(module).main, argv)
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), log.read_text(errors="replace")


def _connect(descriptor: int, path: str | None, flags: int) -> None:
    """Open a file as a standard stream, or close the stream."""
    os.close(descriptor)
    if path is not None:
        opened = os.open(path, flags, 0o666)
        os.dup2(opened, descriptor)
        if opened != descriptor:
            os.close(opened)


def main() -> int:
    """Run all attempts, and print those that ended in another way than success or one line of error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="*", help="names of programs, by default all")
    chosen = parser.parse_args().programs
    failed = False
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        folder = Path(name)
        write_inputs(folder)
        import_everything()
        uvicorn.Server.run = lambda *_, **__: None  # type: ignore[method-assign] (a server that started is a success)
        for program, (module, keys) in programs(folder).items():
            if chosen and program not in chosen:
                continue
            ends = Counter[str]()
            for attempt, arguments, (source, output) in attempts(folder, keys):
                clear(folder / "own")
                code, text = end_of(module, arguments, folder, source, output)
                errors = [line for line in text.splitlines() if line.startswith("error: ")]
                is_refused = code == 2 and len(errors) == 1 and "Traceback" not in text
                is_expected = code == 0 if attempt == "valid" else code in (0, 128 + signal.SIGPIPE) or is_refused
                ends["refused" if is_refused else f"exit code {code}"] += 1
                if not is_expected:
                    failed = True
                    print(
                        f"{program}: {attempt}: exit code {code}\n    " + "\n    ".join(text.splitlines()[-6:]),
                        flush=True,
                    )
            print(f"{program}: {dict(ends)}", flush=True)
    return int(failed)


def import_everything() -> None:
    """Import all modules before the change of the user, who may be unable to read Python's files."""
    for module in pkgutil.walk_packages(paddlenlp_ext.__path__, "paddlenlp_ext."):
        if "triton" not in module.name:
            importlib.import_module(module.name)
    assert all(
        map(importlib.import_module, ("concurrent.futures.process", "multiprocessing.popen_fork", "matplotlib.pyplot"))
    )


def clear(folder: Path) -> None:
    """Remove everything in a folder except its cache."""
    for path in folder.iterdir():
        if path.is_dir() and path.name != "cache":
            shutil.rmtree(path)
        elif not path.is_dir():
            path.unlink()


if __name__ == "__main__":
    sys.exit(main())
