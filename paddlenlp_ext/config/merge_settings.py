"""Merge the settings of files and of the command line, and convert their values.

files, command line  ->  Setting  ->  ParseState.values (key -> value)  ->  sections
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from paddlenlp_ext.config.dataclass_options import Option, convert
from paddlenlp_ext.config.errors import Problem, Report
from paddlenlp_ext.config.known_keys import OptionTable
from paddlenlp_ext.config.setting import Setting
from paddlenlp_ext.utils.json_reader import Location
from paddlenlp_ext.utils.suggest import nearest

_MIN_SIMILARITY = 0.75
"""Minimum similarity of an unknown key to a suggestion; a key of four letters with one typo has this similarity."""
_MOST_SHOWN = 6
"""Maximum number of keys in the message about an ambiguous abbreviation."""


@dataclass
class ParseState:
    """Settings and converted values of a configuration; later sources take precedence.

    Attributes:
        table: the known keys.
        settings: key -> setting that takes precedence.
        values: key -> converted value; keys with invalid values are absent.
        report: problems and notes found so far.
    """

    table: OptionTable
    settings: dict[str, Setting] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    report: Report = field(init=False)

    def __post_init__(self) -> None:
        self.report = Report(self._location_of)

    def _location_of(self, key: str) -> Location | None:
        setting = self.settings.get(key)
        return None if setting is None else setting.value_location

    def value(self, key: str) -> Any:
        """Return the value of a key, or the default if the key is not set."""
        return self.values[key] if key in self.values else self.table.options[key].default

    def merge(self, settings: list[Setting]) -> None:
        """Merge the settings of a file or of the command line."""
        source: dict[str, Setting] = {}
        for setting in settings:
            found = self.table.find(setting.key)
            if len(found) != 1:
                self._report_unknown(setting, found)
                continue
            key = found[0]
            earlier = source.setdefault(key, setting)
            if earlier.key != setting.key and earlier.value != setting.value:
                if not self._resolve_conflict(key, earlier, setting):
                    continue
                source[key] = setting
            self._merge_setting(self.table.options[key], setting)
            if setting.key not in self.table.keys:
                self.report.note(f"{setting.key} is read as {key}", key)

    def _resolve_conflict(self, key: str, earlier: Setting, later: Setting) -> bool:
        """Choose between two settings of `key` under different names; return whether `later` takes precedence.

        The winning alias takes precedence. Report a problem if none or both of the names are winning aliases.
        """
        winning = self.table.options[key].winning_aliases
        winners = [setting for setting in (earlier, later) if setting.key in winning]
        if len(winners) != 1:
            message = f"{later.key} and {earlier.key} are names of the same key, but have different values; keep one"
            self._report(later.key, key, message, later.location)
            return False
        loser = earlier if winners[0] is later else later
        self.report.note(f"{loser.key} has no effect: {winners[0].key} is the same key, and takes precedence", key)
        return winners[0] is later

    def _merge_setting(self, option: Option, setting: Setting) -> None:
        self.settings.pop(option.key, None)
        self.values.pop(option.key, None)
        if setting.value is None:
            return
        self.settings[option.key] = setting
        if option.section == "command" and not setting.from_command_line:
            message = f"{setting.key} is accepted only on the command line; pass --{setting.key}"
            self.report.problems.append(Problem(setting.key, message, setting.location))
            return
        try:
            self.values[option.key] = convert(option, setting.value, setting.from_command_line)
        except ValueError as error:
            self._report(setting.key, option.key, f"{setting.key}: {error}", setting.value_location)

    def _report(self, written: str, key: str, message: str, location: Location) -> None:
        self.report.problems.append(Problem(written, message, location))
        self.report.invalid_keys.add(key)

    def _report_unknown(self, setting: Setting, abbreviated: list[str]) -> None:
        """Report an unknown key or an ambiguous abbreviation."""
        message = f"unknown key {setting.key!r}"
        match = nearest(setting.key, self.table.keys, _MIN_SIMILARITY)
        if abbreviated:
            shown = ", ".join(abbreviated[:_MOST_SHOWN]) + (", ..." if len(abbreviated) > _MOST_SHOWN else "")
            message += f" is an abbreviation of several keys: {shown}; write one of them in full"
        elif match is not None:
            # Mark the intended key as invalid, so that no rule reports it as missing.
            self.report.invalid_keys.add(self.table.keys[match])
            message += f"; did you mean {match!r}?"
        elif isinstance(setting.value, dict):
            message += "; the file is flat: write the keys of this object one level up"
        else:
            message += "; --help lists the keys"
        self.report.problems.append(Problem(setting.key, message, setting.location))

    def check_compat(self) -> None:
        """Report unavailable values of keys of PaddleNLP and other toolkits, and note keys without effect."""
        report = self.report
        for key, entry in self.table.compat.items():
            if key not in self.values or key in report.invalid_keys or self.values[key] in entry.neutral:
                continue
            value = self.values[key]
            if entry.translation(value) is not None:
                continue
            shown = "an object" if isinstance(value, dict) else str(value)
            shown = shown.lower() if isinstance(value, bool) else shown
            if entry.needs is not None:
                if not self.value(entry.needs):
                    report.note(f"{key} has no effect: {entry.needs} is off", key)
            elif entry.outcome == "no effect":
                report.note(entry.message(shown), key)
            else:
                report.error(entry.message(shown), key)
