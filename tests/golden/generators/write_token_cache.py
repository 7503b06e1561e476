"""Write the token cache that tests/data/tokenization/test_token_cache.py reads back.

It was run once, at commit f1ae12d: later versions of the package must find and read the cache of that commit.

    PYTHONPATH=<checkout of f1ae12d>:<this checkout> python -m tests.golden.generators.write_token_cache FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

WORDS = ("<unk>", "<s>", "</s>", "red", "blue", "apple", "pear", "plum", "=")
ROWS = (
    {"src": "red apple =", "tgt": "plum blue"},
    {"src": ["pear =", "blue ="], "tgt": ["red", "apple apple"]},
    {"src": "plum plum plum plum plum plum =", "tgt": "blue"},
    {"src": "a row without an answer"},
)
LIBRARIES = ("tokenizers", "transformers", "jinja2")


def make_words_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each of `WORDS`."""
    core = Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    core.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def data_config() -> SimpleNamespace:
    """Return the keys of `config.data` that decide the tokens; paths are relative to the golden folder."""
    return SimpleNamespace(
        dataset_name_or_path="rows",
        task_name=None,
        src_length=5,
        max_length=16,
        truncation="right",
        bad_rows="drop",
        chat_template="none",
        chat_template_kwargs=None,
        learn_empty_think=False,
        mask_reasoning=False,
        autoregressive=False,
        data_cache_dir="cache",
    )


def main(folder: str) -> None:
    """Write rows, the versions of the libraries and the cache of the rows into `folder`."""
    from paddlenlp_ext.data.dataset import load_dataset

    Path(folder, "rows").mkdir(parents=True)
    os.chdir(folder)
    Path("rows/train.json").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    Path("versions.json").write_text(json.dumps({name: version(name) for name in LIBRARIES}, indent=1) + "\n")
    load_dataset(data_config(), "train", make_words_tokenizer())


if __name__ == "__main__":
    main(sys.argv[1])
