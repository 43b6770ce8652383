"""Keeps secrets out of everything written and shown. Recognizes them by their names, their shapes, or command options.

Bundles are sent to other people, so a doubtful value is redacted: a redacted setting costs a question, a leaked key
costs an account. Text is searched both as it is and after decoding it in several ways (``readings``).
"""

from __future__ import annotations

import base64
import re
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, pairwise, takewhile

from safelaunch.system.redaction.shapes import SecretKind, Span, is_secret_name, is_shown, kind_of, shapes_in

REDACTED = "[redacted]"
NOT_SHOWN = "[not shown]"

# Truth values, and words before a credential in a header.
_PLAIN_WORD = re.compile(r"true|false|none|null|yes|no|on|off|bearer|basic|digest|negotiate|token", re.IGNORECASE)
_SETTINGS = {
    "enabled", "disabled", "auto", "default", "required", "optional", "always", "never", "local", "file", "keyring",
    "environment", "anonymous", "public", "private", "sasl", "plain", "x509", "oauth", "oauth2", "jwt",
}  # fmt: skip
_SHORT_HASH = re.compile(r"(?=\w*\d)[0-9a-f]{8,12}")
_STORE_WAIT = re.compile(r"wait timeout after \d+ms, \Z")  # message of c10d's store, before the keys
_NUMBER = re.compile(r"-?\d{1,6}(?:\.\d{0,20})?(?:e-?\d{1,4})?", re.IGNORECASE)
_BARE_TOKEN = re.compile(r"[A-Za-z0-9_\-+/=.]{16,}")
_OPAQUE = re.compile(r"[A-Za-z0-9_\-+/=~%]{8,}")
# A place in a file: ``secrets.py:37:``, ``password.yaml:3:5:``.
_FILE = re.compile(r".+\.(?:pyx?|c|cc|cpp|cu|h|hpp|rs|sh|ya?ml|toml|json|cfg|ini)")
_LINE = re.compile(r"\d{1,5}(?::\d{1,4})?[:)\].]{0,3}")
_SIGNAL = re.compile(r"SIG[A-Z0-9]{2,8}")

URL_PASSWORD = re.compile(
    r"(?<![a-zA-Z0-9+.\-])[a-zA-Z][a-zA-Z0-9+.\-]{0,30}://[^\s/@:?#]{0,256}:(?P<value>[^\s/@]{1,1024})@"
)
_URL_TOKEN = re.compile(r"(?<![a-zA-Z0-9+.\-])[a-zA-Z][a-zA-Z0-9+.\-]{0,30}://(?P<value>[^\s/@:?#]{16,1024})@")
_HEADER = re.compile(
    r"(?:\b(?:proxy-)?authorization[\"']?\s{0,8}[:=]\s{0,8}(?:b?[\"'])?(?:(?:bearer|basic|token|digest|negotiate)\s{1,8})?"
    r"|\bbearer\s{1,8}(?=[A-Za-z0-9_\-+/=.]{16}))(?P<value>[^\s\"',;]+)",
    re.IGNORECASE,
)
_COOKIE = re.compile(
    r"\b(?:set-)?cookie[\"']?\s{0,8}:\s{0,8}[\"']?(?P<value>[^\s\"'=;,]{1,128}=[^\r\n\"']+)", re.IGNORECASE
)
# name=value, name: value, "name": "value", ("name", "value"), ["name"] = value; the name decides.
_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.\-]{1,200}"
_ASSIGNED = re.compile(
    rf"(?<![A-Za-z0-9_.\-])-{{0,2}}(?P<name>{_NAME})(?:[\"']?\]?\s{{0,32}}[=:]{{1,2}}>?\s{{0,32}}|[\"']\s{{0,8}},\s{{0,8}}(?=b?[\"']))"
)
_VALUE = re.compile(
    r"[\[(](?:[bruf]{0,2}(?:\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*')(?:,\s{0,8})?)+[\])]?"
    r"|(?:[bruf]{1,2}(?=[\"']))?(?:\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*')|[\"']?(?:[^\s\"',\\]|\\(?![nrt\"']))+"
)
_MORE = re.compile(r"(?:,[^\s\"',=:\\]{4,256}(?![^\s,]))*")  # ``tokens=a,b``
# --name value, '--name', 'value'; a backslash at the end of a line continues it.
_OPTION = re.compile(
    rf"(?<![\w\-])--?(?P<name>{_NAME})(?P<gap>[\"'],?\s{{0,8}}(?=[\"'])|(?:\s|\\\r?\n){{1,32}})"
    r"(?P<value>\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*'|[^\s\"'\-][^\s\"']*)"
)
# curl -u user:password, mysql -ppassword, docker login -p password, sshpass -p password; also as a list of words.
_USER_OPTION = re.compile(
    r"(?<![\w\-])(?:-u|--user|--proxy-user)(?:[\"'],?\s{0,8}[\"']|[\s=]{1,8}[\"']?)[^\s:\"',]{1,128}:(?P<value>[^\s\"']+)"
)
_NEXT_WORD = r"[\"']?,?\s{1,8}[\"']?"
# Programs, and their one-letter options for a password. Elsewhere, ``-p`` is a port, a path, a number.
_CLIENTS = tuple(
    (
        re.compile(rf"(?<![\w\-])(?:{programs})(?!\w)"),
        letter,
        re.compile(rf"(?<=[\s\"'])-{letter}(?:{_NEXT_WORD}(?!-))?(?P<value>[^\s\"',]+)"),
    )
    for programs, letter in (
        (r"(?:mysql|mariadb)[a-z\-]{0,16}|mongo(?:sh)?|sshpass", "p"),
        (rf"(?:docker|podman|nerdctl|az|oc){_NEXT_WORD}login", "p"),
        (r"(?:redis|valkey|keydb)-cli", "a"),
    )
)
_NEXT_COMMAND = re.compile(r"\s(?:&&?|\|\|?)\s|;\s|\n")
_STARTS = {"--", "sudo", "exec", "env", "nice", "nohup"}  # before a program's name
_COMMAND = 512  # characters after a program's name that are searched for options
_CALL = re.compile(r"[A-Za-z_]\w*(?:\.\w+)*[(\[]")  # code that computes a value isn't the value
_TELLS = 256  # first characters of a value, which decide whether it is a secret
_ENCODED = re.compile(r"(?<![A-Za-z0-9+/_\-])[A-Za-z0-9+/_\-]{6,}={0,2}")


# --- text -------------------------------------------------------------------------------------------------------------


def redact_text(text: str) -> str:
    """Replaces everything in free text (logs, tracebacks, messages) that looks like a secret."""
    return replaced(text, secrets_in(text))


def replaced(text: str, spans: Iterable[Span]) -> str:
    parts: list[str] = []
    done = 0
    for begin, end in merged(spans):
        parts += [text[done:begin], REDACTED]
        done = end
    return "".join([*parts, text[done:]]) if parts else text


def merged(spans: Iterable[Span]) -> list[Span]:
    result: list[Span] = []
    for begin, end in sorted(spans):
        if result and begin <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        elif begin < end:
            result.append((begin, end))
    return result


def secrets_in(text: str) -> Iterator[Span]:
    """Yields the parts of ``text`` that look like a secret, however they are escaped or encoded."""
    for reading in readings(text):
        for begin, end in chain(by_rule(reading.text), encoded_in(reading.text, by_rule)):
            yield reading.origin(begin, end)


def encoded_in(text: str, rule: Callable[[str], Iterator[Span]], *, is_text: bool = True) -> Iterator[Span]:
    """Yields Base64 words in which ``rule`` finds a match after decoding.

    If ``is_text``, only words that decode to printable text count.
    """
    words = [(match.span(), _from_base64(match[0])) for match in _ENCODED.finditer(text)]
    words = [(span, plain) for span, plain in words if not is_text or _is_printable(plain)]
    if _any(rule("\n".join(plain for _, plain in words))):
        yield from (span for span, plain in words if _any(rule(plain)))


def _any(spans: Iterator[Span]) -> bool:
    return next(spans, None) is not None


def _from_base64(word: str) -> str:
    bare = word.rstrip("=").replace("-", "+").replace("_", "/")
    bare = bare[:-1] if len(bare) % 4 == 1 else bare
    return base64.b64decode(bare + "=" * (-len(bare) % 4)).decode("utf-8", "replace")


def _is_printable(text: str) -> bool:
    return "\ufffd" not in text and text.replace("\n", "").replace("\t", "").isprintable()


def by_rule(text: str) -> Iterator[Span]:
    """Yields the parts of ``text`` that look like a secret. Doesn't decode, and takes linear time."""
    yield from shapes_in(text)
    if "://" in text:
        yield from _found(URL_PASSWORD, text)
        yield from _found(_URL_TOKEN, text)
    lower = text.lower()
    if "authorization" in lower or "bearer" in lower:
        yield from _found(_HEADER, text)
    if "cookie" in lower:
        yield from _found(_COOKIE, text)
    yield from _assigned(text)
    if "-" in text:
        yield from _options(text)


def _found(pattern: re.Pattern[str], text: str) -> Iterator[Span]:
    for match in pattern.finditer(text):
        if REDACTED not in match["value"]:
            yield match.span("value")


def _assigned(text: str) -> Iterator[Span]:
    done = 0
    for match in _ASSIGNED.finditer(text):
        if match.start() < done:
            continue
        kind = kind_of(match["name"])
        # The beginning decides, so that a long value after many names isn't read many times.
        head = _VALUE.match(text[match.end() : match.end() + _TELLS]) if kind else None
        if head and not _is_plain(kind, match, head[0]) and (value := _VALUE.match(text, match.end())):
            more = _MORE.match(text, value.end()) if match["name"][-1] in "sS" else None
            done = more.end() if more else value.end()
            yield value.start(), done


def _is_plain(kind: SecretKind, assigned: re.Match[str], value: str) -> bool:
    """True if the value is a number, a file's line, words of a log (``session: starting``), code, or redacted text."""
    bare = value.lstrip("brufBRUF").strip("\"'") if value[-1:] in "\"'" else value.strip("\"'")
    name, between = assigned["name"].lower(), assigned[0][len(assigned["name"]) :]
    if is_plain_value(kind, bare) or (name.endswith("pwd") and bare.startswith("/")):
        return True
    if between == ":" and _FILE.fullmatch(name) and _LINE.fullmatch(value):
        return True
    if kind == "secret" and between == " = " and _CALL.match(value):
        return True
    if name == "session" and not _is_opaque(bare):
        return True
    if name in ("key", "keys") and _SHORT_HASH.fullmatch(bare):  # of a cache, a sample, a commit
        return True
    if name == "keys" and _STORE_WAIT.search(
        assigned.string[max(assigned.start("name") - 40, 0) : assigned.start("name")]
    ):
        return True
    ambiguous = name.rstrip("0123456789") in {"token", "session", "pass", "auth", "signature", "cookie"}
    return ambiguous and ":" in between and not _BARE_TOKEN.fullmatch(bare)


def is_plain_value(kind: SecretKind, value: str) -> bool:
    """Returns whether ``value`` isn't a secret, although it has a name of that kind."""
    if not value or REDACTED in value or NOT_SHOWN in value or _PLAIN_WORD.fullmatch(value):
        return True
    if kind == "password":
        return value.isdigit() and len(value) < 3
    return value.lower() in _SETTINGS or bool(_NUMBER.fullmatch(value)) or (kind == "maybe" and not _is_opaque(value))


def _is_opaque(value: str) -> bool:
    # Letters and digits mixed within one part, unlike in ``layer_12`` and ``SIGUSR1``.
    if not _OPAQUE.fullmatch(value) or _SIGNAL.fullmatch(value):
        return False
    return any(not (part.isalpha() or part.isdigit()) for part in re.split(r"[_\-]", value) if part)


def _options(text: str) -> Iterator[Span]:
    for match in _OPTION.finditer(text):
        if not (kind := kind_of(match["name"])):
            continue
        kind = "maybe" if _is_of_another_line(match) else kind
        if kind != "maybe" or not is_plain_value(kind, match["value"].strip("\"'")):
            yield match.span("value")
    for match in _USER_OPTION.finditer(text) if "-u" in text else ():
        if not match["value"].isdigit():  # docker run -u 1000:1000
            yield match.span("value")
    yield from _of_clients(text)


def _is_of_another_line(option: re.Match[str]) -> bool:
    # The rest is on the next line, and the two lines aren't a list of words, one on each.
    if "\n" not in re.sub(r"\\\r?\n", "", option["gap"]) or option["gap"][0] in "\"'":
        return False
    text, begin = option.string, option.start()
    return bool(text[text.rfind("\n", 0, begin) + 1 : begin].strip()) or text[option.end() : option.end() + 1] == " "


def _of_clients(text: str) -> Iterator[Span]:
    for programs, letter, option in _CLIENTS:
        done = 0
        for client in programs.finditer(text) if f"-{letter}" in text else ():
            begin, done = max(client.end(), done), client.end() + _COMMAND
            following = _NEXT_COMMAND.search(text, client.end(), done)
            end = following.start() if following else done
            yield from (match.span("value") for match in option.finditer(text, begin, end))


# --- readings: a text as it is, as a terminal shows it, with escapes decoded ------------------------------------------
# A secret can be written in JSON, ``repr``, a URL or HTML, nested in another text of this kind, or in colours.

MOST_LAYERS = 3  # JSON in JSON in JSON


def _utf8(mark: str) -> str:
    more = mark + "[89ABab][0-9A-Fa-f]"
    several = (("[CDcd][0-9A-Fa-f]", 1), ("[Ee][0-9A-Fa-f]", 2), ("[Ff][0-7]", 3))
    return "|".join([*(f"{mark}{lead}(?:{more}){{{count}}}" for lead, count in several), f"{mark}[0-9A-Fa-f]{{2}}"])


# Repetitions are bounded.
_OF_URLS = _utf8("%")
_OF_HTML = r"&(?:\#\d{1,7}|\#[xX][0-9A-Fa-f]{1,6}|[A-Za-z]{2,8});"
_OF_PROGRAMS = (
    _utf8(r"\\x") + r"|\\u[Dd][89ABab][0-9A-Fa-f]{2}\\u[Dd][C-Fc-f][0-9A-Fa-f]{2}|\\u[0-9A-Fa-f]{4}"
    r"|\\U[0-9A-Fa-f]{8}|\\[0-3][0-7]{2}|\\[abfnrtv0]|\\[^\w\s]|\\_"
)
_ESCAPES = re.compile("|".join((_OF_URLS, _OF_HTML, _OF_PROGRAMS)))
_LETTERS = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "0": "\0"}
# Terminal sequences such as colours, and invisible characters.
_UNSEEN = re.compile(
    r"\x1b(?:\[[0-?]{0,64}[ -/]{0,8}[@-~]|\][^\x07\x1b]{0,256}(?:\x07|\x1b\\)?|[@-Z\\-_])"
    r"|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\xad\u200b-\u200f\u2028-\u202e\u2060\u2066-\u2069\ufeff]"
)


class Reading:
    """A decoded text, with a function that returns the place of each part in the source."""

    def __init__(self, text: str, back: Callable[[int, int], tuple[int, int]]) -> None:
        self.text = text
        self.origin = back


def readings(text: str) -> list[Reading]:
    """Returns ``text``, then the text as a terminal shows it, then the text after decoding each layer of escapes."""
    result = [Reading(text, _here)]
    if shown := _read(result[0], _UNSEEN, _nothing):
        result.append(shown)
    for _ in range(MOST_LAYERS):
        deeper = _read(result[-1], _ESCAPES, _decoded)
        if deeper is None:
            break
        result.append(_read(deeper, _UNSEEN, _nothing) or deeper)
    return result


def _here(begin: int, end: int) -> tuple[int, int]:
    return begin, end


def _nothing(_: str) -> str:
    return ""


def _decoded(escape: str) -> str:
    kind = escape[:2]
    if kind == "\\x" or escape[0] == "%":
        digits = escape.replace("\\x", "").replace("%", "")
        return bytes.fromhex(digits).decode("utf-8", "replace")
    if kind == "\\u":
        return bytes.fromhex(escape.replace("\\u", "")).decode("utf-16-be", "replace")
    if kind == "\\U":
        number = int(escape[2:], 16)
        return chr(number) if number < 0x110000 else escape
    if escape[0] == "&":
        from html import unescape  # with two thousand names, which few texts need

        return unescape(escape)
    return chr(int(escape[1:], 8)) if len(escape) == 4 else _LETTERS.get(kind[1], kind[1])


def _read(before: Reading, pattern: re.Pattern[str], decode: Callable[[str], str]) -> Reading | None:
    # Unchanged parts (even numbers) and replaced ones (odd numbers) alternate: their starts here and in the source.
    here, offsets, parts = array("q", [0]), array("q", [0]), []
    length = done = 0
    for match in pattern.finditer(before.text):
        kept, new = before.text[done : match.start()], decode(match[0])
        parts += [kept, new]
        here.extend((length + len(kept), length + len(kept) + len(new)))
        offsets.extend((match.start(), match.end()))
        length, done = length + len(kept) + len(new), match.end()
    if not parts:
        return None
    text = "".join([*parts, before.text[done:]])
    offsets.append(len(before.text))
    return Reading(text, partial(_origin, here, offsets, before.origin))


def _origin(
    here: array[int], source_offsets: array[int], further: Callable[[int, int], tuple[int, int]], begin: int, end: int
) -> tuple[int, int]:
    """Returns where ``[begin, end)``, with ``end`` > ``begin``, was in the original text.

    If the range contains part of a replacement, the result covers all of the text that was replaced.
    """
    first, last = bisect_right(here, begin) - 1, bisect_right(here, end - 1) - 1
    start = source_offsets[first] if first % 2 else source_offsets[first] + begin - here[first]
    stop = source_offsets[last + 1] if last % 2 else source_offsets[last] + end - here[last]
    return further(start, stop)


# --- environments and command lines -----------------------------------------------------------------------------------


def redact_env(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables, sorted by name.

    Replaces a value completely if its name is secret; otherwise, only the parts that look like secrets.
    """
    return {name: _value(name, environment[name]) for name in sorted(environment)}


def shown_env(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables for other people: as ``redact_env``, but with the values of unknown variables hidden."""
    return {
        name: value if is_shown(name) or value in ("", REDACTED) else NOT_SHOWN
        for name, value in redact_env(environment).items()
    }


def _value(name: str, value: str) -> str:
    return REDACTED if value and is_secret_name(name) else redact_text(value)


def redact_argv(argv: Iterable[str]) -> list[str]:
    """Redacts a command line: ``--token X``, ``--api-key=X``, ``KEY=X``, and secrets by shape."""
    words = [*argv]
    hidden, result, at = _passwords_of_a_client(words), [], 0
    for before, word in pairwise(["", *words]):
        begin = next((position - at for position in hidden if at <= position < at + len(word)), None)
        result.append(_argument(word, before) if begin is None else f"{word[:begin]}{REDACTED}")
        at += len(word) + 1
    return result


def _passwords_of_a_client(words: Sequence[str]) -> list[int]:
    # Positions of passwords in the joined words, if these are a client's command line. ``mysql`` can also be a value.
    together, before = " ".join(words), [*takewhile(_STARTS.__contains__, words)]
    program = next(iter(words[len(before) :]), "")
    begin = sum(len(word) + 1 for word in before) + program.rfind("/") + 1
    is_client = any(programs.match(together, begin) for programs, *_ in _CLIENTS)
    return [begin for begin, _ in _of_clients(together)] if is_client else []


def _argument(argument: str, before: str) -> str:
    name, equals, value = argument.partition("=")
    named = before if before.startswith("-") and "=" not in before else ""
    if named and not argument.startswith("-") and (kind := kind_of(named)):
        return argument if kind == "maybe" and is_plain_value(kind, argument) else REDACTED
    if equals and re.fullmatch(r"-*[A-Za-z_][\w.\-]*", name) and (kind := kind_of(name)):
        return argument if kind == "maybe" and is_plain_value(kind, value) else f"{name}={REDACTED}"
    if named in ("-u", "--user", "--proxy-user"):
        return redact_text(f"{named} {argument}")[len(named) + 1 :]
    return redact_text(argument)
