"""Flags: one per field of the config dataclasses, and help in groups. Loads no torch."""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import sys
from collections.abc import Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from aioinfer.config import GROUPS, parse_setting, value_names
from aioinfer.config.values import BOOLEANS, field_options

__all__ = ["COMMON", "Formatter", "Parser", "add_common", "add_settings", "read_settings"]

#: settings that ``--help`` without a topic shows
COMMON = (
    *("download", "dtype", "quantization", "max_model_len", "device", "threads", "kv_memory_gib"),
    *("gpu_memory_utilization", "max_running_requests", "policy", "host", "port", "api_key", "insecure"),
    *("served_model_name", "access_log", "cors_origins", "socket", "address", "replica_token"),
)
_ALL = "all"


class Formatter(argparse.HelpFormatter):
    """Help texts in one column after the longest flags, as wide as the terminal."""

    def __init__(self, prog: str) -> None:
        super().__init__(
            prog, max_help_position=32, width=min(shutil.get_terminal_size((110, 0)).columns, 140)
        )

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if isinstance(action, _Switch):
            return ", ".join(action.option_strings)
        return super()._format_action_invocation(action)


class _Switch(argparse.Action):
    """The flag of a boolean setting: ``--x``, ``--no-x``, ``--x VALUE``."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        (flag,) = option_strings
        super().__init__([flag, f"--no-{flag.removeprefix('--')}"], dest, nargs="?", **options)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        off = option_string is not None and option_string.startswith("--no-")
        if off and values is not None:
            parser.error(f"{option_string} takes no value")
        setattr(namespace, self.dest, "false" if off else "true" if values is None else values)


class Parser(argparse.ArgumentParser):
    """A parser of settings, whose ``--help`` has topics: common settings, a group, part of a name, or all."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, add_help=False, formatter_class=Formatter)
        #: settings by group
        self.settings: dict[str, list[argparse.Action]] = {}
        self.add_argument(
            "-h",
            "--help",
            action=_Help,
            nargs="?",
            metavar="TOPIC",
            default=argparse.SUPPRESS,
            help="show the common options; of a group, part of a name, or all: those",
        )

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments; what follows a switch is its value only where it reads as a boolean."""
        given = [*(sys.argv[1:] if args is None else args)]
        end = given.index("--") if "--" in given else len(given)
        for at, argument in enumerate(given[:end]):
            switch = self._option_string_actions.get(argument)
            if not isinstance(switch, _Switch):
                continue
            flag, negation = switch.option_strings
            value = given[at + 1].lower() if at + 1 < end else ""
            if argument == negation:
                given[at] = f"{flag}=false"
            elif value not in (*BOOLEANS, "none"):
                given[at] = f"{flag}=true"
        return super().parse_known_args(given, namespace)

    def help_on(self, topic: str) -> str | None:
        """The help text of a topic; None if there is no such topic."""
        wanted = topic.strip().lower().lstrip("-").replace("_", "-")
        if wanted == _ALL:
            return self.format_help()
        if wanted in self.settings:
            return self._settings_of({wanted: self.settings[wanted]})
        found = {
            group: [each for each in members if wanted in each.option_strings[0]]
            for group, members in self.settings.items()
        }
        return self._settings_of(found) if wanted and any(found.values()) else None

    def format_common(self) -> str:
        """The help text without a topic: everything but settings, common settings, and the groups."""
        if not self.settings:
            return self.format_help()
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        settings = {id(action) for members in self.settings.values() for action in members}
        for section in self._action_groups:
            own = [each for each in section._group_actions if id(each) not in settings]
            _add_section(formatter, section.title, own)
        common = [each for members in self.settings.values() for each in members if each.dest in COMMON]
        _add_section(formatter, "common settings", common)
        width = max(map(len, self.settings))
        lines = [
            f"  {group:{width}}  {GROUPS[group]} ({len(members)})" for group, members in self.settings.items()
        ]
        topics = "\n".join(lines)
        asked = f"'{self.prog} --help GROUP' shows the settings of a group, '--help all' every setting."
        return f"{formatter.format_help()}\ngroups of settings:\n{topics}\n\n{asked}\n"

    def _settings_of(self, found: dict[str, list[argparse.Action]]) -> str:
        formatter = self._get_formatter()
        for group, members in found.items():
            _add_section(formatter, GROUPS[group], members)
        return formatter.format_help()


def _add_section(
    formatter: argparse.HelpFormatter, title: str | None, actions: Sequence[argparse.Action]
) -> None:
    if not actions:
        return
    formatter.start_section(title)
    formatter.add_arguments(actions)
    formatter.end_section()


class _Help(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        assert isinstance(parser, Parser)
        text = parser.format_common() if values is None else parser.help_on(values)
        if text is None:
            topics = ", ".join((_ALL, *parser.settings))
            parser.error(
                f"no help on {values[:80]!r}: the topics are {topics}, and parts of names of settings"
            )
        parser._print_message(text, sys.stdout)
        parser.exit()


def add_common(parser: argparse.ArgumentParser) -> None:
    """``--config`` and ``--log-level``."""
    levels = ["debug", "info", "warning", "error"]
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file with any of these settings")
    parser.add_argument(
        "--log-level",
        default="warning",
        choices=levels,
        metavar="LEVEL",
        help=f"{'|'.join(levels)} (default: warning)",
    )


def add_settings(parser: argparse.ArgumentParser, *classes: type[Any], but: Container[str] = ()) -> None:
    """One flag per field of the config dataclasses, in the groups of the fields, ``but`` of some.

    A flag that is not given is absent from the namespace. A name that two classes share is one flag.
    """
    known = {action.dest for action in parser._actions}
    fields: dict[str, _Field] = {}
    for cls in classes:
        found = [item for item in dataclasses.fields(cls) if item.name not in but]
        fields |= {item.name: (cls, item) for item in found if item.name not in known | fields.keys()}
    for group, members in _grouped(fields.values()):
        section = parser.add_argument_group(GROUPS[group])
        actions = [
            section.add_argument(
                f"--{item.name.replace('_', '-')}",
                metavar="VALUE",
                default=argparse.SUPPRESS,
                action=_Switch if bool in field_options(cls, item.name) else "store",
                help=_help(cls, item).replace("%", "%%"),
            )
            for cls, item in members
        ]
        if isinstance(parser, Parser):
            parser.settings[group] = actions


_Field = tuple[type[Any], dataclasses.Field[Any]]


def _grouped(fields: Iterable[_Field]) -> Iterator[tuple[str, list[_Field]]]:
    fields = list(fields)
    for group in GROUPS:
        if members := [(cls, item) for cls, item in fields if item.metadata["group"] == group]:
            yield group, members


def _help(cls: type[Any], item: dataclasses.Field[Any]) -> str:
    """The help text of a field, with its values and its default where it has them."""
    names = value_names(cls, item.name)
    notes = ["|".join(names)] if len(names) > 1 and names != ("true", "false") else []
    if item.default is not None:
        default = str(item.default).lower() if isinstance(item.default, bool) else item.default
        notes.append(f"default: {default}")
    text: str = item.metadata["help"]
    return f"{text} ({'; '.join(notes)})" if notes else text


def read_settings(cls: type[Any], options: argparse.Namespace) -> Any:
    """A config dataclass from flags, environment and file. Raises ConfigError."""
    given = vars(options)
    names = {item.name for item in dataclasses.fields(cls)}
    flags = {name: parse_setting(cls, name, value) for name, value in given.items() if name in names}
    if "model" in names and options.model_argument is not None:
        flags["model"] = options.model_argument
    config = cls.load(options.config, **flags)
    if "download" in names and config.download is None:
        config = dataclasses.replace(config, download=True)
    return config
