"""YAML read so that every value remembers where it was written.

Scalars follow the YAML 1.2 core schema without infinities: `1e-4` is a number (PyYAML's 1.1 rules make it a string)
and `no` is a string, not false. Only plain maps, lists and scalars are read: no tags, no duplicate keys, no merge keys
(`extends` does that).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pipeline.errors import ConfigError

# An alias repeats its anchor's value; nine levels of nine aliases (a "billion laughs") would be 10^9 values.
MAX_VALUES = 10_000
MAX_BYTES = 128 << 10  # PyYAML makes a kilobyte of objects of every item
MAX_DIGITS = 40
LINES = "\n\t\r\x85"  # the control characters that text is made of

_TAG = "tag:yaml.org,2002:"
# tag, pattern, first characters that the pattern can start with (PyYAML's index)
_SCALARS: tuple[tuple[str, str, str], ...] = (
    ("null", r"~|null|Null|NULL|", "~nN"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", "-+.0123456789"),
)


class _Loader(yaml.SafeLoader):
    """Composes nodes only; nothing is ever constructed from a tag."""


_Loader.yaml_implicit_resolvers = {}
for _name, _pattern, _first in _SCALARS:
    _Loader.add_implicit_resolver(_TAG + _name, re.compile(f"(?:{_pattern})$"), [*_first, ""])


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value was written: a file (as shown to the user) and line, or a command line option without line."""

    source: str
    line: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


@dataclass(frozen=True, slots=True)
class Located:
    """A value and its origin. `value` is a scalar, a list of Located, or a dict from key to Located."""

    value: Any
    origin: Origin

    def plain(self) -> Any:
        """The value without origins."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        return self.value

    def merge(self, other: Located) -> Located:
        """`other` laid over this value: maps merge key by key, anything else is replaced."""
        if not (isinstance(self.value, dict) and isinstance(other.value, dict)):
            return other
        merged = dict(self.value)
        for key, child in other.value.items():
            merged[key] = merged[key].merge(child) if key in merged else child
        return Located(merged, other.origin)

    def walk(self, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Origin]]:
        """Every value's path and origin, this one's first."""
        yield path, self.origin
        if isinstance(self.value, dict):
            for key, child in self.value.items():
                yield from child.walk((*path, key))
        elif isinstance(self.value, list):
            for index, child in enumerate(self.value):
                yield from child.walk((*path, index))


def read_document(path: Path, shown: str) -> Located:
    """The one map that a YAML file holds. `shown` names the file in messages. Raises ConfigError with the line."""
    document = read_value(path, shown)
    if not isinstance(document.value, dict):
        raise ConfigError(f"{document.origin}: must hold a map of settings, not {name_value(document.value)}")
    return document


def read_value(path: Path, shown: str) -> Located:
    """What a YAML file holds, None where it is empty; else as `read_document`."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{shown}: cannot be read: {error.strerror}") from error
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{shown}: is {len(data)} bytes long; a config has at most {MAX_BYTES}")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ConfigError(f"{shown}:{line}: is not UTF-8") from error
    return parse(text, lambda line: Origin(shown, line))


def parse(text: str, origin: Callable[[int], Origin]) -> Located:
    """One YAML value. `origin` turns a line number (from 1) into an Origin. Raises ConfigError."""
    try:
        node = yaml.compose(text, Loader=_Loader)
        if node is None:
            return Located(None, origin(1))
        return _Converter(origin).convert(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = origin(mark.line + 1 if mark else 1)
        raise ConfigError(f"{where}: {error.problem or error.context or 'is not YAML'}") from error
    except yaml.reader.ReaderError as error:  # of a character that YAML has not, NUL above all
        line = text.count("\n", 0, error.position)
        _refuse_controls(text.split("\n")[line].strip(), str(origin(line + 1)))  # which shows the key
        raise ConfigError(f"{origin(line + 1)}: {error.reason}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{origin(1)}: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{origin(1)}: is nested too deeply") from error


def name_kind(text: str) -> str:
    """What a scalar is that is written so without quotes: "null", "bool", "int", "float" or "str"."""
    return next((kind for kind, pattern, _ in _SCALARS if re.fullmatch(pattern, text)), "str")


class _Converter:
    def __init__(self, origin: Callable[[int], Origin]) -> None:
        self.origin = origin
        self.count = 0
        self.open: set[int] = set()  # nodes being converted, to find an anchor that contains itself

    def convert(self, node: yaml.Node, path: tuple[str | int, ...] = ()) -> Located:
        """`path`: of keys and places in lists, to the node."""
        where = self.origin(node.start_mark.line + 1)
        self.count += 1
        if self.count > MAX_VALUES:
            raise ConfigError(f"{where}: aliases repeat their anchors to more than {MAX_VALUES} values")
        if id(node) in self.open:
            raise ConfigError(f"{where}: an anchor contains itself")
        self.open.add(id(node))
        value: Any
        if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
            value = self._map(node, path)
        elif isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            value = [self.convert(child, (*path, index)) for index, child in enumerate(node.value)]
        elif isinstance(node, yaml.ScalarNode) and node.tag.removeprefix(_TAG) in _READ:
            try:
                value = _READ[node.tag.removeprefix(_TAG)](node.value)
            except (ValueError, KeyError) as error:
                kind = node.tag.removeprefix(_TAG)
                raise ConfigError(f"{_place(where, path)}: {_show(node.value)} is not of type {kind}") from error
            _refuse_controls(node.value, _place(where, path))
        else:
            raise ConfigError(f"{where}: the tag {node.tag} is not allowed", hint="write plain YAML values")
        self.open.remove(id(node))
        return Located(value, where)

    def _map(self, node: yaml.MappingNode, path: tuple[str | int, ...]) -> dict[str, Located]:
        result: dict[str, Located] = {}
        for key_node, value_node in node.value:
            where = self.origin(key_node.start_mark.line + 1)
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != _TAG + "str":
                raise ConfigError(f"{where}: a key must be a word")
            key = key_node.value
            _refuse_controls(key, _place(where, path))
            if key in result:
                raise ConfigError(f"{where}: {key} is given twice, first at {result[key].origin}")
            child = self.convert(value_node, (*path, key))
            # A value's place is its key's: the value itself may start lines below, or at an anchor elsewhere.
            result[key] = Located(child.value, where)
        return result


def _read_int(text: str) -> int:
    if len(text) > MAX_DIGITS:  # no setting is as large, and thousands of digits cannot be written back
        raise ValueError(text)
    prefixes = {"0o": 8, "0x": 16}
    return int(text, prefixes.get(text[:2], 10))


def _place(where: Origin, path: tuple[str | int, ...]) -> str:
    """File and line, and the key where there is one."""
    return f"{where}: {'.'.join(map(str, path))}" if path else str(where)


def _refuse_controls(text: str, place: str) -> None:
    """A NUL ends a path early, an escape code writes over what a message says, half a surrogate is no text at all."""
    wrong = next((each for each in text if unicodedata.category(each) in ("Cc", "Cs") and each not in LINES), None)
    if wrong is not None:
        raise ConfigError(
            f"{place}: {_show(text)} holds {_show(wrong)}, a character that no setting may have", hint="take it out"
        )


def _show(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")


_READ: dict[str, Callable[[str], Any]] = {
    "str": str,
    "null": lambda text: None,
    "bool": lambda text: {"true": True, "false": False}[text.lower()],
    "int": _read_int,
    "float": float,
}


def name_value(value: Any) -> str:
    """For a message that says what is not wanted."""
    return {list: "a list", type(None): "nothing"}.get(type(value), f"the value {value!r}")
