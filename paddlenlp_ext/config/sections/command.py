"""What only the command line says."""

from __future__ import annotations

from dataclasses import dataclass

from paddlenlp_ext.config.schema import option


@dataclass(frozen=True, kw_only=True)
class CommandConfig:
    """`config.command`: not part of a run's file."""

    dry_run: bool = option(False, help="check everything, count data and steps, and stop before training")
    show_data: int = option(0, minimum=0, help="print this many rows as the model sees them, and stop")
