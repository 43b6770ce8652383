"""Finds a job's secrets in its environment and on its command line: values that have secret names, and their parts."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from urllib.parse import unquote

from safelaunch.system.redaction.redact import by_rule, is_plain_value
from safelaunch.system.redaction.shapes import SecretKind, is_shown, kind_of

LEAST = 4  # characters; the name must identify shorter values
_MOST_PARTS = 64  # per value
# Passwords that occur as words in every log. They are replaced only next to a name like ``password``.
COMMON_WORDS = {
    "root", "admin", "user", "guest", "test", "tests", "train", "training", "trainer", "loss", "error", "errors",
    "warning", "info", "debug", "main", "master", "model", "models", "data", "dataset", "datasets", "rank", "ranks",
    "node", "nodes", "step", "steps", "epoch", "batch", "password", "passwd", "pass", "secret", "token", "default",
    "public", "private", "local", "localhost", "none", "null", "true", "false", "auto", "name", "value", "file",
    "files", "home", "work", "worker", "workers", "host", "port", "time", "start", "stop", "done", "eval", "valid",
    "validation", "checkpoint", "torch", "cuda", "python", "system", "service", "server", "client", "login", "access",
    "open", "close", "read", "write", "number", "string", "float", "tensor", "shape", "size", "device", "gradient",
    "weight", "weights", "bias", "layer", "layers", "input", "output", "label", "labels", "sample", "samples",
}  # fmt: skip
_PATH = re.compile(r"(?:~|\.{1,2})?(?:/[\w.@+~\-]*)+")
_RUN = re.compile(r"[A-Za-z0-9+/=]{20,}")


# ``--db user:password@host``; another rule covers URLs.
_USER_AND_PASSWORD = re.compile(r"(?:\A|[=,;\s])[^\s:/@=,;]{1,64}:([^\s:/@]{3,256})@[\w.\[\]-]")


def secret_values(environment: Mapping[str, str], argv: Iterable[str], ordinary: Iterable[str] = ()) -> tuple[str, ...]:
    """Returns the secrets in the environment and on the command line. Finds them by name, randomness, or within texts.

    Leaves out a value that equals one of ``ordinary`` (directories, names) or a component of one, because otherwise
    every mention of that name would be replaced. Also leaves out a value that is part of an ordinary name, unless it
    can't be a word.
    """
    plain = _Ordinary(ordinary)
    return tuple(sorted({value for _, value in _learned(environment, argv) if value not in plain}))


def left_out(environment: Mapping[str, str], argv: Iterable[str], ordinary: Iterable[str]) -> tuple[str, ...]:
    """Returns the names of variables and options whose values ``secret_values`` leaves out as ordinary."""
    plain = _Ordinary(ordinary)
    return tuple(sorted({name for name, value in _learned(environment, argv) if value in plain}))


class _Ordinary:
    def __init__(self, names: Iterable[str]) -> None:
        self._names = tuple(names)

    def __contains__(self, value: str) -> bool:
        if not is_telling(value):
            return value in self._names
        whole = f"/{value.strip('/')}/"
        return any(whole in f"/{name.strip('/')}/" or (value in name and not is_mixed(value)) for name in self._names)


def _learned(environment: Mapping[str, str], argv: Iterable[str]) -> Iterator[tuple[str, str]]:
    words = list(argv)
    pairs = [(name, part) for name, value in environment.items() for part in _under(kind_of(name), value)]
    pairs += [(name, value) for name, value in environment.items() if not is_shown(name) and _is_random(value)]
    for before, word in pairwise(["", *words]):
        name, equals, value = word.partition("=")
        pairs += [(name if equals else before, password) for password in _USER_AND_PASSWORD.findall(word)]
        if equals:
            pairs += [(name, part) for part in _under(kind_of(name), value)]
        elif before.startswith("-") and "=" not in before and not word.startswith("-"):
            pairs += [(before, part) for part in _under(kind_of(before), word)]
    texts = [*environment.items(), *((word.partition("=")[0], word) for word in words)]
    for name, text in texts:  # passwords in URLs, headers, recognisable shapes
        for begin, end in by_rule(text):
            within = text[begin:end].strip("\"'")
            first = _SEPARATOR.split(within, maxsplit=1)[0]  # ``Password=x;User=y``, ``?key=x&y=z``
            pieces = (within, first) if len(first) >= LEAST and first.lower() not in COMMON_WORDS else (within,)
            pairs += [(name, way) for piece in pieces for way in (piece, unquote(piece))]
    yield from ((name, value) for name, value in pairs if len(value) >= LEAST)


_SEPARATOR = re.compile(r"[;&,]")
_PARTED = re.compile(r"[,;\s]+")
_VERSIONED = re.compile(r"[A-Za-z_\-]*[\-=@<>~]{0,2}\d+(?:\.\d+)+")


def _under(kind: SecretKind, value: str) -> Iterator[str]:
    bare = value.strip().strip("\"'")
    doubtful: SecretKind = "secret" if kind == "maybe" else kind  # an environment variable's name is enough
    if not kind or is_plain_value(doubtful, bare) or (kind != "password" and _is_path(bare)):
        return
    lines = [line.strip() for line in value.splitlines()]
    yield from (line for line in (bare, *lines) if not line.startswith("-----"))
    for pair in bare.split(";"):  # a connection string
        name, equals, part = pair.partition("=")
        if equals and kind_of(name.strip()):
            yield part
    if kind == "secret" and bare.count(":") == 1:  # user:password
        yield bare.partition(":")[2]
    if kind == "secret" and bare.count(" ") == 1 and "\n" not in bare:  # Bearer ...
        yield bare.partition(" ")[2]
    leaves = _leaves(bare)
    yield from leaves or _parts(kind, bare)
    if decoded := _from_base64(bare):  # as in Kubernetes
        yield from _under(kind, decoded)


def _parts(kind: SecretKind, value: str) -> Iterator[str]:
    """Yields the secrets in a list, which can be separated by commas, semicolons, line breaks or spaces."""
    if "-----BEGIN" in value:
        return
    by_space = not re.search(r"[,;\n]", value)
    parts = [part.strip("()[]{}<>\"'") for part in _PARTED.split(value, maxsplit=_MOST_PARTS)[:_MOST_PARTS]]
    for part in parts if len(parts) > 1 else ():
        user, colon, password = part.partition(":")
        for piece in (part, password) if colon and user else (part,):
            if _is_part(piece, kind, by_space):
                yield piece


def _is_part(part: str, kind: SecretKind, by_space: bool) -> bool:
    """True if a part of a secret value is itself a secret, rather than a word, a number, a name or a version."""
    if part.isalpha():
        return not by_space and kind != "maybe" and len(part) >= 6 and part.lower() not in COMMON_WORDS
    if is_plain_value("secret", part) or "://" in part or _is_path(part) or _VERSIONED.fullmatch(part):
        return False
    if by_space and kind == "password":  # a passphrase
        return False
    return len(part) >= 8 or (any(map(str.isdigit, part)) and len(part) >= (6 if by_space else LEAST))


def _from_base64(value: str) -> str:
    if len(value) < 8 or len(value) % 4:
        return ""
    try:
        text = base64.b64decode(value, validate=True).decode("utf-8").strip()
    except ValueError:
        return ""
    return text if text.replace("\n", "").replace("\t", "").isprintable() else ""


def _leaves(text: str) -> list[str]:
    """Returns the strings in a JSON document that aren't words, such as the key in a service account's file."""
    if not text.startswith(("{", "[")):
        return []
    words_found: list[str] = []

    def walk(value: object, name: str) -> None:
        if isinstance(value, dict):
            for key, entry in value.items():
                walk(entry, str(key))
        elif isinstance(value, list):
            for entry in value:
                walk(entry, name)
        elif isinstance(value, str) and (kind_of(name) or not name or _is_random(value) or _is_of_nobody(value)):
            words_found.extend(line for line in value.splitlines() if not line.startswith("-----"))

    try:
        walk(json.loads(text), "")
    except (ValueError, RecursionError):
        return []  # not JSON; the whole value is a secret already
    return words_found


def is_telling(value: str) -> bool:
    """True if ``value`` can't be mistaken for anything else, wherever it occurs."""
    if len(value) < 8 or (value.isdigit() and len(value) < 12):
        return False
    return len(value) >= 16 or not value.isalpha()


def is_mixed(value: str) -> bool:
    """True if a part mixes letters and digits, or if upper and lower case alternate at random."""
    if any(not (part.isalpha() or part.isdigit()) for part in re.split(r"[\W_]+", value) if part):
        return True
    changes = sum(before.islower() != after.islower() for before, after in pairwise(filter(str.isalpha, value)))
    return 3 * changes >= len(value)


def _is_of_nobody(value: str) -> bool:
    return is_telling(value) and is_mixed(value) and "://" not in value and not _is_path(value)


def _is_path(value: str) -> bool:
    return bool(_PATH.fullmatch(value)) and not _is_random(value)


def _is_random(value: str) -> bool:
    """True for 20 or more letters of both cases and digits in random order, unlike a name, path, version or hash."""
    for run in _RUN.findall(value):
        kinds = ["digit" if c.isdigit() else "upper" if c.isupper() else "lower" if c.islower() else "" for c in run]
        changes = sum(before != after for before, after in pairwise(kinds))
        if {"digit", "upper", "lower"} <= set(kinds) and 3 * changes >= len(run):
            return True
    return False
