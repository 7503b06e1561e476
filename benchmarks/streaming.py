"""Streams of generated rows: memory over time, exact resume, fractions of a mixture, and speed of tokenization.

    python -m benchmarks.streaming FOLDER --megabytes 5000 --workers 2 [--only plain gz resume mix tokenize audit]
        [--answer_words 90 --model smollm2-135m-instruct]

FOLDER receives the data, which later runs reuse: the given size as plain JSON lines, as much text in .gz, and three
small datasets. The parts are

    plain, gz   one epoch of the file, through lazy, packing and the sampler: resident memory of this process and of its
                workers after every tenth of the file, and tokens per second
    resume      steps read with and without a stop and a change of the number of workers: the rows must be equal
    mix         fractions of three datasets in rows and tokens after 100,000 rows (fewer rows if the data are small)
    tokenize    tokens per second of tokenization into the cache, on one core and on two cores
    audit       rows and tokens per second of the data audit, and resident memory of the main process
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import itertools
import json
import multiprocessing
import os
import resource
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from paddlenlp_ext import configure_runtime
from paddlenlp_ext.data.tokenization.row_encoder import RowEncoder

configure_runtime()  # before Paddle is imported

from benchmarks.measure import report
from paddlenlp_ext.checkpoint.tokenizer import load_tokenizer
from paddlenlp_ext.config.sections.data import DataConfig
from paddlenlp_ext.data.audit.audit_splits import AuditedSplit, audit_splits
from paddlenlp_ext.data.dataset import load_dataset
from paddlenlp_ext.data.readers.dataset_files import open_splits
from paddlenlp_ext.data.step_batch import StepBatch
from paddlenlp_ext.data.streaming.shuffle_buffer import TokenStream
from paddlenlp_ext.data.streaming.step_order import StreamOrder
from paddlenlp_ext.data.templates.load import load_template
from paddlenlp_ext.data.training_rows import load_rows

MB = 1_000_000
WORDS = [a + b + c + d for a in "bdfklmnprst" for b in "aeio" for c in "dlnrst" for d in ("", "e", "ing")]
LENGTH = 4096
WEIGHTS = (0.6, 0.3, 0.1)


def main() -> None:
    """Write the data and run the parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--megabytes", type=int, default=50, help="size of the large dataset, uncompressed")
    parser.add_argument("--workers", type=int, default=1, help="dataloader_num_workers")
    parser.add_argument("--answer_words", type=int, default=90, help="median number of words of an answer in new data")
    parser.add_argument(
        "--model",
        default="smollm2-135m-instruct",
        help="model whose tokenizer is used; words: one token per word",
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    options = parser.parse_args()
    write_data(options.folder, options.megabytes, options.answer_words)
    if options.model == "words":
        options.model = write_word_tokenizer(options.folder / "tokenizer")
    tokenizer = load_tokenizer(options.model)
    found = {part: PARTS[part](options, tokenizer) for part in options.only}
    report("streaming", {"megabytes": options.megabytes, "workers": options.workers, **found}, "paddlepaddle")


def write_word_tokenizer(folder: Path) -> str:
    """Write a tokenizer whose tokens are the words of the data; return its folder."""
    vocabulary = {word: index for index, word in enumerate(["<unk>", "<eos>", *WORDS])}
    words = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = WhitespaceSplit()
    special = {"unk_token": "<unk>", "eos_token": "<eos>", "pad_token": "<eos>"}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(str(folder))
    return str(folder)


def write_data(folder: Path, megabytes: int, answer_words: int) -> None:
    """Write the datasets that do not exist yet."""
    sizes = {f"plain-{megabytes}": megabytes, f"gz-{megabytes}": megabytes, **dict.fromkeys("abc", 5)}
    for seed, (name, size) in enumerate(sizes.items()):
        path = folder / name / ("train.jsonl.gz" if name.startswith("gz") else "train.jsonl")
        if path.is_file():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".draft")
        with gzip.open(draft, "wb", compresslevel=1) if path.suffix == ".gz" else open(draft, "wb") as file:
            for line in generate_lines(size * MB, seed, answer_words):
                file.write(line)
        draft.rename(path)
        print(f"wrote {path}: {path.stat().st_size / MB:,.0f} MB", flush=True)


def generate_lines(num_bytes: int, seed: int, answer_words: int) -> Iterator[bytes]:
    """Yield JSON lines of random words, about `num_bytes` of them; answers have log-normal lengths."""
    medians = np.log([20, answer_words])
    generator = np.random.default_rng(seed)
    written = number = 0
    while written < num_bytes:
        words = [WORDS[index] for index in generator.integers(0, len(WORDS), 20_000)]
        position = 0
        while position < len(words) - 2000 and written < num_bytes:
            asked, answered = np.clip(generator.lognormal(medians, 0.7), 1, 900).astype(int).tolist()
            question = f"{number} " + " ".join(words[position : position + asked])
            answer = " ".join(words[position + asked : position + asked + answered])
            position += asked + answered
            line = json.dumps({"src": question, "tgt": answer}).encode() + b"\n"
            written, number = written + len(line), number + 1
            yield line


def open_stream(tokenizer: Any, paths: list[Path], workers: int, **keys: Any) -> tuple[TokenStream, StreamOrder]:
    """Return a stream of datasets with greedy packing, and the order of its steps."""
    config = DataConfig(
        dataset_name_or_path=[str(path) for path in paths],
        chat_template="none",
        src_length=LENGTH // 2,
        max_length=LENGTH,
        lazy=True,
        dataloader_num_workers=workers,
        **keys,
    )
    stream = load_rows(config, "train", tokenizer)
    assert isinstance(stream, TokenStream)
    order = StreamOrder(stream, 8, batch_size=1, packing="greedy", capacity=LENGTH, seed=0, max_steps=1)
    return stream, order


def measure_memory(kind: str, options: argparse.Namespace, tokenizer: Any) -> dict[str, Any]:
    """Read one epoch of the "plain" or "gz" file; return memory and speed."""
    stream, order = open_stream(tokenizer, [options.folder / f"{kind}-{options.megabytes}"], options.workers)
    begin, tenths, peak, tokens = time.perf_counter(), [], 0.0, 0
    for step in order.step_batches():
        tokens += sum(stream[row].length + 1 for row in step.row_indices)
        peak = max(peak, resident_megabytes())
        if step.end_fraction >= (len(tenths) + 1) / 10:
            tenths.append(round(peak, 1))
            print(f"{kind} {step.end_fraction:.0%}: {peak:,.0f} MB, {tokens:,} tokens", flush=True)
            peak = 0.0
        if step.is_last:
            break
    seconds = time.perf_counter() - begin
    stream.close()
    return {
        "resident_mb_in_each_tenth": tenths,
        "growth_mb": round(tenths[-1] - tenths[min(1, len(tenths) - 1)], 1),
        "tokens": tokens,
        "tokens_per_second": round(tokens / seconds),
    }


def resident_megabytes() -> float:
    """Return the resident memory of this process and its children; shared pages count in each of them."""
    total = 0
    for process in ("self", *_children()):
        try:
            pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
        except OSError:  # the process has ended
            continue
        total += pages * os.sysconf("SC_PAGE_SIZE")
    return total / MB


def _children() -> list[str]:
    """Return the ids of the processes that the threads of this process have started."""
    tasks = Path("/proc/self/task").glob("*/children")
    return [process for task in tasks for process in task.read_text().split()]


def check_resume(options: argparse.Namespace, tokenizer: Any) -> dict[str, Any]:
    """Compare the rows of 300 steps in two runs; the second is stopped twice and resumed on other workers."""
    paths = [options.folder / f"gz-{options.megabytes}"]
    keys = {"shuffle_buffer_size": 1000}
    stream, order = open_stream(tokenizer, paths, 0, **keys)
    expected = [digest(stream, step) for step in itertools.islice(order.step_batches(), 300)]
    stream.close()
    resumed: list[str] = []
    position: tuple[Any, ...] = ()
    for workers, stop in ((1, 70), (2, 211), (0, 300)):
        stream, order = open_stream(tokenizer, paths, workers, **keys)
        for step in itertools.islice(order.step_batches(*position), stop - len(resumed)):
            resumed.append(digest(stream, step))
        cursor = json.loads(json.dumps(step.next_cursor))
        position = (step.epoch + step.is_last, 0 if step.is_last else step.index + 1, cursor)
        stream.close()
    assert resumed == expected, "the rows of the resumed stream differ"
    return {"steps": len(resumed), "rows_are_equal": True}


def digest(stream: TokenStream, step: StepBatch) -> str:
    """Return a hash of the tokens of a step's rows and of their positions in the files."""
    parts = hashlib.sha256()
    for row in step.row_indices:
        parts.update(f"{stream.source(row)}".encode() + stream[row].tokens.tobytes())
    return parts.hexdigest()


def measure_mix(options: argparse.Namespace, tokenizer: Any) -> dict[str, Any]:
    """Return the shares of three datasets in the rows and tokens of a mixture."""
    paths = [options.folder / name for name in "abc"]
    weights = ",".join(map(str, WEIGHTS))
    stream, order = open_stream(tokenizer, paths, options.workers, train_dataset_prob=weights)
    rows, tokens = dict.fromkeys("abc", 0), dict.fromkeys("abc", 0)
    wanted = min(100_000, 1000 * options.megabytes)
    for step in order.step_batches():
        for row in step.row_indices:
            name = Path(stream.source(row)[0]).parent.name
            rows[name] += 1
            tokens[name] += len(stream[row].tokens)
        if sum(rows.values()) >= wanted:
            break
    stream.close()
    shares = {
        kind: [round(counts[name] / sum(counts.values()), 4) for name in "abc"]
        for kind, counts in (("rows", rows), ("tokens", tokens))
    }
    return {"weights": WEIGHTS, "num_rows": sum(rows.values()), **shares}


def measure_tokenizing(options: argparse.Namespace, _tokenizer: Any) -> dict[str, Any]:
    """Return the tokens per second at which a dataset is tokenized into a new cache, by cores and processes."""
    found = {}
    for cores, processes in ((1, 1), (2, 1), (2, 2)):
        # A new process, whose tokenizer starts its threads on these cores only.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
            data = str(options.folder / f"plain-{options.megabytes}")
            speed = executor.submit(tokens_per_second, data, options.model, cores, processes).result()
        found[f"cores {cores}, dataset_num_proc {processes}"] = round(speed)
    return found


def measure_audit(options: argparse.Namespace, tokenizer: Any) -> dict[str, Any]:
    """Return speed and memory of an audit of the large dataset."""
    data = str(options.folder / f"plain-{options.megabytes}")
    config = DataConfig(dataset_name_or_path=data, chat_template="none", src_length=LENGTH // 2, max_length=LENGTH)
    readers = open_splits((data,), "train")
    split = AuditedSplit("train", readers, RowEncoder.from_config(config, load_template("none", tokenizer), readers))
    before, audited = resident_megabytes(), audit_splits([split], data, options.workers)
    return {
        "rows": audited.num_rows,
        "rows per second": round(audited.num_rows / audited.seconds),
        "tokens per second": round(audited.num_tokens / audited.seconds),
        "megabytes before": round(before),
        "megabytes at the peak": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MB),
        "findings": audited.summary,
    }


def tokens_per_second(data: str, model: str, cores: int, processes: int) -> float:
    """Tokenize a dataset on the first cores of this process, and return the speed."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    tokenizer = load_tokenizer(model)
    with tempfile.TemporaryDirectory() as cache:
        config = DataConfig(
            dataset_name_or_path=data,
            chat_template="none",
            src_length=LENGTH // 2,
            max_length=LENGTH,
            dataset_num_proc=processes,
            data_cache_dir=cache,
        )
        begin = time.perf_counter()
        stats = load_dataset(config, "train", tokenizer).stats
        return stats.num_tokens / (time.perf_counter() - begin)


PARTS = {
    "plain": partial(measure_memory, "plain"),
    "gz": partial(measure_memory, "gz"),
    "resume": check_resume,
    "mix": measure_mix,
    "tokenize": measure_tokenizing,
    "audit": measure_audit,
}

if __name__ == "__main__":
    main()
