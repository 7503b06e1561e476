"""Checksum manifest of a checkpoint folder: size and SHA-256 sum of every file, to detect damaged or missing files.

manifest.json:
    {"version": 1, "step": 100, "files": {"model.safetensors": {"bytes": 538090408, "sha256": "..."}, ...},
     "sha256": SHA-256 sum of the manifest without this key}

The checksums detect only accidental damage, because an attacker who changes a file can also change the manifest.
"""

from __future__ import annotations

import hashlib
import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from paddlenlp_ext.utils.files import file_sha256, read_json_object, write_json

MANIFEST_FILE = "manifest.json"
_VERSION = 1
_NUM_THREADS = 4
_STEP_FOLDER = re.compile(r"checkpoint-(\d+)")
_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")


def write_manifest(folder: Path, step: int) -> None:
    """Hash all files of a folder and write the manifest.

    Call this function right after a save: the files are still in the page cache, so hashing them rarely reads the disk.

    Args:
        folder: folder of the checkpoint, complete except for the manifest.
        step: number of completed optimizer steps.
    """
    manifest = folder / MANIFEST_FILE
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path != manifest)
    names = [path.relative_to(folder).as_posix() for path in files]
    with ThreadPoolExecutor(_NUM_THREADS) as pool:  # threads run in parallel, because hashlib releases the GIL
        digests = pool.map(file_sha256, files)
    entries = [{"bytes": path.stat().st_size, "sha256": digest} for path, digest in zip(files, digests, strict=True)]
    content = {"version": _VERSION, "step": step, "files": dict(zip(names, entries, strict=True))}
    write_json(manifest, {**content, "sha256": _content_sha256(content)})


def find_damage(folder: Path) -> list[str]:
    """Compare the files of a folder with the sizes and SHA-256 sums in its manifest.

    Returns:
        One message for each problem: a damaged or missing file, a weight file that is not in the manifest, or a wrong
        step in the folder's name. The list is empty for an intact folder.

    Raises:
        PermissionError: the user has no permission to read a file.
    """
    try:
        content = read_json_object(folder / MANIFEST_FILE)
    except ValueError as error:
        return [str(error).removeprefix(f"{folder}/")]
    if content.pop("sha256", None) != _content_sha256(content):
        return [f"{MANIFEST_FILE}: damaged: its SHA-256 sum is wrong"]
    if content.get("version") != _VERSION:
        return [f"{MANIFEST_FILE}: version {content.get('version')!r} is unknown to this release"]
    problems = _wrong_sizes(folder, content["files"])
    intact = {name: entry for name, entry in content["files"].items() if name not in problems}
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        digests = pool.map(_sha256_or_error, (folder / name for name in intact))
    for name, found in zip(intact, digests, strict=True):
        if isinstance(found, OSError):
            problems[name] = f"{name}: cannot be read ({found.strerror})"
        elif found != intact[name]["sha256"]:
            problems[name] = f"{name}: damaged or from another checkpoint: its SHA-256 sum is wrong"
    for pattern in _WEIGHT_FILES:
        for path in folder.glob(pattern):
            if path.name not in content["files"]:
                problems[path.name] = f"{path.name}: not in {MANIFEST_FILE}, so it is from another checkpoint"
    named = _STEP_FOLDER.fullmatch(folder.name)
    if named and int(named[1]) != content["step"]:
        problems[""] = f"the folder's name says step {named[1]}, but {MANIFEST_FILE} says step {content['step']}"
    return list(problems.values())


def _wrong_sizes(folder: Path, entries: dict[str, Any]) -> dict[str, str]:
    problems = {}
    for name, entry in entries.items():
        path = folder / name
        if not path.is_file():
            problems[name] = f"{name}: missing"
        elif (size := path.stat().st_size) != entry["bytes"]:
            problems[name] = f"{name}: {size} bytes instead of {entry['bytes']}"
    return problems


def _sha256_or_error(path: Path) -> str | OSError:
    """Return the SHA-256 sum of a file, or the OSError of a failed read; a PermissionError is raised."""
    try:
        return file_sha256(path)
    except PermissionError:
        raise
    except OSError as error:
        return error


def _content_sha256(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
