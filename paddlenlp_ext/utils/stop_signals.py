"""Signals that stop a run gracefully."""

from __future__ import annotations

import signal

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Ctrl-C; termination by a batch system; warning of a batch system before the time limit; loss of the terminal."""
