"""Cache of tokenized splits, with a directory for each cache key.

A directory holds a file for each array of `TokenArrays`, the statistics of the split (account.json), and the checksums
of these files (sums.json). All checksums are verified when a cache is opened. CRC-32 runs at about 4 GB/s and takes
a thousandth of the time of tokenization.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paddlenlp_ext.config.sections.data import DataConfig
from paddlenlp_ext.data.readers.base import Reader
from paddlenlp_ext.data.tokenization.cache_key import cache_key
from paddlenlp_ext.data.tokenization.memory_mapped_arrays import VALUES_FILE, TokenArrays, file_name_of
from paddlenlp_ext.data.tokenization.row_encoder import RowEncoder
from paddlenlp_ext.data.tokenization.statistics import DataStats
from paddlenlp_ext.data.tokenization.workers import tokenize
from paddlenlp_ext.utils.files import atomic_folder, read_json_object, sibling, write_json
from paddlenlp_ext.utils.locks import waiting_lock
from paddlenlp_ext.utils.logging import get_logger

STATS_FILE = "account.json"
SUMS_FILE = "sums.json"
_CHUNK_BYTES = 1 << 22


DEFAULT_CACHE = Path("~/.cache/paddlenlp_ext/data")


def load_or_tokenize(
    config: DataConfig,
    split: str,
    readers: Sequence[Reader],
    encoder: RowEncoder,
    fingerprint: str,
    title: str,
    reads_more: bool = False,
) -> tuple[Path, TokenArrays, DataStats]:
    """Map the tokens of a split from the cache, and log their statistics; tokenize the split if it is not cached.

    Args:
        config: `config.data` of a run.
        split: "train", "dev" or "test".
        readers: readers of the split, in reading order.
        encoder: encoder of the rows.
        fingerprint: the result of `tokenizer_fingerprint`.
        title: name of the data in the log.
        reads_more: see `cache_key`.

    Returns:
        The directory of the split in the cache, the tokens and the statistics.

    Raises:
        ValueError: see `tokenize` and `load_or_build`.
    """
    key = cache_key(
        readers=readers,
        tokenizer=fingerprint,
        template_text=encoder.template.identity,
        options={**vars(encoder.limits), "bad_rows": config.bad_rows, **encoder.key_options},
        reads_more=reads_more,
    )
    folder = Path(config.data_cache_dir or DEFAULT_CACHE).expanduser() / f"{split}-{key[:32]}"
    arrays, stats = load_or_build(
        folder, lambda draft: tokenize(readers, encoder, draft, config.bad_rows, config.dataset_num_proc)
    )
    stats.log(f"{split} rows of {title}")
    return folder, arrays, stats


def load_or_build(folder: Path, build: Callable[[Path], DataStats]) -> tuple[TokenArrays, DataStats]:
    """Load the arrays and statistics in `folder`; build them first if the directory does not exist or is damaged.

    A directory is damaged if a file is missing or differs from its checksum. The arrays are mapped into memory.
    If several processes call the function, one process builds and the others wait. If `build` raises an error, its
    files are deleted.

    Args:
        folder: directory of the split in the cache.
        build: function that writes the arrays into a folder with `TokenWriter` and returns the statistics.

    Raises:
        ValueError: the directory is not writable, or the process that builds it makes no progress.
    """
    if find_damage(folder) is None:
        get_logger().info("cached tokens found in %s", folder)
    else:
        lock, draft = folder.with_suffix(".lock"), sibling(folder, "incomplete")
        with waiting_lock(lock, draft, "set data_cache_dir"):
            damage = find_damage(folder)  # another process may have built the files while this process waited
            if damage is not None:
                if folder.is_dir():
                    get_logger().warning("%s: %s; tokenizing the rows again", folder, damage)
                _build(folder, build)
    return _load(folder)


def _build(folder: Path, build: Callable[[Path], DataStats]) -> None:
    with atomic_folder(folder) as draft:
        stats = build(draft)
        (draft / STATS_FILE).write_text(json.dumps(stats.to_json(), indent=1), encoding="utf-8")
        write_json(draft / SUMS_FILE, {path.name: _sum_of(path) for path in sorted(draft.iterdir())})
    get_logger().info("tokens cached in %s", folder)


def find_damage(folder: Path) -> str | None:
    """Return a description of the first missing or changed file of a split; None if all files are unchanged.

    Files are compared with their checksums. Caches of earlier versions have no checksums; their files are checked by
    loading them.
    """
    if not folder.is_dir():
        return "no cached tokens"
    if not (folder / SUMS_FILE).is_file():
        return _find_unreadable(folder)
    try:
        sums = read_json_object(folder / SUMS_FILE)
    except ValueError:
        return f"the cached tokens are damaged ({SUMS_FILE})"
    names = {STATS_FILE, *map(file_name_of, TokenArrays.__dataclass_fields__)}
    if VALUES_FILE not in sums:
        names.remove(VALUES_FILE)
    for name in sorted(names):
        if not (folder / name).is_file() or _sum_of(folder / name) != sums.get(name):
            return f"the cached tokens are damaged ({name})"
    return None


def _find_unreadable(folder: Path) -> str | None:
    try:
        _load(folder)
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        return f"the cached tokens are damaged ({error})"
    return None


def _load(folder: Path) -> tuple[TokenArrays, DataStats]:
    stored: Mapping[str, Any] = json.loads((folder / STATS_FILE).read_text(encoding="utf-8"))
    return TokenArrays.load(folder), DataStats.from_json(dict(stored))


def _sum_of(path: Path) -> list[int]:
    """Return the size of a file in bytes and its CRC-32."""
    size = crc = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return [size, crc]
