"""The same command line through torchrun and through safelaunch: what a user, a script and a scheduler see is the same.

Each pair runs at the same time, in two working directories that hold the same files. What differs between two runs of
torchrun itself (ports, pids, times, temporary names) is put aside; everything else has to be equal.
"""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import port_of_its_own
from tests.support.waiting import until

pytestmark = pytest.mark.torch

BIN = Path(sys.executable).parent
LAUNCHERS = ("torchrun", "safelaunch")
TAG = "TWIN_UNDER_TEST"
PATIENCE_S = 120.0


def some_nightly(cases: Iterable[str], nightly: Collection[str]) -> list[Any]:
    return [pytest.param(case, id=case, marks=[pytest.mark.nightly] if case in nightly else []) for case in cases]


# What each rank sees of the world, written to a file of its own.
OBSERVE = """
    import atexit, io, json, os, resource, signal, sys, threading

    def stream(file):
        names = ("name", "mode", "encoding", "errors", "line_buffering", "write_through", "newlines", "closed")
        return {
            **{name: getattr(file, name) for name in names},
            "fd": file.fileno(), "tty": file.isatty(), "type": type(file).__name__,
            "unbuffered": isinstance(file.buffer, io.FileIO),
        }

    def descriptors():
        links = {}
        # --run-path brings torch with it, and torch's own sockets
        for fd in range(3 if "torch" in sys.modules else 10):
            try:
                link = os.readlink(f"/proc/self/fd/{fd}").split(":")[0]
            except OSError:
                continue
            # a mapping has a descriptor of its own, before Python 3.13
            if "SAFELAUNCH_RUN_DIR" not in os.environ or not link.startswith(os.environ["SAFELAUNCH_RUN_DIR"]):
                links[fd] = link
        return links

    def signals():
        known = {number.name: str(signal.getsignal(number)) for number in signal.Signals}
        with open("/proc/self/status") as file:  # left open, -W error would have both ranks complain piece by piece
            status = file.read()
        masks = {name: status.split(name + ":")[1].split()[0] for name in ("SigBlk", "SigIgn")}
        # 32 and 33 belong to the C library
        return {**known, **{name: int(mask, 16) & ~(3 << 31) for name, mask in masks.items()}}

    rank = os.environ.get("RANK", "?")
    seen = {
        "descriptors": descriptors(), "env": dict(os.environ), "argv": sys.argv, "path": sys.path,
        "flags": list(sys.flags), "orig_argv": sys.orig_argv, "cwd": os.getcwd(), "name": __name__,
        "file": globals().get("__file__"), "executable": sys.executable, "warnoptions": sys.warnoptions,
        "xoptions": sys._xoptions, "signals": signals(), "own_session": os.getsid(0) == os.getpid(),
        "umask": os.umask(0o22), "limits": [resource.getrlimit(n) for n in range(10)],
        "threads": threading.active_count(), "stdin": sys.stdin.read() if rank == "0" else None,
        "streams": [stream(file) for file in (sys.stdin, sys.stdout, sys.stderr)],
        "originals": [sys.stdout is sys.__stdout__, sys.stderr is sys.__stderr__],
        "builtins": [hasattr(__builtins__, "sitecustomize"), "safelaunch" in sys.modules],
    }
    with open(f"seen-{rank}.json", "w") as file:
        json.dump(seen, file, default=str)
    # One write each: ranks are unbuffered, and two that print piece by piece interleave differently each time.
    sys.stdout.write(f"out of rank {rank}\\n")
    sys.stderr.write(f"err of rank {rank}\\n")
"""


@dataclass
class Run:
    """One launcher's run, ended or under way."""

    launcher: str
    cwd: Path
    process: subprocess.Popen[bytes]
    tag: str
    code: int = -1
    stdout: bytes = b""
    stderr: bytes = b""

    def seen(self) -> dict[str, Any]:
        """What the ranks observed, by rank."""
        found = {path.stem: json.loads(self.plain(path.read_text())) for path in sorted(self.cwd.glob("seen-*.json"))}
        for rank in found.values():
            rank["env"] = environment(rank["env"])
        return found

    def files(self) -> dict[str, str]:
        """Every file that the run left in its working directory; temporary parts of the names put aside."""
        found = {}
        for path in sorted(self.cwd.rglob("*")):
            name = self.plain(os.fspath(path.relative_to(self.cwd)))
            if path.is_file() and not re.search("seen-|safelaunch-bundles|__pycache__", name):
                found[name] = self.plain(path.read_text("latin-1"))
        return found

    def plain(self, text: str) -> str:
        """``text`` without what differs between two runs of torchrun."""
        return plain(text.replace(os.fspath(self.cwd), "<cwd>").replace(self.tag, "<tag>"))

    @property
    def own_lines(self) -> list[str]:
        return [line for line in self.stderr.decode("latin-1").splitlines() if line.startswith("safelaunch: ")]

    def complaints(self) -> list[str]:
        """stderr without safelaunch's own lines, sorted: ranks and agent interleave."""
        lines = self.stderr.decode("latin-1").splitlines()
        return sorted(self.plain(line) for line in lines if not line.startswith("safelaunch: "))

    def left(self) -> list[int]:
        """Processes of this run that are still there; zombies have no environment and do not count."""
        mark = f"{TAG}={self.tag}".encode()
        found = []
        for entry in list(os.scandir("/proc")):
            if entry.name.isdigit() and int(entry.name) != self.process.pid:
                try:
                    if mark in Path(entry.path, "environ").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
                except OSError:
                    continue
        return found


# Options of the launcher (and of Python) that make no two runs equal.
PLAIN = [
    (r"\b([WEIF])\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ ", r"\1<time> <pid> "),
    (r"\[([WEIF])\d{4} \d\d:\d\d:\d\d\.\d+ ", r"[\1<time> "),
    (r"\d{4}-\d\d-\d\d_\d\d:\d\d:\d\d", "<date>"),
    (r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(,\d+)?", "<date>"),
    (r"torchelastic_\w{8}/[\w-]+_\w{8}\b", "torchelastic_<tmp>"),
    (r"\b(pid|PID|[Pp]rocess)(:? )\d+", r"\1\2<pid>"),
    (r"\b0x[0-9a-f]+", "<address>"),
    (r"/dev/pts/\d+", "/dev/pts/<n>"),
    (r"\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}_\w{8}\b", "<run>"),
    (r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", "<uuid>"),
    (r":\d{4,5}\b", ":<port>"),
    (r"\b(tracker_fd|pipe_handle)=\d+", r"\1=<fd>"),
]


def plain(text: str) -> str:
    for pattern, replacement in PLAIN:
        text = re.sub(pattern, replacement, text)
    return text


def environment(seen: Mapping[str, str]) -> dict[str, str]:
    """A rank's environment without our own variables, and without the port that torchrun draws."""
    kept = {name: value for name, value in seen.items() if not name.startswith("SAFELAUNCH_")}
    if "MASTER_PORT" in kept:
        kept["MASTER_PORT"] = "<port>"
    return kept


class Twins:
    """Starts torchrun and safelaunch side by side on the same files, words, environment and stdin."""

    def __init__(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path
        self.files: dict[str, bytes] = {}
        self.runtime = Path(tempfile.mkdtemp(prefix="sl-", dir="/tmp"))
        self.runs: list[Run] = []

    def file(self, name: str, text: str | bytes, mode: int = 0o644) -> None:
        """A file that both working directories have."""
        data = text if isinstance(text, bytes) else textwrap.dedent(text).encode()
        self.files[name] = data
        for launcher in LAUNCHERS:
            path = self.tmp_path / launcher / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            path.chmod(mode)

    def start(self, *words: str, env: Mapping[str, str] | None = None, stdin: bytes = b"", **more: Any) -> list[Run]:
        """Both under way. ``{cwd}`` in a value of ``env`` or a word is the working directory."""
        started = []
        for launcher in LAUNCHERS:
            cwd = self.tmp_path / launcher
            cwd.mkdir(exist_ok=True)
            tag = uuid.uuid4().hex
            (cwd.parent / f"{launcher}.stdin").write_bytes(stdin)
            environ = self.environ(tag, {k: v.replace("{cwd}", os.fspath(cwd)) for k, v in (env or {}).items()})
            command = [os.fspath(BIN / launcher), *(word.replace("{cwd}", os.fspath(cwd)) for word in words)]
            with (
                (cwd.parent / f"{launcher}.stdin").open("rb") as given,
                (cwd.parent / f"{launcher}.out").open("wb") as out,
                (cwd.parent / f"{launcher}.err").open("wb") as err,
            ):
                process = subprocess.Popen(
                    command, cwd=cwd, env=environ, **{"stdin": given, "stdout": out, "stderr": err, **more}
                )
            started.append(Run(launcher, cwd, process, tag))
        self.runs += started
        return started

    def environ(self, tag: str, more: Mapping[str, str]) -> dict[str, str]:
        strange = ("SAFELAUNCH_", "PYTEST_", "PET_", "TORCHELASTIC_", "PYTHON", "_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(strange)}
        ours = {"OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": os.fspath(self.runtime), TAG: tag}
        return {**kept, **port_of_its_own(), **ours, **more}

    def finish(self, runs: list[Run]) -> tuple[Run, Run]:
        """Both ended, their output read, nothing left of either."""
        for run in runs:
            run.code = run.process.wait(PATIENCE_S)
        for run in runs:
            run.stdout = (run.cwd.parent / f"{run.launcher}.out").read_bytes()
            run.stderr = (run.cwd.parent / f"{run.launcher}.err").read_bytes()
            until(lambda run=run: not run.left(), f"the end of what {run.launcher} started")
        return runs[0], runs[1]

    def run(
        self, *words: str, env: Mapping[str, str] | None = None, stdin: bytes = b"", **more: Any
    ) -> tuple[Run, Run]:
        return self.finish(self.start(*words, env=env, stdin=stdin, **more))

    def same(
        self, *words: str, env: Mapping[str, str] | None = None, stdin: bytes = b"", code: int = 0, **more: Any
    ) -> tuple[Run, Run]:
        """Runs both and compares everything; ``code`` is what torchrun itself is expected to return."""
        theirs, ours = self.run(*words, env=env, stdin=stdin, **more)
        compare(theirs, ours)
        assert theirs.code == code, theirs.stderr.decode("latin-1")
        return theirs, ours

    def clean_up(self) -> None:
        for run in self.runs:
            if run.process.poll() is None:
                run.process.kill()
                run.process.wait(60)
            for _ in range(500):
                pids = run.left()
                for pid in pids:
                    try:
                        os.kill(pid, signal.SIGKILL)
                    except ProcessLookupError:
                        pass
                if not pids:
                    break
                time.sleep(0.02)
        shutil.rmtree(self.runtime, ignore_errors=True)


def compare(theirs: Run, ours: Run, *, frames: bool = True) -> None:
    """``frames`` False: where a signal met the launcher, the frames of its traceback depend on the moment."""
    assert ours.code == theirs.code, ours.stderr.decode("latin-1")
    if b"[Gloo]" in ours.stdout + theirs.stdout:  # of torch before 2.13; ranks print it in pieces, between each other's
        assert sorted(ours.stdout) == sorted(theirs.stdout)
    else:
        assert sorted(ours.stdout.splitlines(keepends=True)) == sorted(theirs.stdout.splitlines(keepends=True))
    ours_said, theirs_said = ours.complaints(), theirs.complaints()
    if not frames:
        # Of a frame in a line that is broken, Python shows an empty one, too.
        ours_said, theirs_said = ([x for x in said if x and x[0] != " "] for said in (ours_said, theirs_said))
    assert ours_said == theirs_said
    assert "Server listening" not in ours.stderr.decode("latin-1") + ours.stdout.decode("latin-1")
    assert differences(theirs.seen(), ours.seen()) == []
    assert ours.files() == theirs.files()


def differences(theirs: Any, ours: Any, path: str = "") -> list[str]:
    """Where two documents differ, in words."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        keys = sorted({*theirs, *ours}, key=str)
        return [x for key in keys for x in differences(theirs.get(key), ours.get(key), f"{path}/{key}")]
    return [] if theirs == ours else [f"{path}: torchrun {theirs!r}, safelaunch {ours!r}"]


@pytest.fixture
def twins(tmp_path: Path) -> Iterator[Twins]:
    made = Twins(tmp_path)
    yield made
    made.clean_up()


def no_bundle(run: Run) -> bool:
    return not (run.cwd / "safelaunch-bundles").exists()


# --- what a healthy job sees ------------------------------------------------------------------------------------------

SITE = """
    import os, sys
    rank = os.environ.get("RANK")
    if rank is not None:
        with open(os.path.join(os.path.dirname(__file__), "site-ran-" + rank), "a") as file:
            file.write("ran as " + __name__ + " with RANK " + rank + "\\n")
"""


@pytest.mark.nightly
def test_one_rank(twins: Twins) -> None:
    """Arguments that look like our options are the script's; stdin reaches rank 0."""
    twins.file("observe.py", OBSERVE)
    _, ours = twins.same(
        "--nproc-per-node", "1", "observe.py", "--preset", "x", "--stall-timeout", "--dry-run",
        stdin=b"a line\nand another, without an end",
    )  # fmt: skip
    seen = ours.seen()["seen-0"]
    assert seen["stdin"] == "a line\nand another, without an end"
    assert seen["argv"] == ["observe.py", "--preset", "x", "--stall-timeout", "--dry-run"]
    assert "PYTHONPATH" not in seen["env"]
    assert seen["own_session"]
    late = ("--dry-run", "--preset", "--stall-timeout")
    said = [line.partition(",")[0] for line in ours.own_lines]
    assert said == [f"safelaunch: {option} comes after observe.py" for option in late]
    assert no_bundle(ours)
    assert list((twins.runtime / "safelaunch").iterdir()) == [], "the run directory is gone"


def test_two_ranks_with_the_users_own_sitecustomize(twins: Twins) -> None:
    """Our options between torchrun's; PYTHONPATH reaches the ranks as it was; what it holds is found, once."""
    twins.file("observe.py", OBSERVE.replace("import atexit", "import helper, atexit"))
    twins.file("lib/sitecustomize.py", SITE)
    twins.file("lib/helper.py", "")
    runs = twins.start("--nproc_per_node=2", "--standalone", "observe.py", env={"PYTHONPATH": "{cwd}/lib::{cwd}/none"})
    theirs, ours = twins.finish(runs)
    compare(theirs, ours)
    assert ours.code == 0
    assert ours.seen()["seen-1"]["env"]["PYTHONPATH"] == "<cwd>/lib::<cwd>/none"
    assert ours.files()["lib/site-ran-1"] == "ran as sitecustomize with RANK 1\n"


@pytest.mark.nightly
def test_an_empty_pythonpath_and_an_abbreviation(twins: Twins) -> None:
    twins.file("observe.py", OBSERVE)
    _, ours = twins.same("--standal", "--nnod=1", "observe.py", env={"PYTHONPATH": ""})
    assert ours.seen()["seen-0"]["env"]["PYTHONPATH"] == ""


@pytest.mark.nightly
def test_a_module_a_pet_variable_and_pythons_options_from_the_environment(twins: Twins) -> None:
    twins.file("package/__init__.py", "")
    twins.file("package/train.py", OBSERVE)
    python = {"PYTHONWARNINGS": "error", "PYTHONUTF8": "0", "PYTHONIOENCODING": "latin-1"}
    _, ours = twins.same("-m", "package.train", "-m", "x", env={"PET_NPROC_PER_NODE": "2", **python})
    assert ours.seen()["seen-1"]["argv"] == ["<cwd>/package/train.py", "-m", "x"]


@pytest.mark.nightly
def test_run_path(twins: Twins) -> None:
    twins.file("observe.py", OBSERVE)
    _, ours = twins.same("--run-path", "--nproc-per-node=2", "{cwd}/observe.py", "--gpus", "3")
    assert ours.seen()["seen-1"]["argv"][1:] == ["--gpus", "3"]


@pytest.mark.nightly
def test_no_python_with_a_shell_script(twins: Twins) -> None:
    """A shell that runs a helper first, then a Python that is the rank. The rank's own environment is the user's."""
    twins.file("observe.py", OBSERVE)
    script = (
        f"#!/bin/sh\n{sys.executable} -c 'print(1 + 1)'\necho shell $RANK $1\nexec {sys.executable} observe.py \"$@\"\n"
    )
    twins.file("job.sh", script, 0o755)
    _, ours = twins.same("--no-python", "--nproc-per-node=2", "./job.sh", "--wait")
    assert sorted(ours.stdout.splitlines()) == [
        b"2", b"2", b"out of rank 0", b"out of rank 1", b"shell 0 --wait", b"shell 1 --wait",
    ]  # fmt: skip
    assert "PYTHONPATH" not in ours.seen()["seen-1"]["env"]


@pytest.mark.nightly
def test_no_python_with_a_program(twins: Twins) -> None:
    """No Python ever runs in this rank, so nobody is there to put our way in aside: it shows, and nothing else does."""
    theirs, ours = twins.run("--no-python", "env")

    def variables(run: Run) -> dict[str, str]:
        pairs = (line.partition("=")[::2] for line in run.plain(run.stdout.decode()).splitlines())
        return environment(dict(pairs))

    shown = variables(ours)
    assert shown.pop("PYTHONPATH").endswith("/safelaunch/beacon/inject")
    assert shown == variables(theirs)
    assert (ours.code, ours.complaints()) == (theirs.code, theirs.complaints()) == (0, [])


@pytest.mark.nightly
def test_isolated_ranks(twins: Twins) -> None:
    """``python -I`` never looks at PYTHONPATH: no beacon, and no other difference either."""
    twins.file("observe.py", OBSERVE.replace("dict(os.environ)", "{**os.environ, 'PYTHONPATH': 'as it may be'}"))
    twins.same("--no-python", sys.executable, "-I", "observe.py")


@pytest.mark.nightly
def test_modules_in_the_working_directory_that_are_named_like_others(twins: Twins) -> None:
    """They take the real ones' place for the script, as they always did, but not for safelaunch or torchrun."""
    for name in ("queue", "yaml", "sitecustomize", "psutil", "msgspec", "signal", "safelaunch_", "json"):
        twins.file(f"{name}.py", f"raise RuntimeError('{name} of the working directory')")
    twins.file("show.py", "try:\n    import queue\nexcept RuntimeError as error:\n    print(error)\n")
    _, ours = twins.same("show.py")
    assert ours.stdout == b"queue of the working directory\n"


def test_output_of_every_kind(twins: Twins) -> None:
    """Bytes that are no text, partial lines, C-level writes, a child's writes, redirected and replaced streams."""
    twins.file("speak.py", """
        import contextlib, io, os, subprocess, sys
        sys.stdout.buffer.write(b"\\xff\\xfe\\x00 raw\\n")
        sys.stdout.flush()
        os.write(1, b"by descriptor\\n")
        print("r\\u00e9sum\\u00e9 \\u4f60", end="\\r", flush=True)
        print("progress", end="", flush=True)
        subprocess.run(["echo", "by a child"])
        with contextlib.redirect_stdout(io.StringIO()) as kept:
            print("kept")
        print(kept.getvalue(), "given back")
        sys.stderr.write("partial")
        sys.stderr.flush()
        sys.stderr.write(" line\\n")
        sys.stdout.reconfigure(encoding="ascii", errors="backslashreplace")
        print("caf\\u00e9")
        sys.stdout = open(1, "w", encoding="utf-16", closefd=False)
        print("replaced")
        sys.stdout.flush()
        sys.stdout = sys.__stdout__
        saved = os.dup(1)
        os.dup2(os.open("elsewhere", os.O_WRONLY | os.O_CREAT), 1)
        print("into a file", flush=True)
        os.dup2(saved, 1)
        print("x" * 200_000)
    """)  # fmt: skip
    theirs, ours = twins.same("speak.py", env={"PYTHONIOENCODING": "utf-8"})
    assert ours.stdout == theirs.stdout, "in this order"
    assert len(ours.stdout) > 200_000
    assert ours.files()["elsewhere"] == "into a file\n"


@pytest.mark.nightly
def test_a_closed_stdout(twins: Twins) -> None:
    """The script closes its streams; what it writes then fails as it did, and its end is as it was."""
    twins.file("close.py", """
        import os, sys
        print("before", flush=True)
        sys.stdout.close()
        try:
            print("after")
        except ValueError as error:
            os.write(2, f"{error}\\n".encode())
        os.close(2)
    """)  # fmt: skip
    _, ours = twins.same("close.py")
    assert ours.stdout == b"before\n"


@pytest.mark.nightly
def test_a_reader_that_goes_away(twins: Twins) -> None:
    """``... | head -1``: the rank's broken pipe is the rank's; it ends as it would."""
    twins.file("much.py", """
        import signal, sys
        try:
            for number in range(1_000_000):
                print(number)
        except BrokenPipeError:
            print("broken pipe", file=sys.stderr)
            sys.stderr.flush()
            import os; os._exit(7)
    """)  # fmt: skip
    runs = twins.start("much.py", stdout=subprocess.PIPE)
    for run in runs:
        assert run.process.stdout is not None
        assert run.process.stdout.readline() == b"0\n"
        run.process.stdout.close()
    theirs, ours = twins.finish(runs)
    compare(theirs, ours)
    assert ours.code == 1
    assert "broken pipe" in ours.complaints()


# --- logs and restarts ------------------------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize("option", some_nightly(["--tee=3", "--redirects=3"], ["--redirects=3"]))
def test_logs(twins: Twins, option: str) -> None:
    twins.file("observe.py", OBSERVE)
    _, ours = twins.same("-t", "0", option, "--log-dir", "logs", "--nproc-per-node=2", "observe.py")
    assert ours.files()["logs/<run>/attempt_0/1/stdout.log"] == "out of rank 1\n"
    assert (b"out of rank 1" in ours.stdout) == ("tee" in option)


@pytest.mark.nightly
def test_a_restart(twins: Twins) -> None:
    """The first attempt fails on one rank, the second goes through: code 0, no bundle needed to know that."""
    twins.file("twice.py", """
        import os, sys, time
        attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), os.environ["RANK"]
        sys.stdout.write(f"attempt {attempt} of rank {rank}\\n")
        if attempt == 0:
            open("came-" + rank, "w")
            while not (os.path.exists("came-0") and os.path.exists("came-1")):
                time.sleep(0.01)
            if rank == "0":
                raise ValueError("at the first attempt")
            time.sleep(1000)
        sys.stdout.write(f"done {rank}\\n")
    """)  # fmt: skip
    theirs, ours = twins.run("--max-restarts", "1", "--nproc-per-node=2", "twice.py")
    compare(theirs, ours)
    assert ours.code == 0
    assert b"attempt 1 of rank 1\n" in ours.stdout
    assert b"ValueError: at the first attempt" in ours.stderr


# --- failures ---------------------------------------------------------------------------------------------------------

FAILURES = {
    "an exception on one rank": ("raise ValueError('of rank 1')", b"ValueError: of rank 1"),
    "an exception that is no Exception": ("raise KeyboardInterrupt", b"KeyboardInterrupt"),
    "sys.exit with a code": ("sys.exit(3)", b"exitcode  : 3"),
    "sys.exit with a text": ("sys.exit('a reason')", b"a reason"),
    "os._exit": ("os._exit(4)", b"exitcode  : 4"),
    "SIGKILL": ("os.kill(os.getpid(), 9)", b"Signal 9 (SIGKILL)"),
    "a segmentation fault": ("import ctypes; ctypes.string_at(0)", b"Signal 11 (SIGSEGV)"),
    "an error in a hook of its own": (
        "sys.excepthook = lambda *a: os.write(2, b'own hook\\n'); raise OSError('hooked')",
        b"own hook",
    ),
}


RARE_FAILURES = (
    "an exception that is no Exception", "sys.exit with a text", "sys.exit with a code", "os._exit",
    "a segmentation fault", "an error in a hook of its own", "SIGKILL",
)  # fmt: skip


@pytest.mark.parametrize("how", some_nightly(FAILURES, RARE_FAILURES))
def test_a_failure(twins: Twins, how: str) -> None:
    """The same summary, code and traceback; the peer ends as it would."""
    statement, trace = FAILURES[how]
    twins.file("fail.py", f"""
        import os, sys, time
        rank = os.environ["RANK"]
        open("came-" + rank, "w").close()
        while not (os.path.exists("came-0") and os.path.exists("came-1")):
            time.sleep(0.01)
        os.write(1, b"rank " + rank.encode() + bytes([10]))
        if rank == "1":
            {statement}
        time.sleep(1000)
    """)  # fmt: skip
    _, ours = twins.same("--nproc-per-node=2", "fail.py", code=1)
    assert trace in ours.stderr
    assert not no_bundle(ours), ours.own_lines


ERRORS = {
    "an unknown option": (["--nope", "x.py"], 2),
    "an ambiguous abbreviation": (["--n", "1", "x.py"], 2),
    "a bad --nproc-per-node": (["--nproc-per-node", "some", "x.py"], 1),
    "a module that is not there": (["-m", "json.not_there"], 1),
    "a syntax error": (["syntax.py"], 1),
}


@pytest.mark.nightly
@pytest.mark.parametrize("what", ERRORS)
def test_what_torchrun_rejects(twins: Twins, what: str) -> None:
    words, code = ERRORS[what]
    twins.file("x.py", "")
    twins.file("syntax.py", "def f(:\n")
    twins.same(*words, code=code)


# --- scripts that do much ---------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_a_lively_script(twins: Twins) -> None:
    """gloo, its own SIGTERM handler, forks that end by sys.exit, a spawned pool, threads, its own atexit."""
    twins.file("lively.py", """
        import atexit, multiprocessing, os, signal, subprocess, sys, threading

        def say(*words):
            sys.stdout.write(" ".join(map(str, words)) + "\\n")

        def square(number):
            return number * number, os.environ.get("PYTHONPATH"), multiprocessing.current_process().name

        if __name__ == "__main__":
            import torch
            import torch.distributed as dist
            atexit.register(lambda: say("at exit"))
            caught = []
            signal.signal(signal.SIGTERM, lambda *_: caught.append("SIGTERM"))
            os.kill(os.getpid(), signal.SIGTERM)
            child = os.fork()
            if child == 0:
                sys.exit(5)
            say("forked child:", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), caught)
            dist.init_process_group("gloo")
            threads = [threading.Thread(target=say, args=(f"thread {n}",)) for n in range(3)]
            [t.start() for t in threads]
            [t.join() for t in threads]
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                say(pool.map(square, range(3)))
            total = torch.ones(2)
            dist.all_reduce(total)
            say(total)
            fail = "raise RuntimeError('in a child of rank ' + __import__('os').environ['RANK'])"
            done = subprocess.run([sys.executable, "-c", fail])
            say("subprocess:", done.returncode)
            dist.destroy_process_group()
    """)  # fmt: skip
    theirs, ours = twins.run("--nproc-per-node=2", "lively.py")
    compare(theirs, ours)
    assert ours.code == 0, ours.stderr.decode()
    assert ours.stdout.count(b"forked child: 5 ['SIGTERM']\n") == 2 * 1
    assert ours.stdout.count(b"at exit\n") == 2 * 2, "the forked child's, too"
    assert b"tensor([2., 2.])" in ours.stdout
    assert no_bundle(ours)


# --- signals to the launcher ------------------------------------------------------------------------------------------

WAITING = """
    import os, signal, time
    rank = os.environ["RANK"]
    {handler}
    try:
        os.write(1, f"up {{rank}}\\n".encode())
        open("up-" + rank, "w").close()  # a signal may come from here on
        while not os.path.exists("go"):
            time.sleep(0.02)
    except KeyboardInterrupt:
        if rank == "1":  # two tracebacks would interleave differently each time
            os._exit(9)
        raise
    os.write(1, f"went on {{rank}}\\n".encode())
"""
SAVING = """signal.signal(signal.SIGTERM, lambda *_: (os.write(1, f"saved {rank}\\n".encode()), os._exit(0)))"""


SLOW = "waiting for the ranks to end"


def both_up(runs: Sequence[Run]) -> None:
    for run in runs:
        until(lambda run=run: all((run.cwd / f"up-{rank}").exists() for rank in (0, 1)), f"the ranks of {run.launcher}")
    # torchrun sets its handlers up before it starts its ranks, and goes to its monitoring loop right after.


@pytest.mark.parametrize(
    "signum",
    [
        signal.SIGTERM,
        pytest.param(signal.SIGINT, marks=pytest.mark.nightly),  # a terminal's is tested below
        pytest.param(signal.SIGHUP, marks=pytest.mark.nightly),
        pytest.param(signal.SIGQUIT, marks=pytest.mark.nightly),
    ],
)
def test_a_signal_to_the_launcher(twins: Twins, signum: signal.Signals) -> None:
    """A user or a scheduler stops the job: the same end, and no accusation."""
    twins.file("wait.py", WAITING.format(handler=SAVING if signum == signal.SIGTERM else ""))
    runs = twins.start("--nproc-per-node=2", "wait.py")
    both_up(runs)
    for run in runs:
        run.process.send_signal(signum)
    theirs, ours = twins.finish(runs)
    compare(theirs, ours, frames=False)
    assert ours.code != 0
    assert all(SLOW in line for line in ours.own_lines)  # on a busy machine, the ranks take a moment
    assert no_bundle(ours)
    assert list((twins.runtime / "safelaunch").iterdir()) == []


# --- a terminal -------------------------------------------------------------------------------------------------------

SHELL = """if True:
    import fcntl, os, signal, sys, termios
    report, control = int(sys.argv[1]), int(sys.argv[2])
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    tell = lambda text: os.write(report, (text + "\\n").encode())
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        os.tcsetpgrp(0, os.getpid())
        signal.signal(signal.SIGTTOU, signal.SIG_DFL)
        os.set_inheritable(report, False)
        os.set_inheritable(control, False)
        os.execv(sys.argv[3], sys.argv[3:])
    while True:
        _, status = os.waitpid(pid, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            break
        tell(f"stopped {128 + os.WSTOPSIG(status)}")
        os.read(control, 1)
        os.tcsetpgrp(0, pid)
        os.killpg(pid, signal.SIGCONT)
    tell(f"ended {os.waitstatus_to_exitcode(status)}")
"""


@dataclass
class Terminal:
    """A launcher as the foreground job of a shell on a terminal of its own."""

    run: Run
    master: int
    reports: int
    control: int
    shown: bytearray = field(default_factory=bytearray)
    told: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        self._readers = [
            threading.Thread(target=self._read, args=(fd, into), daemon=True)
            for fd, into in ((self.master, self.shown), (self.reports, self.told))
        ]
        for reader in self._readers:
            reader.start()

    @staticmethod
    def _read(fd: int, into: bytearray) -> None:
        try:
            while data := os.read(fd, 65536):
                into += data
        except OSError:
            return  # EIO: the last process on the terminal has closed it

    def type(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def wait_for(self, report: str) -> None:
        until(lambda: report.encode() in self.told, f"{report!r} of {self.run.launcher}, told {bytes(self.told)!r}")

    def go_on(self) -> None:
        os.write(self.control, b"x")

    def finish(self) -> None:
        self.run.process.wait(PATIENCE_S)
        for reader in self._readers:
            reader.join(PATIENCE_S)
        self.run.code = int(self.told.split()[-1])
        self.run.stdout = b""
        self.run.stderr = re.sub(rb"\^[CZ\\]", b"", bytes(self.shown).replace(b"\r\n", b"\n"))
        until(lambda: not self.run.left(), f"the end of what {self.run.launcher} started")

    def close(self) -> None:
        for fd in (self.master, self.reports, self.control):
            os.close(fd)


@pytest.fixture
def terminals(twins: Twins) -> Iterator[Callable[..., list[Terminal]]]:
    made: list[Terminal] = []

    def start(*words: str) -> list[Terminal]:
        for launcher in LAUNCHERS:
            cwd = twins.tmp_path / launcher
            tag = uuid.uuid4().hex
            master, slave = pty.openpty()
            report, report_end = os.pipe()
            control_end, control = os.pipe()
            process = subprocess.Popen(
                [sys.executable, "-c", SHELL, str(report_end), str(control_end), os.fspath(BIN / launcher), *words],
                cwd=cwd,
                env=twins.environ(tag, {"TERM": "xterm"}),
                stdin=slave,
                stdout=slave,
                stderr=slave,
                pass_fds=[report_end, control_end],
            )
            for fd in (slave, report_end, control_end):
                os.close(fd)
            run = Run(launcher, cwd, process, tag)
            twins.runs.append(run)
            made.append(Terminal(run, master, report, control))
        return made

    yield start
    for terminal in made:
        terminal.run.process.kill()
        terminal.run.process.wait(60)
    twins.clean_up()
    for terminal in made:
        terminal.close()


Start = Callable[..., list[Terminal]]


def test_a_terminal(twins: Twins, terminals: Start) -> None:
    """The ranks see the terminal as such, with its size; what is typed reaches rank 0."""
    size = "sys.stdout.write(f'{os.get_terminal_size()} {[os.isatty(n) for n in range(3)]} {os.ttyname(1)}\\n')"
    twins.file("observe.py", OBSERVE.replace("sys.stdin.read()", "sys.stdin.readline()") + f"    {size}\n")
    started = terminals("--nproc-per-node=2", "observe.py")
    for terminal in started:
        terminal.type(b"typed\n")
    for terminal in started:
        terminal.finish()
    theirs, ours = (terminal.run for terminal in started)
    compare(theirs, ours)
    assert ours.code == 0
    assert ours.seen()["seen-0"]["stdin"] == "typed\n"
    assert [stream["tty"] for stream in ours.seen()["seen-1"]["streams"]] == [True] * 3
    assert b"[True, True, True] /dev/pts/" in ours.stderr


@pytest.mark.nightly
def test_a_key_that_ends_the_job(twins: Twins, terminals: Start) -> None:
    twins.file("wait.py", WAITING.format(handler=""))
    started = terminals("--nproc-per-node=2", "wait.py")
    both_up([terminal.run for terminal in started])
    for terminal in started:
        terminal.type(b"\x03")
    for terminal in started:
        terminal.finish()
    theirs, ours = (terminal.run for terminal in started)
    compare(theirs, ours, frames=False)
    assert all(SLOW in line for line in ours.own_lines)  # on a busy machine, the ranks take a moment
    assert no_bundle(ours)


@pytest.mark.nightly
def test_ctrl_z_and_back(twins: Twins, terminals: Start) -> None:
    """The shell gets its prompt back (148), the ranks run on; ``fg``, and the job ends as if nothing had been."""
    twins.file("wait.py", WAITING.format(handler=""))
    started = terminals("--nproc-per-node=2", "wait.py")
    both_up([terminal.run for terminal in started])
    for terminal in started:
        terminal.type(b"\x1a")
    for terminal in started:
        terminal.wait_for("stopped 148")
        (terminal.run.cwd / "go").touch()
    for terminal in started:
        until(lambda terminal=terminal: terminal.shown.count(b"went on") == 2, "the ranks, which were never stopped")
        terminal.go_on()
    for terminal in started:
        terminal.finish()
    theirs, ours = (terminal.run for terminal in started)
    compare(theirs, ours)
    assert ours.code == 0
    assert no_bundle(ours)
