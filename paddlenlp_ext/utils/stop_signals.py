"""Signals that stop a run gracefully."""

from __future__ import annotations

import signal

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Ctrl-C; end of a batch job; a batch system's warning before the end of a job; loss of the terminal."""
