"""The tokenizer and the chat template of a run.

A run whose rows are tokenized already asks little of them: a few ids, and by which name the tokens are kept. Loading
them takes as long as all else before the first step together, so what was asked is kept beside the tokens, under the
names, sizes and times of the files it comes from, and they are loaded where more is asked.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import paddlenlp_ext.checkpoint
import paddlenlp_ext.data
from paddlenlp_ext.checkpoint.hub import resolve_model
from paddlenlp_ext.checkpoint.tokenizer import load_tokenizer
from paddlenlp_ext.config import RunConfig
from paddlenlp_ext.data.cache import code_facts, file_lock, tokenizer_fingerprint
from paddlenlp_ext.data.dataset import cache_dir
from paddlenlp_ext.data.templates import load_template
from paddlenlp_ext.utils.files import atomic_folder
from paddlenlp_ext.utils.lazy import Late

_CODE = [Path(room.__file__).parent for room in (paddlenlp_ext.checkpoint, paddlenlp_ext.data)]
_FACTS_FILE = "facts.json"
_TOKENIZER = "tokenizer"
_CLOCK = "strftime_now"
"""The function by which a template asks what day it is."""


@dataclass(frozen=True)
class RunText:
    """A tokenizer, a chat template of its, and the tokenizer's fingerprint. The first two may be `Late`."""

    tokenizer: Any
    template: Any
    fingerprint: str


@dataclass(frozen=True)
class _Facts:
    """What is known without loading; `day` is the only one on which it is so, if it is not so for ever."""

    pad_token_id: int | None
    eos_token_id: int | None
    fingerprint: str
    identity: str
    stop_token_ids: list[int]
    day: str | None


def load_text(config: RunConfig) -> RunText:
    """The run's tokenizer and template, from what is known of them or loaded.

    Raises:
        ValueError: no such model or template, nothing usable in its files, or data_cache_dir can't be written to.
    """
    path = resolve_model(config.model.tokenizer_name_or_path or config.model.model_name_or_path)
    option = config.data.chat_template
    folder = cache_dir(config.data) / f"text-{_key(path, option)}"
    if _read_facts(folder) is None:
        with file_lock(folder):
            if _read_facts(folder) is None:
                return _load(path, option, folder)
    return _known(path, option, folder)


def _load(path: Path, option: str | None, folder: Path) -> RunText:
    """Tokenizer and template themselves; what is to be known of them goes into the folder.

    Not where loading the template gave a warning, which every run is to give.
    """
    tokenizer = load_tokenizer(path)
    text = RunText(tokenizer, load_template(option, tokenizer), tokenizer_fingerprint(tokenizer))
    if not text.template.ends_answers:
        return text
    facts = _Facts(
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        fingerprint=text.fingerprint,
        identity=text.template.identity,
        stop_token_ids=list(text.template.stop_token_ids),
        day=date.today().isoformat() if _CLOCK in text.template.text else None,
    )
    with atomic_folder(folder) as draft:
        tokenizer.save_pretrained(str(draft / _TOKENIZER))
        (draft / _FACTS_FILE).write_text(json.dumps(asdict(facts), indent=1), encoding="utf-8")
    return text


def _known(path: Path, option: str | None, folder: Path) -> RunText:
    """The same, to be loaded where more is asked than the folder holds."""
    facts = _read_facts(folder)
    assert facts is not None, f"{folder} is gone"
    files = {file.relative_to(folder / _TOKENIZER): file.read_bytes() for file in _files(folder / _TOKENIZER)}
    tokenizer = Late(
        lambda: load_tokenizer(path),
        pad_token_id=facts.pad_token_id,
        eos_token_id=facts.eos_token_id,
        save_pretrained=partial(_write, files),
    )
    template = Late(
        lambda: load_template(option, tokenizer), identity=facts.identity, stop_token_ids=tuple(facts.stop_token_ids)
    )
    return RunText(tokenizer, template, facts.fingerprint)


def _key(path: Path, option: str | None) -> str:
    """A hash that changes with whatever a tokenizer and a template are made from."""
    read = [path] if option in (None, "none") else [path, Path(option).expanduser()]
    stats = [(str(file.absolute()), file.stat()) for place in read for file in _files(place)]
    parts = {
        "files": [(name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in stats],
        "chat_template": option,
        **code_facts(*_CODE),
    }
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _files(place: Path) -> list[Path]:
    """The file of that name, or those in the folder that a tokenizer may be read from."""
    found = [place] if place.is_file() else [*place.glob("*"), *place.glob("additional_chat_templates/*")]
    return sorted(file for file in found if file.is_file())


def _read_facts(folder: Path) -> _Facts | None:
    """What is kept in the folder; None where nothing is, or what was true on another day."""
    if not folder.is_dir():
        return None
    facts = _Facts(**json.loads((folder / _FACTS_FILE).read_text(encoding="utf-8")))
    return facts if facts.day in (None, date.today().isoformat()) else None


def _write(files: dict[Path, bytes], folder: str) -> None:
    """What `save_pretrained` of the tokenizer wrote once, into another folder."""
    for name, content in files.items():
        file = Path(folder) / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
