"""Stand-in for the Hugging Face hub, which records uploads."""

from __future__ import annotations

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
