"""Write peft_types.json: the adapter types of the installed Hugging Face PEFT, and the models with renamed experts.

PEFT takes `gate_proj` in `target_modules` of these models for experts.

Run where `peft` is installed:
    python -m tests.golden.generators.make_peft_types_golden
"""

from __future__ import annotations

import json

import peft
from peft.utils.transformers_weight_conversion import _MODEL_TO_CONVERSION_PATTERN, _MOE_TARGET_MODULE_MAPPING
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from tests.golden import DATA


def main() -> None:
    """Write the version and the sorted names."""
    renamed = sorted(
        model_type
        for model_type, pattern in _MODEL_TO_CONVERSION_PATTERN.items()
        if "gate_proj" in _MOE_TARGET_MODULE_MAPPING.get(pattern, {})
        and get_checkpoint_conversion_mapping(model_type) is not None
    )
    types = sorted(kind.value for kind in peft.PeftType)
    content = {"version": peft.__version__, "types": types, "models with renamed experts": renamed}
    (DATA / "peft_types.json").write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
