"""Keeps secrets out of bundles: by the name they stand under, and by their shape.

A bundle is made to be sent to somebody else. When in doubt a value is redacted: a redacted setting costs a
question, a leaked key costs an account.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache

REDACTED = "[redacted]"

# Words of a name (split at _, -, . and case changes) that mark its value as a secret.
_SECRET_WORDS = {
    "token", "secret", "secrets", "password", "passwords", "passwd", "passphrase", "pwd", "pass",
    "apikey", "authkey", "credential", "credentials", "creds", "auth", "authorization",
    "bearer", "cookie", "cookies", "session", "sessionid", "jwt", "private", "dsn", "signature",
    "netrc", "webhook",
}  # fmt: skip
# Pairs of words that do so together.
_SECRET_PAIRS = re.compile(
    r"(api|access|secret|private|signing|encryption|account|storage|service|license|auth|master|deploy|ssh|shared)"
    r"_?keys?"
    r"|connection_?string|conn_?str"
)
# Names that hold such a word and are harmless (settings of libraries, locations of sockets).
_HARMLESS = re.compile(
    r"tokenizers?_.*|nccl_.*|(.*_)?token_(ids?|counts?|types?|type_ids|limit|len|length|budget|index|dim|name|size)"
    r"|(pad|eos|bos|unk|mask|sep|cls|image|special)_token"
    r"|pwd|oldpwd|(xdg_|desktop_|gnome_|dbus_|kde_)?session_?(type|class|id|manager|desktop|name|bus_.*)"
    r"|(xdg|desktop|gnome|dbus|kde)_session.*|ssh_auth_sock|(.*_)?auth_?(type|mode|method)"
)
_BARE_TOKEN = re.compile(r"[A-Za-z0-9_\-+/=.]{16,}")

# Numbers, truth values, and the word before a credential in a header.
NOT_SECRET = re.compile(
    r"-?\d{1,6}(\.\d*)?(e-?\d+)?|true|false|none|null|yes|no|on|off|bearer|basic|digest|token", re.IGNORECASE
)

_SHAPES = re.compile(
    r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----.*?(?:-----END [A-Z0-9 ]*PRIVATE KEY-----|\Z)"
    r"|\b(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}|glpat-[A-Za-z0-9_\-]{16,})"
    r"|\b(?:hf_[A-Za-z0-9]{20,}|api_org_[A-Za-z0-9]{20,}|r8_[A-Za-z0-9]{30,})"
    r"|\bsk-[A-Za-z0-9_\-]{20,}|\bsk_(?:live|test)_[A-Za-z0-9]{16,}"
    r"|\bxox[abeoprs]-[A-Za-z0-9\-]{10,}|\bxapp-[A-Za-z0-9\-]{10,}"
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\bAIza[A-Za-z0-9_\-]{35}|\bya29\.[A-Za-z0-9_\-]{20,}"
    r"|\bpypi-[A-Za-z0-9_\-]{32,}|\bnpm_[A-Za-z0-9]{36}|\bdop_v1_[a-f0-9]{64}"
    r"|\beyJ[A-Za-z0-9_\-]{8,2000}\.eyJ[A-Za-z0-9_\-]{8,}(?:\.[A-Za-z0-9_\-]*)?"
    r"|https://hooks\.slack\.com/[A-Za-z0-9/_\-]+",
    re.DOTALL,
)
# One of these is in every text that _SHAPES matches: looking for them costs a twentieth of looking for the shapes.
_MARKS = (
    "PRIVATE KEY-----", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-", "hf_", "api_org_", "r8_",
    "sk-", "sk_", "xox", "xapp-", "AKIA", "ASIA", "AIza", "ya29.", "pypi-", "npm_", "dop_v1_", "eyJ", "hooks.slack.com",
)  # fmt: skip
_KEY_END = re.compile(r"-----END [A-Z0-9 ]*PRIVATE KEY-----")
_KEY_LINE = re.compile(r"[A-Za-z0-9+/]{16,}={0,2}\s*\Z")
URL_PASSWORD = re.compile(r"(?P<head>\b[a-zA-Z][a-zA-Z0-9+.\-]{0,30}://)(?P<user>[^\s/@:?#]*):(?P<password>[^\s/@]+)@")
_URL_TOKEN = re.compile(r"(?P<head>\b[a-zA-Z][a-zA-Z0-9+.\-]{0,30}://)[^\s/@:?#]{16,}@")
_HEADER = re.compile(
    r"(?P<head>\b(?:proxy-)?authorization[\"']?\s*[:=]\s*[\"']?(?:(?:bearer|basic|token|digest|negotiate)\s+)?"
    r"|\bbearer\s+(?=[A-Za-z0-9_\-+/=.]{16})"
    r"|\b(?:set-)?cookie\s*:\s*)[^\s\"',;]+",
    re.IGNORECASE,
)
# name=value, name: value, "name": "value", --name value; the name decides.
_ASSIGNED = re.compile(r"(?P<name>(?<![A-Za-z0-9_])[A-Za-z][A-Za-z0-9_.\-]{1,63})[\"']?(?P<sep>\s*[=:]\s*)(?=[^\s,])")
_VALUE = re.compile(r"\"[^\"\n]*\"|'[^'\n]*'|[^\s\"',]+")
_OPTION = re.compile(
    r"(?P<head>(?<!\S)--?(?P<name>[A-Za-z][A-Za-z0-9_.\-]+)\s+)(?P<value>\"[^\"\n]*\"|'[^'\n]*'|[^\s\-]\S*)"
)


@lru_cache(maxsize=4096)
def is_secret_name(name: str) -> bool:
    """Whether a variable, option or key called ``name`` is taken to hold a secret."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.lstrip("-"))
    words = re.sub(r"[\s.\-]+", "_", words).lower().strip("_")
    if _HARMLESS.fullmatch(words):
        return False
    if _SECRET_PAIRS.search(words) or re.fullmatch(r"[A-Z0-9_]+_KEY", name):
        return True
    return any(part in _SECRET_WORDS or part.endswith(("password", "secret")) for part in words.split("_"))


def redact_env(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables, sorted by name; values of secret names replaced whole, others by their shape."""
    return {name: _value(name, environment[name]) for name in sorted(environment)}


def redact_argv(argv: Iterable[str]) -> list[str]:
    """A command line with ``--token X``, ``--api-key=X``, ``KEY=X`` and secrets by shape replaced."""
    result: list[str] = []
    secret_next = False
    for argument in argv:
        name, equals, _ = argument.partition("=")
        if secret_next and not argument.startswith("-"):
            result.append(REDACTED)
        elif equals and re.fullmatch(r"-*[A-Za-z][\w.\-]*", name) and is_secret_name(name):
            result.append(f"{name}={REDACTED}")
        else:
            result.append(redact_text(argument))
        secret_next = not equals and argument.startswith("-") and is_secret_name(argument)
    return result


def redact_text(text: str) -> str:
    """Free text (logs, tracebacks, messages) with everything replaced that looks like a secret."""
    text = redact_shapes(text)
    if "://" in text:
        text = URL_PASSWORD.sub(rf"\g<head>\g<user>:{REDACTED}@", text)
        text = _URL_TOKEN.sub(rf"\g<head>{REDACTED}@", text)
    text = _HEADER.sub(rf"\g<head>{REDACTED}", text)
    return _OPTION.sub(_option, _redact_assignments(text))


def _beheaded_key(text: str) -> str:
    """The end of a private key whose beginning was cut off: its lines of base64, whatever a log has put before them."""
    end = _KEY_END.search(text)
    if end is None:
        return text
    begin = text.rfind("\n", 0, end.start()) + 1
    while begin and _KEY_LINE.search(text, line := text.rfind("\n", 0, begin - 1) + 1, begin):
        begin = line
    return f"{text[:begin]}{REDACTED}{text[end.end() :]}"


def redact_shapes(text: str) -> str:
    """Only what is a secret by its shape alone: safe for markup, which other replacements could damage."""
    return _beheaded_key(_SHAPES.sub(REDACTED, text)) if any(mark in text for mark in _MARKS) else text


def _value(name: str, value: str) -> str:
    return REDACTED if value and is_secret_name(name) else redact_text(value)


def _redact_assignments(text: str) -> str:
    parts: list[str] = []
    done = 0
    for match in _ASSIGNED.finditer(text):
        if match.start() < done or not is_secret_name(match["name"]):
            continue
        value = _VALUE.match(text, match.end())
        if value and not _is_plain(match, value[0]):
            parts += [text[done : match.end()], REDACTED]
            done = value.end()
    return "".join([*parts, text[done:]])


def _option(match: re.Match[str]) -> str:
    return f"{match['head']}{REDACTED}" if is_secret_name(match["name"]) else match[0]


def _is_plain(assigned: re.Match[str], value: str) -> bool:
    """A number, words of a log line (``session: starting``, ``token: the``), or already redacted."""
    bare = value.strip("\"'")
    if REDACTED in bare or NOT_SECRET.fullmatch(bare):
        return True
    ambiguous = assigned["name"].lower() in {"token", "session", "pass", "auth"}
    return ambiguous and ":" in assigned["sep"] and not _BARE_TOKEN.fullmatch(bare)
