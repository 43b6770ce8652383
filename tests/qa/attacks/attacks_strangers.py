"""Attacks by another user: in the lease directory, at its lock, in the working directory, among bundles, in /tmp.

It also covers containers of the same user that share /tmp: what one starts or removes must not harm jobs in another.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

from safelaunch.bundle.staging import Keeping, Staging, publish
from safelaunch.cli import gpus, program
from safelaunch.leases import holder, ports
from safelaunch.leases.choose import LeasableGpu
from safelaunch.leases.holder import LeaseHolder, look, ourselves
from safelaunch.leases.lease import Lease
from safelaunch.leases.store import LeaseStore
from safelaunch.model import Artifact
from tests.qa.attacks.attack import Attack
from tests.support import strangers
from tests.support.strangers import MINE, STRANGER, stranger

A, B = "GPU-aaaa", "GPU-bbbb"
AT_ONCE_S = 30.0
PATIENCE_S = 120.0
BUNDLE = "train-20260101T000000Z-hang"
GROUP = 4711
ELSEWHERE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")

Deed = Callable[[Path], object]


def attacks(count: int, chance: random.Random) -> Iterator[Attack]:
    """Yields the fixed attacks, and about ``count`` random contents of the lease directory."""
    for what, text in strangers.contents().items():
        yield on_leases(f"ticket: {what}", _writing("ticket.00000000000000000001.1", text))
        yield on_leases(f"holder: {what}", _writing(f"{A}.{STRANGER}", text))
    for name in (*strangers.NAMES, *map(os.fsdecode, strangers.UNDECODABLE)):
        yield on_leases(f"name: {name!r:.60}", _writing(name, strangers.encoded(strangers.words(candidates=[A]))))
    for what, make in strangers.things().items():
        for name in ("ticket.00000000000000000001.1", f"{A}.{MINE}", f"{A}.{MINE}.ranks"):
            yield on_leases(f"{what} at {name}", lambda place, make=make, name=name: make(place / name))  # type: ignore[misc]
    for number in range(count):
        several = [strangers.drawn(chance) for _ in range(chance.randint(1, 20))]
        yield on_leases(f"draw {number}", lambda place, several=several: _all(place, several))  # type: ignore[misc]
    yield on_leases("20,000 files", _flood)
    yield on_leases("the gate is kept shut", _shut)
    locks: Deed = lambda place: [*map(strangers.lock_for_reading, place.glob(f"*.{MINE}*"))]  # noqa: E731
    yield on_leases("locks on our files", locks, first=False)
    yield Attack("thousands of ports are leased", _ports, _root_only)
    yield Attack("a sweep among all of it", _sweep, _root_and_compiler)
    for what in ("²", "9" * 5000, "-1", "x" * 100_000):
        yield Attack(f"a process that names its supervisor {what[:8]}", lambda scratch, what=what: _process(what))  # type: ignore[misc]
    yield from on_configuration()
    yield from on_bundles(count)
    yield from on_run_directories()


def _root_only() -> str:
    return "" if os.getuid() == 0 else "root only"


def _root_and_compiler() -> str:
    return _root_only() or ("" if shutil.which("cc") or shutil.which("gcc") else "no C compiler")


def _namespaces() -> str:
    if os.getuid() or shutil.which("unshare") is None:
        return "root only"
    done = subprocess.run([*ELSEWHERE, "--mount", "true"], capture_output=True, check=False)
    return "" if done.returncode == 0 else "no namespaces can be made here"


# --- leases -----------------------------------------------------------------------------------------------------------


def on_leases(name: str, deed: Deed, *, first: bool = True) -> Attack:
    """Another user attacks the lease directory while safelaunch uses it. ``first``: before safelaunch creates it."""

    def run(scratch: Path) -> str:
        place, said = _directory(scratch), list[str]()
        if not first:
            _take(LeaseStore(os.fspath(place)), A).release()  # files of this user exist
        with stranger(lambda: deed(place)):
            return _used(LeaseStore(os.fspath(place), said.append), said)

    return Attack(f"leases: {name}", run, _root_only)


def _directory(scratch: Path) -> Path:
    (scratch / "precious").write_text("precious")
    place = scratch / "leases"
    place.mkdir()
    place.chmod(0o1777)
    strangers.passable(place)
    return place


def _take(store: LeaseStore, *keys: str) -> Lease:
    def pick(held: Mapping[str, LeaseHolder]) -> Sequence[str] | None:
        return None if held else keys

    found = store.attempt(keys, pick, ourselves("", "mine.py"))
    assert found.lease is not None, f"{keys} cannot be had: {found}"
    return found.lease


def _used(store: LeaseStore, said: list[str]) -> str:
    """Returns what is wrong, if anything: B must be free, and A must belong to the user whose files say so."""
    begin = time.monotonic()
    held, waiting = store.look([A, B]), store.waiting()
    if any(one.uid != STRANGER for one in held.values()):
        return f"held by one who does not: {held}"
    shown = [*map(holder.lease_words, held.values()), *gpus.as_table(gpus.rows([LeasableGpu("0", A)], held, {})).lines()]
    shown += [msgspec.json.encode([gpus._holder(one) for one in waiting]).decode()]
    if bad := [line for line in (*said, *shown, *map(gpus.waiting_line, waiting)) if not line.isprintable()]:
        return f"reaches the terminal: {bad[0]!r:.200}"
    if len(said) > 1:
        return f"{len(said)} messages"
    mine = store.queue([A, B], 1, ourselves("", "mine.py"))
    if ourselves("", "").pid not in [one.pid for one in store.waiting()]:
        return "our place in the queue is not there"
    store.leave(mine)
    if not waiting:  # otherwise it appears to be the other user's turn
        lease = _take(store, B)
        if store.look([B])[B].uid != MINE:
            return "what we hold is shown as another's"
        lease.release()
    took_s = time.monotonic() - begin
    return f"took {took_s:.1f} s" if took_s > AT_ONCE_S else ""


def _writing(name: str, text: bytes) -> Deed:
    return lambda place: strangers.locked(place / name, text)


def _all(place: Path, several: Sequence[tuple[str, bytes]]) -> list[int]:
    return [strangers.locked(place / name, text) for name, text in several if not (place / name).exists()]


def _flood(place: Path) -> list[int]:
    for number in range(20_000):
        (place / f"{(A, B, 'ticket')[number % 3]}.{number:020d}.1").touch()
    return [strangers.locked(place / f"ticket.{number:020d}.2", b"[") for number in range(500)]


def _shut(place: Path) -> int:
    gate = os.open(place, os.O_RDONLY)
    fcntl.flock(gate, fcntl.LOCK_EX)
    return gate


def _ports(scratch: Path) -> str:
    place = _directory(scratch)
    wanted = list(ports.candidates("", ""))[:900]
    with stranger(lambda: [strangers.locked(place / f"port-{port}.{STRANGER}") for port in wanted]):
        begin = time.monotonic()
        taken = ports.take(LeaseStore(os.fspath(place)), 3, ourselves("", "mine.py"))
        taken.release()
        took_s = time.monotonic() - begin
    return f"took {took_s:.1f} s" if took_s > AT_ONCE_S else ""


def _process(number: str) -> str:
    with subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()"],
        env={"SAFELAUNCH_SUPERVISOR_PID": number},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = look(process.pid)
        process.communicate(b"\n")
    return "taken for what a run has left behind" if found.left_over else ""


def _sweep(scratch: Path) -> str:
    """Checks that a sweep which leases GPUs continues during all of these attacks at once."""
    from tests.support.nvml import stub

    node = stub.Node(scratch / "state", _directory(scratch))
    node.write()
    spec = scratch / "sweep.yaml"
    spec.write_text("jobs:\n" + "".join(f"  j{n}: {{gpus: 4, command: 'exec -- sleep 1'}}\n" for n in range(4)))
    uuid = stub.uuid(9)
    texts = list(strangers.contents().values())

    def plant() -> list[object]:
        place = node.lease_dir
        kept: list[object] = [strangers.locked(place / f"ticket.{n:020d}.1", text) for n, text in enumerate(texts)]
        kept += [strangers.locked(place / name, b"[") for name in strangers.NAMES]
        kept += [strangers.locked(place / f"{uuid}.{STRANGER}-{n}", text) for n, text in enumerate(texts)]
        return [*kept, _shut(place)]

    # Valid tickets are not attacks: their owner is in the queue.
    texts = [text for text in texts if b'"GPU-aaaa"' not in text or b"NaN" in text or b"Infinity" in text]
    with stranger(plant):
        done = _safelaunch(["colaunch", "sweep.yaml", "--sweep-dir", "out"], scratch, node.environ)
    return "" if done.returncode == 0 else f"ended with {done.returncode}: {done.stderr[-300:]!r}"


def _safelaunch(
    words: Sequence[str], cwd: Path, env: Mapping[str, str] | None = None, *, before: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SAFELAUNCH_")}
    command = [*before, *program(), *words]
    return subprocess.run(
        command,
        cwd=cwd,
        env={**environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        errors="replace",
    )


# --- the working directory --------------------------------------------------------------------------------------------


def on_configuration() -> Iterator[Attack]:
    """Another user's files in a world-writable directory that is safelaunch's working directory."""
    evil = "env:\n  LD_PRELOAD: /tmp/evil.so\n"
    plants: dict[str, Deed] = {
        "safelaunch.yaml": lambda place: (place / "safelaunch.yaml").write_text(evil),
        "pyproject.toml": lambda place: (place / "pyproject.toml").write_text(
            '[tool.safelaunch]\nenv = {LD_PRELOAD = "/tmp/evil.so"}\n'
        ),
        "a FIFO": lambda place: os.mkfifo(place / "safelaunch.yaml"),
        "a directory": lambda place: (place / "safelaunch.yaml").mkdir(),
        "a file that nobody may read": lambda place: (place / "safelaunch.yaml").touch(mode=0),
        "a link to a file of ours": lambda place: (place / "safelaunch.yaml").symlink_to("../ours.yaml"),
        "a link to /dev/zero": lambda place: (place / "safelaunch.yaml").symlink_to("/dev/zero"),
        "no YAML": lambda place: (place / "safelaunch.yaml").write_bytes(b"\xff: ["),
        "a FIFO for pyproject.toml": lambda place: os.mkfifo(place / "pyproject.toml"),
        "a terabyte": lambda place: os.truncate(strangers.locked(place / "safelaunch.yaml"), 1 << 40),
    }
    for what, deed in plants.items():
        yield Attack(f"configuration: {what}", lambda scratch, deed=deed: _configured(scratch, deed), _root_only)  # type: ignore[misc]
    modules = (
        "json",
        "threading",
        "torch",
        "safelaunch",
        "importlib",
        "yaml",
        "msgspec",
        "contextlib",
        "sitecustomize",
    )
    for module in modules:
        yield Attack(f"a module {module}.py", lambda scratch, module=module: _module(scratch, module), _root_only)  # type: ignore[misc]


def _configured(scratch: Path, deed: Deed) -> str:
    (scratch / "ours.yaml").write_text("env:\n  LD_PRELOAD: /tmp/evil.so\n")
    place = _shared(scratch)
    (place / "train.py").touch()
    with stranger(lambda: deed(place)):
        done = _safelaunch(["--dry-run", "train.py"], place)
    if done.returncode or "evil" in done.stdout:
        return f"ended with {done.returncode}: {(done.stdout + done.stderr)[-300:]!r}"
    return "" if len(done.stderr.splitlines()) <= 1 else f"more than a line: {done.stderr!r}"


def _shared(scratch: Path) -> Path:
    place = scratch / "shared"
    place.mkdir()
    place.chmod(0o1777)
    strangers.passable(place)
    return place


def _module(scratch: Path, module: str) -> str:
    """Checks that safelaunch's helpers import nothing from the working directory."""
    place, mark = _shared(scratch), scratch / "imported"
    mark.touch()
    mark.chmod(0o666)
    with stranger(lambda: (place / f"{module}.py").write_text(f"open({os.fspath(mark)!r}, 'a').write('x')\n")):
        (scratch / "sweep.yaml").write_text("jobs: {a: {command: 'exec -- true'}}\n")
        own = [["doctor", "--json"], ["gpus", "--json"], ["exec", f"--bundle-dir={scratch}", "--", "true"]]
        for words in [*own, ["colaunch", "../sweep.yaml", "--sweep-dir", os.fspath(scratch / "out"), "--slots=1"]]:
            _safelaunch(words, place)
    return "it was imported" if mark.read_text() else ""


# --- bundles ----------------------------------------------------------------------------------------------------------


def on_bundles(count: int) -> Iterator[Attack]:
    """Bundle directories that belong to other users, and swapped files in those that a group shares."""
    for mode, uid in ((0o777, 0), (0o777, STRANGER), (0o1777, STRANGER), (0o2777, 0), (0o707, 0)):
        yield Attack(
            f"bundles: mode {mode:o} of user {uid}",
            lambda scratch, mode=mode, uid=uid: _refused(scratch, mode, uid),  # type: ignore[misc]
            _root_only,
        )
    for number in range(max(10, count // 3)):
        yield Attack(f"bundles: swap {number}", _swapped, _root_only)


def _refused(scratch: Path, mode: int, uid: int) -> str:
    place = scratch / "bundles"
    place.mkdir()
    os.chown(place, uid, uid)
    place.chmod(mode)
    done = _safelaunch(["exec", "--bundle-dir=bundles", "--", "touch", "started"], scratch)
    lines = [line for line in done.stderr.splitlines() if line]
    if done.returncode != 2 or (scratch / "started").exists() or len(lines) > 2:
        return f"ended with {done.returncode}: {done.stderr[-300:]!r}"
    return ""


def _swapped(scratch: Path) -> str:
    place = scratch / "bundles"
    place.mkdir()
    os.chown(place, -1, STRANGER)
    place.chmod(0o2775)
    strangers.passable(place)
    staging = Staging(scratch / "staged")
    staging.add(Artifact("verdict.json", "safelaunch", 0.0), "ours")
    staging.finish({})
    done: set[str] = set()

    def swap() -> None:
        for name in [path.name for path in place.iterdir()]:
            if name.startswith(".train") and name.endswith(".partial") and name not in done:
                (place / name).rename(place / f"taken-{len(done)}")
                (place / name).mkdir()
                (place / name / "verdict.json").write_text("theirs")
                done.add(name)

    with stranger(lambda: None, again=swap):
        result = publish(staging.root, place, BUNDLE, scratch / "kept", Keeping(), deadline_s=60.0)
    if (result.path / "verdict.json").read_text() != "ours":
        return f"theirs is called ours: {result}"
    return "" if "\n" not in result.problem else f"more than a line: {result.problem!r}"


# --- run directories --------------------------------------------------------------------------------------------------


def on_run_directories() -> Iterator[Attack]:
    """A /tmp in which another user was first, and containers of the same user that share it."""
    for what in ("directory", "file", "link", "open"):
        yield Attack(
            f"/tmp/safelaunch-<uid> is a {what}", lambda scratch, what=what: _taken(scratch, what), _namespaces
        )  # type: ignore[misc]
    for _ in range(3):
        yield Attack("a run in another pid namespace", _swept, _namespaces)


PREPARE = {
    "directory": f"mkdir /tmp/safelaunch-0 && chown {STRANGER} /tmp/safelaunch-0",
    "file": f"touch /tmp/safelaunch-0 && chown {STRANGER} /tmp/safelaunch-0",
    "link": f"ln -s /var /tmp/safelaunch-0 && chown -h {STRANGER} /tmp/safelaunch-0",
    "open": "mkdir -m 777 /tmp/safelaunch-0",
}
# In a private /tmp: a job that lists what runs.
WATCHED = """
mount -t tmpfs -o mode=1777 tmpfs /tmp && {prepare}
exec {program} exec --bundle-dir={scratch}/bundles -- sh -c 'sleep 1; {program} status --json'
"""


def _taken(scratch: Path, what: str) -> str:
    line = WATCHED.format(prepare=PREPARE[what], program=" ".join(program()), scratch=scratch)
    place = Path("/var/tmp") / scratch.name  # /tmp is hidden from it
    place.mkdir()
    try:
        environ = {name: value for name, value in os.environ.items() if name != "XDG_RUNTIME_DIR"}
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", line.replace(str(scratch), str(place))],
            cwd=place,
            env=environ,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
    finally:
        shutil.rmtree(place)
    try:
        runs = json.loads(done.stdout)
    except ValueError:
        return f"ended with {done.returncode}: {done.stderr[-300:]!r}"
    return "" if [run["alive"] for run in runs] == [True] else f"status finds {runs}"


def _swept(scratch: Path) -> str:
    """Three containers start and end jobs. A job in a fourth must keep its directory and its name."""
    with ExitStack() as stack:
        # Where sockets have short names: safelaunch leaves a directory whose path is too long for them.
        runtime = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        env = {"XDG_RUNTIME_DIR": os.fspath(runtime)}
        words = [*ELSEWHERE, *program(), "exec", f"--bundle-dir={scratch}", "--", "sleep", "1000"]
        long = stack.enter_context(subprocess.Popen(words, env={**os.environ, **env}, cwd=scratch))
        stack.callback(long.kill)
        deadline = time.monotonic() + PATIENCE_S
        while not list(runtime.glob("safelaunch/r*/control")):
            if time.monotonic() > deadline:
                return "the run did not start"
            time.sleep(0.05)
        (mine,) = runtime.glob("safelaunch/r*")
        for before in (ELSEWHERE, ELSEWHERE, ()):
            done = _safelaunch(["exec", f"--bundle-dir={scratch}", "--", "sleep", "0.3"], scratch, env, before=before)
            if done.returncode:
                return f"ended with {done.returncode}: {done.stderr[-300:]!r}"
        left = [path.name for path in runtime.glob("safelaunch/r*")]
        return "" if left == [mine.name] and stat.S_ISSOCK((mine / "control").stat().st_mode) else f"left: {left}"
