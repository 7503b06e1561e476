"""Base class of `PeftModel` with the methods that save and load the active adapter, such as `save_pretrained`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from paddlenlp_ext.checkpoint.hub_upload import PushToHub
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.peft.formats.adapter_config import CONFIG_FILE
from paddlenlp_ext.peft.formats.peft_experts import describe_layers_read_as_experts
from paddlenlp_ext.peft.formats.read_adapter import AdapterFiles, read_adapter
from paddlenlp_ext.peft.named_adapters import NamedAdapters
from paddlenlp_ext.utils.files import read_json_object
from paddlenlp_ext.utils.logging import get_logger

logger = get_logger("paddlenlp_ext.peft")


class PeftModelFiles(PushToHub):
    """Base class of `PeftModel`: saves and loads the active adapter."""

    base_model: TrainableModel
    adapters: NamedAdapters

    def adapter_state(self) -> dict[str, paddle.Tensor]:
        """Return a dict of the active adapter's tensors, keyed by layer and parameter name."""
        return self.adapters.active.adapter_state()

    def tensors_to_save(self) -> dict[str, paddle.Tensor]:
        """Return the tensors to save, keyed by name; `PeftConfig.to_stored` later converts them to the file layout."""
        return self.adapter_state()

    def save_pretrained(self, folder: str | os.PathLike[str], tensors: Mapping[str, Any] | None = None) -> None:
        """Write `adapter_config.json` and `adapter_model.safetensors` of the active adapter.

        The files have the layout of Hugging Face PEFT. If the adapter is merged, its unmerged tensors are saved.

        Args:
            folder: created if it does not exist.
            tensors: unsharded tensors to save instead of `tensors_to_save()`, if this process holds only shards.
        """
        with self.adapters.unmerged() as adapter:
            adapter.save_pretrained(folder, tensors)

    def save_finished(self, folder: str | os.PathLike[str], tensors: Mapping[str, Any] | None = None) -> None:
        """Write the final adapter, and warn if Hugging Face PEFT would drop the tensors of some layers.

        With some methods, such as AdaLoRA, the saved adapter is smaller than the trained adapter.
        """
        self.adapters.active.save_finished(folder, tensors)
        fields = read_json_object(Path(folder, CONFIG_FILE))
        if (warning := describe_layers_read_as_experts(fields, self.base_model)) is not None:
            logger.warning("%s: %s", folder, warning)

    def full_state(self, tensors: Mapping[str, Any] | None) -> dict[str, paddle.Tensor]:
        """Return `tensors`, with lazy tensors read from their files; if `tensors` is None, return `adapter_state()`."""
        return self.adapters.active.full_state(tensors)

    def replaced_of(self, state: Mapping[str, paddle.Tensor]) -> dict[str, paddle.Tensor]:
        """Return the tensors of `state` that replace base parameters or token rows of the embedding and lm_head."""
        return self.adapters.active.replaced_of(state)

    def write_files(
        self,
        folder: str | os.PathLike[str],
        peft_type: str,
        fields: Mapping[str, Any],
        tensors: Mapping[str, paddle.Tensor],
    ) -> None:
        """Write tensors as adapter files; adapter_config.json has `fields` and the fields common to all methods."""
        self.adapters.active.write_files(folder, peft_type, fields, tensors)

    def load_weights(self, folder: str | os.PathLike[str]) -> None:
        """Load the tensors of a saved adapter with the same method and shapes, to resume training.

        Raises:
            ValueError: the folder has no adapter; the stored adapter has a different method, or a different value of an
                option that affects the computed function; a tensor is missing, unexpected or has the wrong shape; or
                the base model has a different quantization or config.
        """
        self.resume_from(read_adapter(folder))

    def resume_from(self, stored: AdapterFiles) -> None:
        """Load the tensors of a stored adapter, to resume training; raises the same errors as `load_weights`."""
        self.adapters.require_unmerged("loading an adapter")
        self.adapters.active.resume_from(stored)

    def load_tensors(self, tensors: Mapping[str, np.ndarray], where: str) -> None:
        """Load all tensors of the adapter, keyed as in `adapter_state`; an error leaves the adapter unchanged.

        Args:
            tensors: key -> unsharded tensor.
            where: source of the tensors, for error messages.

        Raises:
            ValueError: tensors are missing, unexpected or have the wrong shape.
        """
        self.adapters.require_unmerged("loading an adapter")
        self.adapters.active.load_tensors(tensors, where)
