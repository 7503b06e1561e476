"""Stand-ins for the Hugging Face hub: uploads are recorded, and downloads copy files."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub.utils import filter_repo_objects


class _Address(str):
    """Address of a repository, as `HfApi.create_repo` returns it."""

    repo_id: str


@dataclass
class FakeHub:
    """Hub of the user `user`.

    Attributes:
        repositories: name of each repository -> the argument `private`.
        files: name of each repository -> names and contents of the uploaded files.
        failure: error that uploads raise; None: uploads succeed.
    """

    repositories: dict[str, bool | None] = field(default_factory=dict)
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    failure: Exception | None = None

    def create_repo(self, repo_id: str, *, private: bool | None, exist_ok: bool) -> _Address:
        name = repo_id if "/" in repo_id else f"user/{repo_id}"
        assert exist_ok or name not in self.repositories
        self.repositories.setdefault(name, private)
        address = _Address(f"https://huggingface.co/{name}")
        address.repo_id = name
        return address

    def upload_folder(self, *, repo_id: str, folder_path: str | Path, allow_patterns: list[str], **_: Any) -> None:
        if self.failure is not None:
            raise self.failure
        folder = Path(folder_path)
        names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
        names = list(filter_repo_objects(names, allow_patterns=allow_patterns))
        self.files[repo_id] = {name: (folder / name).read_bytes() for name in names}


def snapshot_download_of(model: Path, cache: Path) -> Callable[..., str]:
    """Return a `snapshot_download` that copies the requested files of a model to the folder `cache`."""

    def snapshot_download(repo_id: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        cache.mkdir(exist_ok=True)
        names = [path.relative_to(model).as_posix() for path in model.rglob("*") if path.is_file()]
        for name in filter_repo_objects(names, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns):
            shutil.copy(model / name, cache / name)
        return str(cache)

    return snapshot_download
