"""Writes secrets of every kind and encoding to every source of a bundle, and searches bundles for them.

The search shares no code with the redaction: it decodes what it finds, repeatedly.
"""

from __future__ import annotations

import base64
import html
import json
import os
import pickle
import pickletools
import re
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.parse import quote, quote_plus, unquote, unquote_plus

from safelaunch.beacon import caught_exceptions, layout, output
from safelaunch.capture import collect, node
from safelaunch.capture.flight_dump import parse_pickle
from safelaunch.capture.flight_recorder import FlightCapture
from safelaunch.capture.look import Look, ProcessLook, RankLook, Target
from safelaunch.capture.result import Result
from safelaunch.model import EarlyLook, Frame, GilTest, ProcessState, Progress, StackSample, Thread, ThreadState
from safelaunch.report import screen
from safelaunch.supervise import collecting, publishing
from safelaunch.supervise import hooks as onbundle
from safelaunch.supervise.job_context import JobContext
from safelaunch.supervise.kinds import HANG
from safelaunch.supervise.looks import Looks
from safelaunch.system.redaction.job_secrets import secret_values
from safelaunch.system.redaction.redact import shown_env
from safelaunch.system.redaction.redactor import Redactor

# Built from pieces, so that secret scanners do not report this file.
ENVIRONMENT = {
    "HF_TOKEN": "hf_" + "QwErTyUiOpAsDfGhJkLzXcVb",
    "WANDB_API_KEY": "89abcdef0123456789abcdef0123456701234567",
    "DB_PASSWORD": "hunter2",
    "MYSQL_PWD": "swordfish",
    "DOOR_PIN_CODE": "739164",
    "PGPASSWORD": "8273645190",
    "MYPASSPHRASE": "correct horse battery staple",
    "GH_PAT": "pat-Violet-Rhino-44",
    "SAS_SIG": "aB3/xY+7zQ9=mN1/kL5+pR2==",
    "USER_SALT": "s4lt&vinegar<chips>",
    "my_key": "low3rcase-key-of-mine",
    "ODD_SECRET": 'it\'s "quoted" \\ and\tmore',
    "GRUEN_PASSWORD": "Grün-ist-die-Höhe-9€",
    "PLAIN_LOOKING": "Zx81Qm7Lp2Vb9Nt4Rc6Kd3Ws",
    "DATABASE_URL": "postgres://trainer:umbrella-parade-9@db.example:5432/runs",
    "AZURE_STORAGE_CONNECTION_STRING": "AccountName=me;AccountKey=kQ8v0Zr3YtLw5NbXm1Jc7Pd2Hs4Fg6==;Suffix=core",
}
ARGUMENTS = ("train.py", "--auth-token", "argument-77-of-mine", "--lr", "0.1")
# Test name → what a reader of the bundle must not find.
WITHIN = {"DATABASE_URL", "AZURE_STORAGE_CONNECTION_STRING"}  # more than the secret
SECRETS = {
    **{name: value for name, value in ENVIRONMENT.items() if name not in WITHIN},
    "URL": "umbrella-parade-9",
    "AccountKey": "kQ8v0Zr3YtLw5NbXm1Jc7Pd2Hs4Fg6==",
    "argument": "argument-77-of-mine",
}  # fmt: skip
SHORT = {"DB_PASSWORD", "MYSQL_PWD", "DOOR_PIN_CODE", "PGPASSWORD"}
# Recognised by their form alone.
SHAPES = {
    "github": "ghp_" + "a1B2" * 9,
    "openai": "sk-proj-" + "abcd_1234-" * 5,
    "aws": "AKIA" + "QWERTYUIOP123456",
    "sendgrid": "SG." + "aB3dE5gH7jK9mN1pQ3sT5u" + "." + "V7xY9zA1bC3dE5fG7hI9jK1lM3nO5pQ7rS9tU1vW3xY",
    "vault": "hvs." + "CAESIJzQ8Yk2Lm4Np6Rt8Vw0Xz",
    "groq": "gsk_" + "Ab12Cd34Ef56Gh78Ij90Kl12Mn34",
    "jwt": "eyJ" + "hbGciOiJIUzI1NiJ9" + ".eyJ" + "zdWIiOiJsZWFreSJ9" + ".bGVha3lzaWduYXR1cmU",
    "discord": "https://discord.com/api/webhooks/" + "1234567890/aBcDeFgHiJkLmNoPqRsT",
    "teams": "https://acme.webhook.office.com/webhookb2/" + "0a1b2c3d@4e5f/IncomingWebhook/9f8e7d",
}


def _spread(text: str, between: str) -> str:
    third = max(1, len(text) // 3)
    return between.join([text[:third], text[third : 2 * third], text[2 * third :]])


def _base64(before: str, padded: bool = True) -> Callable[[str], str]:
    return lambda text: base64.b64encode((before + text).encode()).decode().rstrip("" if padded else "=")


@dataclass(frozen=True)
class Encoding:
    """A way to write a secret, in which even a ``short`` one can be recognized."""

    name: str
    write: Callable[[str], str]
    short: bool = True


ENCODINGS = (
    Encoding("as it is", str),
    Encoding("after \\n", lambda text: f"failed\\n{text}\\nagain"),
    Encoding("after \\t", lambda text: f"failed\\t{text}\\tagain"),
    Encoding("after \\u001b", lambda text: f"\\u001b[31m{text}\\u001b[0m"),
    Encoding("JSON", json.dumps),
    Encoding("JSON, not ASCII", lambda text: json.dumps(text, ensure_ascii=False)),
    Encoding("JSON in JSON", lambda text: json.dumps(json.dumps({"a": text}))),
    Encoding("repr", repr),
    Encoding("repr of bytes", lambda text: repr(text.encode())),
    Encoding("repr of repr", lambda text: repr(f"it is {text!r}")),
    Encoding("URL", lambda text: quote(text, safe="")),
    Encoding("form", quote_plus),
    Encoding("URL, all of it", lambda text: "".join(f"%{byte:02x}" for byte in text.encode())),
    Encoding("HTML", html.escape),
    Encoding("HTML, numbers", lambda text: "".join(f"&#{ord(c)};" for c in text)),
    Encoding("\\x", lambda text: "".join(f"\\x{byte:02x}" for byte in text.encode())),
    Encoding("\\u", lambda text: "".join(f"\\u{ord(c):04x}" for c in text)),
    Encoding("base64, 0", _base64("")),
    Encoding("base64, 1", _base64(":")),
    Encoding("base64, 2", _base64("u:")),
    Encoding("base64, unpadded", _base64("", padded=False)),
    Encoding("base64 for URLs", lambda text: base64.urlsafe_b64encode(text.encode()).decode()),
    Encoding("base64 of more", lambda text: base64.b64encode(f"a longer text with {text} in it".encode()).decode()),
    Encoding("hexadecimal", lambda text: text.encode().hex()),
    Encoding("HEXADECIMAL", lambda text: text.encode().hex().upper()),
    Encoding("colours", lambda text: _spread(text, "\x1b[1;31m")),
    Encoding("zero width", lambda text: _spread(text, "\u200b")),
    Encoding("in a word", lambda text: f"x{text}x", short=False),
    Encoding("with its name", lambda text: f"password={text}"),
)  # fmt: skip


# The encodings in which secrets are recognised by their form alone.
OF_SHAPES = {
    "as it is",
    "after \\n",
    "after \\t",
    "JSON",
    "JSON in JSON",
    "repr",
    "URL",
    "HTML",
    "base64, 0",
    "colours",
}


def said(encodings: Iterable[Encoding]) -> str:
    """Returns every secret in each of these encodings, one per line."""
    return "\n".join(
        f"it is {encoding.write(secret)} now"
        for encoding in encodings
        for name, secret in SECRETS.items()
        if encoding.short or name not in SHORT
    )


# --- the search -------------------------------------------------------------------------------------------------------


def leaks(data: bytes, secrets: dict[str, str]) -> list[str]:
    """Returns the names of the secrets in ``data``, in any encoding."""
    left = dict(secrets)
    for view in _views(data):
        for name in [name for name, secret in left.items() if _is_in(secret, name, view)]:
            del left[name]
    return sorted(set(secrets) - set(left))


def _is_in(secret: str, name: str, view: str) -> bool:
    if secret not in view:
        return False
    return name not in SHORT or re.search(rf"(?<!\w){re.escape(secret)}(?!\w)", view) is not None


def _views(data: bytes, depth: int = 3) -> Iterator[str]:
    seen: set[int] = set()
    if data[:1] == b"\x80":
        texts = []
        with suppress(ValueError):  # damaged: its bytes are searched below
            texts += [argument for _, argument, _ in pickletools.genops(data) if isinstance(argument, str)]
        yield from _decoded("\n\n".join(texts), depth, seen)
    text = data.decode("utf-8", "replace")
    yield from _decoded(text, depth, seen)


def _decoded(text: str, depth: int, seen: set[int]) -> Iterator[str]:
    if hash(text) in seen:
        return
    seen.add(hash(text))
    yield text
    plain = re.sub("\x1b\\[[0-9;]*[a-zA-Z]|[\u200b-\u200f\u2060\ufeff]", "", text)
    yield plain
    if not depth:
        return
    for one in (
        html.unescape(plain),
        unquote(plain),
        unquote_plus(plain),
        re.sub(r"(?:\\x[0-9a-f]{2})+", lambda m: _bytes_of(m[0].replace("\\x", "")), plain),
        re.sub(r"\\u([0-9a-f]{4})", lambda m: chr(int(m[1], 16)), plain),
        re.sub(r"\\(.)", lambda m: {"n": "\n", "t": "\t"}.get(m[1], m[1]), plain),
    ):
        yield from _decoded(one, depth - 1, seen)
    yield "\n\n".join(map(_bytes_of, re.findall(r"(?:[0-9a-fA-F]{2}){5,}", plain)))
    words = [word.replace("-", "+").replace("_", "/") for word in re.findall(r"[A-Za-z0-9+/_-]{6,}", plain)]
    for start in range(4):
        yield "\n\n".join(filter(None, (_from_base64(word[start:]) for word in words)))


def _from_base64(word: str) -> str:
    word = word[:-1] if len(word) % 4 == 1 else word
    return base64.b64decode(word + "=" * (-len(word) % 4)).decode("utf-8", "replace")


def _bytes_of(digits: str) -> str:
    return bytes.fromhex(digits).decode("utf-8", "replace")


# --- everything that a bundle is made of ------------------------------------------------------------------------------

HOST = "node1"
DEADLINES = (
    (collect, "RANK_DEADLINE_S"),
    (node, "DEADLINE_S"),
    (collecting, "EVIDENCE_DEADLINE_S"),
    (publishing, "PUBLISH_DEADLINE_S"),
)
EXPECTED = {
    "verdict.json", "report.md", "report.html", "manifest.json", "launch.json", "early.json", "(screen)", "(on-bundle)",
    "timeline.perfetto.json",
    *(f"ranks/0/{name}" for name in (
        "stack.txt", "stack.json", "flight_recorder.pickle", "flight_recorder.json", "proc.json", "progress.json",
        "log_tail.txt", "exception.json", "caught.json", "fault.txt", "rank.json")),
    *(f"node/{HOST}/{name}" for name in ("env.json", "nccl.node.4711.log", "binary.log", "beacon.log")),
    *(f"flight_recorder/nccl_trace_rank_{rank}" for rank in ("0", "1", "2", "3.json")),
}  # fmt: skip


@dataclass(frozen=True)
class Written:
    """A bundle of one rank that wrote its secrets everywhere, and the displayed texts by name."""

    path: Path
    shown: dict[str, str]

    def files(self) -> dict[str, bytes]:
        found = {str(path.relative_to(self.path)): path.read_bytes() for path in self.path.rglob("*") if path.is_file()}
        names = "\n".join(str(path.relative_to(self.path)) for path in self.path.rglob("*"))
        shown = {f"({name})": text.encode() for name, text in self.shown.items()}
        return {**found, **shown, "(file names)": names.encode()}


def flight_dump(text: str) -> dict[str, Any]:
    """Returns a dump in c10d's format, with ``text`` in each string that a job can choose."""
    entry = {
        "frames": [{"name": "forward", "filename": "/home/me/train.py", "line": 40}],
        "record_id": 0, "pg_id": 0, "process_group": ("0", text), "collective_seq_id": 1, "p2p_seq_id": 0,
        "profiling_name": f"gloo:all_reduce {text}", "time_created_ns": 1724779239936775119, "input_sizes": [[3, 4]],
        "input_dtypes": ["Float"], "output_sizes": [[3, 4]], "output_dtypes": ["Float"], "state": "scheduled",
        "retired": False, "timeout_ms": 600000, "is_p2p": False,
    }  # fmt: skip
    return {
        "version": "2.10",
        "pg_config": {"0": {"name": "0", "desc": text, "ranks": "[0, 1]", text[:200]: "a key"}},
        "pg_status": {"0": {"last_enqueued_collective": 1, "last_completed_collective": 0}},
        "entries": [entry],
        "comment": text,
    }


def write(text: str, scratch: Path) -> Written:
    """Writes, with the real writer, the bundle of a job whose rank has put ``text`` in every possible place."""
    environment = {**ENVIRONMENT, "NCCL_DEBUG": text.replace("\n", " "), "SOMETHING": text}
    run_dir = scratch / "run"
    page = _run_directory(run_dir, text)
    place = Frame("/home/me/train.py", 40, "train")
    thread = Thread((place, Frame("/home/me/train.py", 90, "<module>")), name=text, os_tid=4711)
    state = ProcessState(
        pid=4711, ppid=1, start_ticks=5, at_s=1.0, name="python", state="S", note=text,
        cmdline=("python", "train.py", text, "--password", text, f"--api-key={text}"),
        threads=(ThreadState(4711, "python", "S", fd_target=f"/data/{text}"),),
    )  # fmt: skip
    sample = Result(StackSample(4711, 1.0, "py-spy dump", (thread,)), "py-spy dump", 0.1)
    look = Look(1.0, 1.1, {0: RankLook(0, ProcessLook(4711, state, sample))})
    target = Target(0, 0, 4711, 5, page_name=page)
    env = Result(shown_env(environment), "/proc/4711/environ", 0.0)
    dump = flight_dump(text)
    raw = pickle.dumps(dump, protocol=2)
    as_json = json.dumps(dump).encode()
    flight = FlightCapture(
        Result(parse_pickle(raw), "pickle", 0.0, note=text), Result(as_json, "json", 0.0), Result(raw, "pickle", 0.0)
    )
    progress = Progress(0, 0, 2, 0, 4711, 5, "torch", step=60, phase=text)
    redactor = Redactor(secret_values(environment, ARGUMENTS, ["/home/me/project", "train.py"]))
    told: dict[str, str] = {}

    class Notifier(onbundle.Notifier):
        def notify(self, verdict: Any, bundle: Path, run_name: str) -> None:
            told["on-bundle"] = "\n".join(onbundle.variables(verdict, bundle, run_name).values())

    about = JobContext(
        run_name="leaky",
        run_dir=run_dir,
        bundle_dir=scratch / "bundles",
        fallback_dir=scratch / "local" / "bundles",
        launch={"command": redactor.argv(["python", *ARGUMENTS, text])},
        host=HOST,
        redactor=redactor,
        notifier=Notifier(),
    )
    known = collecting.JobSnapshot(
        {0: collect.RankBasics(progress, 4711, page, answer=(GilTest(), flight)), 1: collect.RankBasics(pid=4712)},
        2,
        (f"noticed: {text}",),
        (EarlyLook(1.0, 7.0, words=f"rank 0 is blocked in I/O at train.py:40 (read on /data/{text})"),),
    )
    looks = Looks((target,), (look, look), env=env)
    with ExitStack() as patience:  # so many secrets, in so many encodings, take seconds to find; nothing must time out
        for module, name in DEADLINES:
            patience.enter_context(patch.object(module, name, 300.0))
        found = collecting.take_evidence(replace(HANG, asks=False), looks, known, about)
        result = publishing.finish(found.with_facts(stall_s=30.0))
    told["screen"] = redactor.text(screen.screen(result.verdict, bundle_path="", read_line=lambda *_: text))
    return Written(result.published.path, told)


def _run_directory(root: Path, text: str) -> str:
    """Creates the files that torch and rank 0's beacon write. Returns the name of the rank's page."""
    page = layout.page_name(0, 0, 4711)
    base = root / "pages" / page
    base.parent.mkdir(parents=True)
    (root / "flight_recorder").mkdir()
    frames = [{"file": "/home/me/train.py", "line": 40, "function": "train"}]
    error = {"type": "ValueError", "message": text, "time_unix_s": 1.0, "frames": frames, "text": f"Traceback:\n{text}"}
    base.with_name(page + layout.EXCEPTION_SUFFIX).write_text(json.dumps(error))
    base.with_name(page + layout.FAULT_SUFFIX).write_text(f"Fatal Python error: {text}\n\n{text}\n")
    ring = output.Ring(os.fspath(base.with_name(page + layout.RING_SUFFIX)))
    for line in (f"out: {text}\n", f"{text}\n", f"repr: {text!r}\n"):
        ring.append(output.STDOUT, line.encode())
    flat = text.replace("\t", " ").replace("\n", " ")[:200]  # truncated as by the beacon
    slot = "\t".join(["1", "KeyError", flat, "40", "train", "/home/me/train.py", "41", "train", "/home/me/train.py"])
    slots = slot.encode()[: caught_exceptions.SLOT_BYTES - 1].ljust(caught_exceptions.SLOT_BYTES, b"\0")
    base.with_name(page + layout.CAUGHT_SUFFIX).write_bytes(slots)
    dumps = root / "flight_recorder"
    (dumps / "nccl_trace_rank_0").write_bytes(pickle.dumps(flight_dump(text), protocol=2))
    (dumps / "nccl_trace_rank_1").write_bytes(pickle.dumps({**flight_dump(text), "raw": text.encode()}, protocol=4))
    (dumps / "nccl_trace_rank_2").write_bytes(pickle.dumps(flight_dump(text), protocol=2)[:-3])  # damaged
    (dumps / "nccl_trace_rank_3.json").write_text(json.dumps(flight_dump(text)))
    (dumps / "nccl.node.4711.log").write_text(f"NCCL INFO {text}\n")
    (dumps / "binary.log").write_bytes(struct.pack("<Q", 7) + text.encode() + b"\0\xff")
    (root / layout.LOG).write_text(f"beacon: {text}\n")
    return page
