"""Command `pnx doctor`: check the installation, as `python -m paddlenlp_ext.doctor` does."""

from paddlenlp_ext.doctor.__main__ import main as run

__all__ = ["run"]
