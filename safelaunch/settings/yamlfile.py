"""Reads YAML and TOML into nodes that know their file and line, for messages.

The files are untrusted: their size is limited, and tags and aliases are errors. A scalar keeps its text (``012`` stays
``"012"``, and ``1:30`` doesn't become 90), because its meaning depends on the option or variable. To save time, the
parsers are imported only when a file is read.
"""

from __future__ import annotations

import importlib
import os
import re
import stat
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from safelaunch.system.errors import PresetError

if TYPE_CHECKING:
    import yaml

MAX_BYTES = 1 << 20

ValueKind = Literal["mapping", "list", "text", "number", "boolean", "nothing"]

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ARTICLES = {"mapping": "a mapping", "list": "a list", "number": "a number", "boolean": "a boolean"}
_TAGS: Mapping[str, ValueKind] = {
    "tag:yaml.org,2002:map": "mapping",
    "tag:yaml.org,2002:seq": "list",
    "tag:yaml.org,2002:str": "text",
    "tag:yaml.org,2002:int": "number",
    "tag:yaml.org,2002:float": "number",
    "tag:yaml.org,2002:bool": "boolean",
    "tag:yaml.org,2002:null": "nothing",
    # dates stay text
    "tag:yaml.org,2002:timestamp": "text",
}


@dataclass(frozen=True, slots=True)
class YamlNode:
    """A value and its place (``where``, ``file:line``). ``text`` is a scalar as written, but without quotes."""

    where: str
    kind: ValueKind
    text: str = ""
    items: tuple[YamlNode, ...] = ()
    entries: tuple[tuple[YamlNode, YamlNode], ...] = ()

    def describe(self) -> str:
        """Returns the kind of value in words: ``a list``, ``text``, ``nothing``."""
        return _ARTICLES.get(self.kind, self.kind)


def nearest(word: str, known: Iterable[str], likeness: float = 0.6) -> str:
    """Returns the name in ``known`` that is most similar to ``word``; "" if none reaches ``likeness`` (1: equal)."""
    import difflib  # late: only errors need it

    names = list(known)
    longer = [name for name in names if len(word) > 2 and name.startswith(word)]
    return next(iter([*difflib.get_close_matches(word, names, n=1, cutoff=likeness), *longer]), "")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns ``; did you mean 'x'?`` to append to a message; "" if no known name is similar."""
    match = nearest(word, known)
    return f"; did you mean {match!r}?" if match else ""


def known_entries(node: YamlNode, known: Iterable[str], what: str) -> Iterator[tuple[str, YamlNode, YamlNode]]:
    """Yields (key, key node, value node) for each entry of a mapping.

    Raises PresetError if ``node`` (called ``what`` in messages) isn't a mapping, or has an unknown key.
    """
    names = list(known)
    for key, value in mapping_entries(node, what):
        if key.text not in names:
            raise PresetError(
                f"{key.where}: unknown key {key.text!r}{did_you_mean(key.text, names)}",
                f"keys of {what}: {', '.join(names)}",
            )
        yield key.text, key, value


def mapping_entries(node: YamlNode, what: str) -> tuple[tuple[YamlNode, YamlNode], ...]:
    """Returns a mapping's entries. Raises PresetError if ``node`` (called ``what`` in messages) isn't a mapping."""
    if node.kind != "mapping":
        raise PresetError(f"{node.where}: {what} must be a mapping, not {node.describe()}")
    return node.entries


def text_of(node: YamlNode, what: str) -> str:
    """Returns a node's text. Raises PresetError if it isn't text, or is blank."""
    if node.kind != "text" or not node.text.strip():
        kind = "empty" if node.kind == "text" else node.describe()
        raise PresetError(f"{node.where}: {what} must be text, not {kind}")
    return node.text


def texts_of(node: YamlNode, what: str) -> tuple[YamlNode, ...]:
    """Returns the node of a text, or the nodes of a list of texts. Raises PresetError for anything else."""
    nodes = node.items if node.kind == "list" else (node,)
    for item in nodes:
        text_of(item, what)
    return nodes


def scalar(node: YamlNode, what: str) -> str:
    """Returns a scalar as written. Raises PresetError if ``node`` isn't a scalar."""
    if node.kind in ("text", "number", "boolean"):
        if "\0" in node.text:
            raise PresetError(f"{node.where}: {what}: text cannot contain a NUL character")
        return node.text
    hint = 'a word that begins with { needs quotes: "{lr}"' if node.kind == "mapping" else ""
    raise PresetError(f"{node.where}: {what}: a value must be text or a number, not {node.describe()}", hint)


def variables_of(node: YamlNode, fix: str, but: Collection[str] = ()) -> tuple[tuple[YamlNode, YamlNode], ...]:
    """Returns the entries of an ``env`` section. Raises PresetError for an invalid name.

    Also raises it for safelaunch's own variables, except those in ``but``; ``fix`` is the remedy in that message.
    """
    for key, _ in mapping_entries(node, "env"):
        if not _VARIABLE.fullmatch(key.text):
            raise PresetError(f"{key.where}: {key.text!r} is not the name of an environment variable")
        if key.text.startswith("SAFELAUNCH_") and key.text not in but:
            raise PresetError(f"{key.where}: {key.text} cannot be set here", fix)
    return node.entries


def not_boolean(node: YamlNode, name: str) -> YamlNode:
    """Returns ``node``, a variable's value. Raises PresetError for words, such as ``yes``, that are YAML booleans."""
    if node.kind == "boolean":
        raise PresetError(
            f"{node.where}: {name}: {node.text} is a boolean, but a variable's value must be text",
            f'write "{node.text}" in quotes, or 1 or 0',
        )
    return node


# --- reading ------------------------------------------------------------------------------------------------


def read_bytes(path: Path, name: str) -> bytes:
    """Returns the content of a regular file of at most 1 MiB. Raises PresetError, which calls the file ``name``."""
    return read_with_owner(path, name)[0]


def read_with_owner(path: Path, name: str) -> tuple[bytes, os.stat_result]:
    """Returns the content, as ``read_bytes`` does, and the status of the opened file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            info = os.fstat(descriptor)
            if not stat.S_ISREG(info.st_mode):
                raise PresetError(f"{name}: not a regular file")
            with open(descriptor, "rb", closefd=False) as file:
                data = file.read(MAX_BYTES + 1)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise PresetError(f"{name}: cannot be read: {reason}", "check the path and its permissions") from error
    if len(data) > MAX_BYTES:
        raise PresetError(f"{name}: larger than 1 MiB, the limit for presets and configuration files")
    return data, info


def decode(data: bytes, name: str) -> str:
    """Decodes UTF-8 with or without a byte order mark. Raises PresetError with the line of the first invalid byte."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise PresetError(f"{name}:{line}: not UTF-8 text", "save the file as UTF-8") from error


def read_yaml(path: Path, name: str) -> YamlNode:
    """Reads a YAML file; the node's kind is ``nothing`` if the file is empty.

    Raises PresetError that says ``name`` and line for an unreadable file, a syntax error, a duplicate key, an anchor or
    alias, a tag, a key that isn't plain, or too deep nesting.
    """
    return parse_yaml(decode(read_bytes(path, name), name), name)


def parse_yaml(text: str, name: str) -> YamlNode:
    """Parses YAML text as ``read_yaml`` does."""
    import yaml

    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        return YamlNode(f"{name}:1", "nothing") if root is None else _YamlTree(name).node(root)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise PresetError(f"{name}:{line}: not valid YAML: {error.problem or error.context}") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise PresetError(f"{name}:{line}: not valid YAML: {error.reason}") from error
    except RecursionError as error:
        raise PresetError(f"{name}: nested too deeply") from error


class _YamlTree:
    """Converts parsed YAML into nodes. Refuses aliases, which appear as the same parsed node a second time."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.seen: set[int] = set()

    def node(self, raw: yaml.Node) -> YamlNode:
        where = f"{self.name}:{raw.start_mark.line + 1}"
        if id(raw) in self.seen:
            raise PresetError(f"{where}: anchors and aliases are not supported", "write the value out where it is used")
        self.seen.add(id(raw))
        if raw.tag not in _TAGS:
            raise PresetError(f"{where}: the tag {raw.tag} is not supported", "write plain text, a list or a mapping")
        kind = _TAGS[raw.tag]
        if isinstance(raw.value, str) != (kind not in ("mapping", "list")):
            raise PresetError(f"{where}: the tag {raw.tag} does not fit what follows it")
        if kind == "mapping":
            return YamlNode(where, kind, entries=self._entries(raw))
        if kind == "list":
            return YamlNode(where, kind, items=tuple(self.node(item) for item in raw.value))
        return YamlNode(where, kind, text=raw.value)

    def _entries(self, raw: yaml.Node) -> tuple[tuple[YamlNode, YamlNode], ...]:
        first_seen: dict[str, str] = {}
        entries = []
        for raw_key, raw_value in raw.value:
            key = self.node(raw_key)
            if key.kind in ("mapping", "list"):
                raise PresetError(f"{key.where}: a key must be a name, not {key.describe()}")
            if key.text in first_seen:
                raise PresetError(f"{key.where}: key {key.text!r} occurs twice (first at {first_seen[key.text]})")
            first_seen[key.text] = key.where
            entries.append((key, self.node(raw_value)))
        return tuple(entries)


def parse_toml_table(text: str, name: str, table: str) -> YamlNode:
    """Returns a table of a TOML file (``tool.safelaunch``; "" means the whole file); kind ``nothing`` if it is absent.

    TOML parsers don't report positions, so an entry's line is the first ``key =`` or sub-table after the header. Raises
    PresetError for a syntax error.
    """
    # By name: the oldest supported Python has no tomllib.
    toml: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        value: Any = toml.loads(text)
    except (ValueError, RecursionError) as error:  # TOMLDecodeError is a ValueError
        raise PresetError(f"{name}: not valid TOML: {error}") from error
    lines = text.splitlines()
    header = re.compile(rf"\s*\[\s*{re.escape(table)}\b")
    start = next((number for number, line in enumerate(lines) if header.match(line)), 0) if table else 0
    for part in table.split(".") if table else ():
        if not isinstance(value, dict) or part not in value:
            return YamlNode(f"{name}:1", "nothing")
        value = value[part]
    return _toml_node(value, name, lines, start)


def _toml_node(value: Any, name: str, lines: list[str], start: int) -> YamlNode:
    where = f"{name}:{start + 1}"
    if isinstance(value, dict):
        entries = []
        for key, item in value.items():
            line = _toml_line(key, lines, start)
            entries.append((YamlNode(f"{name}:{line + 1}", "text", key), _toml_node(item, name, lines, line)))
        return YamlNode(where, "mapping", entries=tuple(entries))
    if isinstance(value, list):
        return YamlNode(where, "list", items=tuple(_toml_node(item, name, lines, start) for item in value))
    if isinstance(value, bool):
        return YamlNode(where, "boolean", str(value).lower())
    return YamlNode(where, "number" if isinstance(value, (int, float)) else "text", str(value))


def _toml_line(key: str, lines: list[str], start: int) -> int:
    spelled = re.compile(rf"""(?:^|[\s.{{,\[])["']?{re.escape(key)}["']?\s*(?:[=.]|\]\s*(?:#|$))""")
    return next((n for n in range(start, len(lines)) if spelled.search(lines[n])), start)
