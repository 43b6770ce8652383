"""Attacks by another user: in the lease directory, by modules in the working directory, in /tmp."""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from safelaunch.cli import gpus, program
from safelaunch.leases import holder
from safelaunch.leases.choose import LeasableGpu
from safelaunch.leases.holder import LeaseHolder, ourselves
from safelaunch.leases.lease import Lease
from safelaunch.leases.store import LeaseStore
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
    """Yields about ``count`` random contents of the lease directory, and attacks on whole runs.

    What the table ``strangers`` has is tried one by one in ``test_leases_strangers``.
    """
    for number in range(count):
        several = [strangers.drawn(chance) for _ in range(chance.randint(1, 20))]
        yield on_leases(f"draw {number}", lambda place, several=several: _all(place, several))  # type: ignore[misc]
    yield Attack("a sweep among all of it", _sweep, _root_and_compiler)
    yield from on_modules()
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


def on_leases(name: str, deed: Deed) -> Attack:
    """Another user attacks the lease directory while safelaunch uses it."""

    def run(scratch: Path) -> str:
        place, said = _directory(scratch), list[str]()
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
        return f"held by another user: {held}"
    shown = [
        *map(holder.lease_words, held.values()),
        *gpus.as_table(gpus.rows([LeasableGpu("0", A)], held, {})).lines(),
    ]
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


def _all(place: Path, several: Sequence[tuple[str, bytes]]) -> list[int]:
    return [strangers.locked(place / name, text) for name, text in several if not (place / name).exists()]


def _shut(place: Path) -> int:
    gate = os.open(place, os.O_RDONLY)
    fcntl.flock(gate, fcntl.LOCK_EX)
    return gate


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


def on_modules() -> Iterator[Attack]:
    """Another user's modules in a world-writable directory that is safelaunch's working directory."""
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


# --- run directories --------------------------------------------------------------------------------------------------


def on_run_directories() -> Iterator[Attack]:
    """A /tmp in which another user was first."""
    for what in ("directory", "file", "link", "open"):
        yield Attack(
            f"/tmp/safelaunch-<uid> is a {what}", lambda scratch, what=what: _taken(scratch, what), _namespaces
        )  # type: ignore[misc]


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
