"""Speed from rows in a file to tokens in the cache, compared with the tokenizer alone on the same texts.

    python -m benchmarks.rows_to_tokens FOLDER [--rows 100000 --model smollm2-135m-instruct --repeats 3]

FOLDER receives generated rows, which later runs reuse. Kinds: `short` are src/tgt rows without a chat template,
`templated` are the same rows in the chat template of the model, and `chat` are lists of two to five messages in it. A
question or an answer has 20 to 60 words. For each kind, the script prints

    tokenizer   tokens/s of `Tokenizer.encode_batch` of the `tokenizers` library on the texts of the rows
    rows        tokens/s from the file to the cache with each number of processes (`dataset_num_proc`)
    ratio       the second value divided by the first
    stages      microseconds of processor time per row of each stage, in one process without parallel tokenization
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import report
from paddlenlp_ext.checkpoint.tokenizer import load_tokenizer
from paddlenlp_ext.config.sections.data import DataConfig
from paddlenlp_ext.data.dataset import load_dataset
from paddlenlp_ext.data.readers.dataset_files import open_dataset
from paddlenlp_ext.data.rows.row_formats import parse_row
from paddlenlp_ext.data.templates.load import load_configured_template
from paddlenlp_ext.data.tokenization.memory_mapped_arrays import TokenWriter
from paddlenlp_ext.data.tokenization.row_encoder import RowEncoder

KINDS: dict[str, tuple[str, str | None]] = {
    "short": ("pairs", "none"),
    "templated": ("pairs", None),
    "chat": ("chats", None),
}
"""Kind -> format of the rows, and `chat_template`."""
WORDS = """
the of and to in is that for it as was with be by on not he his but at are this have from or had an they which one you
were her all she there would their we him been has when who will more no if out so said what up its about into than them
can only other new some could time these two may then do first any my now such like our over man me even most made after
also did many before must through years where much your way well down should because each just those people how too
little state good very make world still own see men work long get here between both life being under never day same
another know while last might great old year off come since against go came right used take three children quantity
velocity photosynthesis bureaucracy determine equations explained carefully
"""
CHUNK = 2000
"""Number of texts in a call of the tokenizer alone: the prompts and answers of the 1,000 rows that training encodes in
a call."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="model whose tokenizer and template are used")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="values of dataset_num_proc")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    options = parser.parse_args()
    found = {}
    for kind in options.kinds:
        path = write_rows(options.folder, KINDS[kind][0], options.rows)
        # A new process, whose tokenizer starts its threads on these cores only.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
            arguments = (str(path), kind, options.model, options.repeats, options.cores, options.processes)
            found[kind] = executor.submit(measure, *arguments).result()
            found[kind]["stages"] = executor.submit(stages, str(path), kind, options.model).result()
        print(json.dumps({kind: found[kind]}, indent=1), flush=True)
    report("rows_to_tokens", {"rows": options.rows, "cores": options.cores, **found}, "tokenizers", "transformers")


def write_rows(folder: Path, form: str, rows: int) -> Path:
    """Write the rows of a format unless the file exists; return the path of the file."""
    path = folder / f"{form}-{rows}.jsonl"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            for row in generate_rows(form, rows):
                file.write(json.dumps(row) + "\n")
    return path


def generate_rows(form: str, rows: int) -> Iterator[dict[str, Any]]:
    """Yield rows of random words in the format `pairs` or `chats`."""
    generator, known = np.random.default_rng(0), WORDS.split()

    def text() -> str:
        words = [known[index] for index in generator.integers(0, len(known), generator.integers(20, 61))]
        return f"{' '.join(words).capitalize()} {generator.integers(0, 1000)}."

    for _ in range(rows):
        if form == "pairs":
            yield {"src": text(), "tgt": text()}
            continue
        turns = int(generator.integers(1, 3))
        messages = [{"role": role, "content": text()} for _ in range(turns) for role in ("user", "assistant")]
        yield {"messages": [{"role": "system", "content": text()}, *messages] if generator.random() < 0.5 else messages}


def measure(
    path: str, kind: str, model: str, repeats: int, cores: int, processes: list[int]
) -> dict[str, float | dict[str, float]]:
    """Return the speed of the tokenizer alone and of the whole path, which run in turn; medians of `repeats` runs."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    tokenizer = load_tokenizer(model)
    texts = texts_of(path, kind, tokenizer)
    seconds: dict[str, list[float]] = {"tokenizer": [], **{f"processes {number}": [] for number in processes}}
    num_tokens = 0
    for _ in range(repeats):
        seconds["tokenizer"].append(timed(lambda: encode_all(tokenizer, texts)))
        for number in processes:
            with tempfile.TemporaryDirectory() as cache:
                config = config_of(path, kind, dataset_num_proc=number, data_cache_dir=cache)
                begin = time.perf_counter()
                num_tokens = load_dataset(config, "train", tokenizer).stats.num_tokens
                seconds[f"processes {number}"].append(time.perf_counter() - begin)
    speeds = {name: num_tokens / statistics.median(each) for name, each in seconds.items()}
    ratios = {name: round(speed / speeds["tokenizer"], 3) for name, speed in speeds.items() if name != "tokenizer"}
    return {"tokens": num_tokens, **{name: round(speed) for name, speed in speeds.items()}, "ratio": ratios}


def stages(path: str, kind: str, model: str) -> dict[str, float]:
    """Return the microseconds per row of each stage in this process, without parallel tokenization."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = load_tokenizer(model)
    config = config_of(path, kind)
    readers = open_dataset(config, "train")
    encoder = RowEncoder.from_config(config, load_configured_template(config, tokenizer), readers)
    spent: dict[str, float] = {}
    rows = 0

    def stage(name: str, run: Callable[..., Any], *inputs: Any) -> Any:
        begin = time.process_time()
        result = run(*inputs)
        spent[name] = spent.get(name, 0.0) + time.process_time() - begin
        return result

    template = encoder.template
    with tempfile.TemporaryDirectory() as folder, TokenWriter(Path(folder)) as writer:
        for block in (block for reader in readers for block in reader.blocks()):
            read = stage("read JSON", lambda block: [*block.rows()], block)
            parsed = stage("parse rows", lambda read: [parse_row(row.value) for row in read], read)
            examples = stage("render", lambda parsed: [each for row in parsed for each in template.render(row)], parsed)
            turns = [example.turns for example in examples]
            stage("encode, with the tokenizer", template.encode_turns, turns)
            stage("tokenizer alone", encode_all, tokenizer, turn_texts(turns))
            encoded = stage("all stages", encoder, block)
            stage("write", writer.append, encoded.arrays)
            rows += len(read)
    return {name: round(1e6 * seconds / rows, 2) for name, seconds in spent.items()}


def config_of(path: str, kind: str, **keys: Any) -> DataConfig:
    return DataConfig(dataset_name_or_path=path, chat_template=KINDS[kind][1], src_length=512, max_length=1024, **keys)


def texts_of(path: str, kind: str, tokenizer: Any) -> list[str]:
    """Return the texts of the rows that are encoded: prompts and answers."""
    config = config_of(path, kind)
    template = load_configured_template(config, tokenizer)
    rows = (row for reader in open_dataset(config, "train") for row in reader.rows())
    return turn_texts([example.turns for row in rows for example in template.render(parse_row(row.value))])


def turn_texts(examples: list[Any]) -> list[str]:
    """Return the texts of rendered turns."""
    return [
        text
        for turns in examples
        for turn in turns
        for text in (turn.prompt, *(lead.text for lead in turn.lead), turn.answer)
    ]


def encode_all(tokenizer: Any, texts: list[str]) -> None:
    """Encode texts with the `tokenizers` library."""
    for start in range(0, len(texts), CHUNK):
        tokenizer.backend_tokenizer.encode_batch(texts[start : start + CHUNK], add_special_tokens=False)


def timed(run: Callable[[], None]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
