"""Upload models and adapters to the Hugging Face hub: `push_to_hub` of runs and models, and `pnx push`.

Only the files in `UPLOADED` leave this machine. Reports, histories, audits and generated answers contain rows of the
data, and run_config.json contains local paths, so these files are not uploaded.
"""

from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paddlenlp_ext.utils.logging import get_logger
from paddlenlp_ext.utils.storage_errors import explained_errors

WEIGHTS = ("model.safetensors", "model-*-of-*.safetensors", "adapter_model.safetensors")
"""Name patterns of weight files; an uploaded folder has at least one weight file."""
UPLOADED = (
    *WEIGHTS,
    *("model.safetensors.index.json", "config.json", "generation_config.json", "adapter_config.json"),
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "*.model", "*.tiktoken", "merges.txt", "vocab.*"),
    *("chat_template*", "additional_chat_templates/*.jinja", "quantize_config.json"),
    *("README.md", "LICENSE*", *(f"{split}_results.json" for split in ("train", "eval", "test", "all"))),
)
"""Path patterns of uploaded files, relative to the folder; `*` does not match `/`."""

logger = get_logger(__name__)


class UploadError(ValueError):
    """Error about the failed upload of a completed run. All results of the run are on disk."""


def check_hub_login(repo_id: str, needed_by: str) -> None:
    """Check that the repository name is valid, uploads are allowed and a token is stored, without a request to the hub.

    Args:
        repo_id: `organisation/name`, or a name in the user's own namespace.
        needed_by: prefix of the error message: a key, function or command.

    Raises:
        ValueError: the name is not valid, HF_HUB_OFFLINE is set, or no token is stored.
    """
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ValueError(
            f"{needed_by}: {repo_id!r} is not a valid repository name; choose organisation/name ({error})"
        ) from error
    if constants.HF_HUB_OFFLINE:
        raise ValueError(f"{needed_by}: HF_HUB_OFFLINE is set, which forbids uploads; unset this environment variable")
    if not huggingface_hub.get_token():
        raise ValueError(
            f"{needed_by}: no token for the Hugging Face hub is stored; set the environment variable HF_TOKEN to a "
            "token with write access, or run `hf auth login`"
        )


def upload_model(folder: str | Path, repo_id: str, private: bool | None, needed_by: str) -> str:
    """Create a repository if it does not exist, upload the files in `UPLOADED`, and return the repository's URL.

    Args:
        folder: folder with a model or an adapter.
        repo_id: `organisation/name`, or a name in the user's own namespace.
        private: whether a new repository is private; None: the default of the organisation, which is usually public.
        needed_by: prefix of the error message: a key, function or command.

    Raises:
        ValueError: see `check_hub_login`; or the folder has no weights, or the upload failed.
    """
    import huggingface_hub
    from huggingface_hub.errors import HTTPError

    check_hub_login(repo_id, needed_by)
    files = _files_to_upload(Path(folder), needed_by)
    api = huggingface_hub.HfApi()
    # RuntimeError: the library for large files cannot connect. ValueError: the metadata in README.md is invalid.
    try:
        url = api.create_repo(repo_id, private=private, exist_ok=True)
        logger.info("uploading %s to %s: %s", folder, url, ", ".join(files))
        api.upload_folder(
            repo_id=url.repo_id,
            folder_path=folder,
            allow_patterns=files,
            commit_message="Upload model with paddlenlp_ext",
        )
    except (HTTPError, OSError, RuntimeError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0] or "no message"
        raise ValueError(f"{needed_by}: the upload to {repo_id} failed ({type(error).__name__}: {reason})") from error
    return str(url)


def _files_to_upload(folder: Path, needed_by: str) -> list[str]:
    """Return the names of the files to upload, relative to the folder.

    Raises:
        ValueError: the folder has no weights.
    """
    if not any(path.is_file() for pattern in WEIGHTS for path in folder.glob(pattern)):
        raise ValueError(f"{needed_by}: {folder} has no weights to upload ({', '.join(WEIGHTS)})")
    paths = {path for pattern in UPLOADED for path in folder.glob(pattern) if path.is_file()}
    return sorted(path.relative_to(folder).as_posix() for path in paths)


def repo_of_run(output_dir: str | os.PathLike[str], hub_model_id: str | None) -> str:
    """Return the repository of a run: `hub_model_id`, or else the name of output_dir in the user's own namespace."""
    return hub_model_id or Path(output_dir).resolve().name


def upload_run(output_dir: Path, hub_model_id: str | None, private: bool | None) -> str:
    """Upload the result of a completed run, and return the URL of the repository.

    Raises:
        UploadError: the upload failed; the message says that the run is saved, and how to repeat the upload.
    """
    repo_id = repo_of_run(output_dir, hub_model_id)
    try:
        url = upload_model(output_dir, repo_id, private, "push_to_hub")
    except ValueError as error:
        command = ["pnx", "push", str(output_dir), "--repo", repo_id, *(["--private"] if private else [])]
        raise UploadError(
            f"{error}; training is complete and saved in {output_dir}; to repeat the upload: {shlex.join(command)}"
        ) from error
    logger.info("uploaded to %s", url)
    return url


class PushToHub:
    """Mixin that adds `push_to_hub` to a model with `save_pretrained`."""

    save_pretrained: Callable[..., Any]

    def push_to_hub(self, repo_id: str, private: bool | None = None) -> str:
        """Upload the files of `save_pretrained` to the Hugging Face hub, and return the URL of the repository.

        Args:
            repo_id: `organisation/name`, or a name in the user's own namespace; created if it does not exist.
            private: whether a new repository is private; None: the default of the organisation, usually public.

        Raises:
            ValueError: the name is not valid, HF_HUB_OFFLINE is set, no token is stored, or the upload failed.
        """
        check_hub_login(repo_id, "push_to_hub")  # fail before the files are written
        with tempfile.TemporaryDirectory() as folder:
            with explained_errors(folder):
                self.save_pretrained(folder)
            return upload_model(folder, repo_id, private, "push_to_hub")
