"""Signals on which a run stops gracefully."""

from __future__ import annotations

import signal

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Ctrl-C; end of a batch job; warning of a batch system before the end of a job; loss of the terminal."""
