"""Check the packages of trackers before the slow import of Paddle.

The complete check of the configuration imports Paddle, because it needs the keys that the adapter methods declare. The
check of the trackers reads only `report_to`, and ignores all other problems.
"""

from __future__ import annotations

from collections.abc import Sequence

from paddlenlp_ext.config.command_line import read_command_line
from paddlenlp_ext.config.config_files import read_file
from paddlenlp_ext.config.dataclass_options import convert
from paddlenlp_ext.config.known_keys import known_keys
from paddlenlp_ext.config.trackers import TRACKER_MODULES, chosen_trackers
from paddlenlp_ext.utils.optional_packages import is_installed, missing_package


def check_requested_trackers(argv: Sequence[str]) -> None:
    """Check that the trackers in `report_to` are installed.

    Raises:
        ValueError: a package is not installed; the message contains the installation command.
    """
    table = known_keys({})
    line = read_command_line(argv, table)
    settings = [setting for path in line.files for setting in read_file(path)[0]] + line.settings
    written = [setting for setting in settings if setting.key == "report_to" and setting.value is not None]
    if not written:
        return
    try:
        names = convert(table.options["report_to"], written[-1].value, written[-1].from_command_line)
    except ValueError:  # the complete check reports the invalid value
        return
    for name in chosen_trackers(names):
        if not is_installed(TRACKER_MODULES[name]):
            raise ValueError(missing_package(TRACKER_MODULES[name], name, f"report_to: {name}"))
