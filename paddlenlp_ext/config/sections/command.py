"""Configuration section for keys that only the command line accepts."""

from __future__ import annotations

from dataclasses import dataclass

from paddlenlp_ext.config.dataclass_options import OptionGroup, option


@dataclass(frozen=True, kw_only=True)
class CommandConfig(OptionGroup):
    """`config.command`: keys that only the command line accepts."""

    dry_run: bool = option(False, help="check the configuration, count rows and steps, and exit before training")
    audit_only: bool = option(
        False, help="check the rows, write data_audit.html to output_dir, and exit before training"
    )
    preview_data: int = option(
        0,
        minimum=0,
        aliases=("show_data",),
        help="print this many tokenized rows with their target tokens marked, and exit",
    )
