"""Check the packages of trackers before the slow import of Paddle."""

from __future__ import annotations

from collections.abc import Sequence

from paddlenlp_ext.config.requested_value import requested_value
from paddlenlp_ext.config.trackers import TRACKER_MODULES, chosen_trackers
from paddlenlp_ext.utils.optional_packages import is_installed, missing_package


def check_requested_trackers(argv: Sequence[str]) -> None:
    """Check that the trackers in `report_to` are installed.

    Raises:
        ValueError: a package is not installed; the message contains the installation command.
    """
    for name in chosen_trackers(requested_value(argv, "report_to") or ()):
        if not is_installed(TRACKER_MODULES[name]):
            raise ValueError(missing_package(TRACKER_MODULES[name], name, f"report_to: {name}"))
