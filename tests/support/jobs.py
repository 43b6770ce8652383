"""Runs safelaunch on a program of ``programs/`` and reads the results: exit code, output, bundle, processes.

Every process of a job inherits a unique environment variable. Tests use it to find processes that remain, and to clean
up: they end only processes of this job, and check each one again before ending it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

from safelaunch import schemas
from safelaunch.leases.inventory import has_driver

TAG = "JOB_UNDER_TEST"
SECRETS = {
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "HF_TOKEN": "hf_" + "AbCdEfGhIjKlMnOpQrStUvWx",
    "DATABASE_URL": "postgres://trainer:correct-horse-battery@db.example/runs",
}
SECRET_VALUES = (SECRETS["WANDB_API_KEY"], SECRETS["HF_TOKEN"], "correct-horse-battery")
PATIENCE_S = 150.0
GRACE_S = 30.0  # for processes that end after safelaunch: on a busy machine, a guardian might wait seconds for its turn


@cache
def port_of_its_own() -> dict[str, str]:
    """Returns variables that let several jobs run on one node at once.

    Older torchrun versions use port 29500 for every job without ``--standalone``. The variables make them choose a free
    port, which is the default of newer versions.
    """
    from torch.distributed.run import get_args_parser

    if get_args_parser().get_default("master_port") is None:
        return {}
    run = "0123abcd-0123-4567-89ab-0123456789ab"  # torchrun generates one; it is part of its log names
    return {"PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "localhost:0", "PET_RDZV_ID": run}


@dataclass(frozen=True)
class Bundle:
    """A published bundle, as its recipient reads it."""

    path: Path

    def json(self, name: str) -> Any:
        return json.loads((self.path / name).read_text())

    @property
    def verdict(self) -> dict[str, Any]:
        return self.json("verdict.json")

    def text(self, name: str) -> str:
        return (self.path / name).read_text()

    def problems(self) -> list[str]:
        """Returns what is wrong with the bundle: files, manifest, modes, secrets."""
        found = []
        listed = {artifact["path"]: artifact for artifact in self.json("manifest.json")["artifacts"]}
        files = {str(path.relative_to(self.path)) for path in self.path.rglob("*") if path.is_file()}
        for name, artifact in listed.items():
            if artifact.get("missing"):
                if name in files:
                    found.append(f"{name} is there and said to be missing")
            elif name not in files:
                found.append(f"{name} is neither there nor said to be missing")
        found += [f"{name} is not in the manifest" for name in sorted(files - set(listed) - {"manifest.json"})]
        needed = {"verdict.json", "report.md", "report.html", "launch.json", "timeline.perfetto.json"} - files
        found += [f"there is no {name}" for name in sorted(needed)]
        if stat.S_IMODE(self.path.stat().st_mode) != 0o700:
            found.append(f"its mode is {stat.S_IMODE(self.path.stat().st_mode):o}")
        for path in self.path.rglob("*"):
            if stat.S_IMODE(path.stat().st_mode) & 0o077:
                found.append(f"others may read {path.relative_to(self.path)}")
            if path.is_file() and any(secret.encode() in path.read_bytes() for secret in SECRET_VALUES):
                found.append(f"a secret is in {path.relative_to(self.path)}")
        schema = json.loads(schemas.path("verdict.json").read_text())
        found += [f"verdict.json: {error.message}" for error in Draft202012Validator(schema).iter_errors(self.verdict)]
        for claim in self.verdict["evidence"]:
            if claim["file"] not in files:
                found.append(f"the claim {claim['claim']!r} points at {claim['file']}, which is not there")
        return found


@dataclass(frozen=True)
class Result:
    """The results of a job that has ended."""

    code: int
    stdout: str
    stderr: str
    seconds: float
    bundles: tuple[Bundle, ...]
    leftovers: tuple[str, ...]

    @property
    def bundle(self) -> Bundle:
        """The only bundle. The assertion shows the job's output if there is none."""
        assert len(self.bundles) == 1, (self.bundles, self.code, self.stderr)
        return self.bundles[0]

    @property
    def verdict(self) -> dict[str, Any]:
        return self.bundle.verdict

    @property
    def said(self) -> str:
        """safelaunch's own messages, without their prefix, as one string."""
        own = [line for line in self.stderr.splitlines() if line.startswith("safelaunch: ")]
        return "\n".join(line.removeprefix("safelaunch: ") for line in own)


class Job:
    """A safelaunch process with private run and bundle directories.

    Example: ``with Job(...) as job: job.wait()``

    Leaving the block ends the remaining processes.

    Args:
        words: The whole command line after ``safelaunch``.
        launcher: A launcher to run instead of safelaunch; it gets none of safelaunch's options.
    """

    def __init__(
        self,
        words: Sequence[str | Path],
        scratch: Path,
        *,
        env: Mapping[str, str | None] | None = None,
        bundle_dir: Path | None = None,
        runtime: Path | None = None,
        interpreter: Sequence[str] = (),
        launcher: Sequence[str] = (),
    ) -> None:
        self.scratch = scratch
        self.bundle_dir = bundle_dir or scratch / "bundles"
        # Sockets need a short path, and run directories of other jobs must not be mistaken for this job's.
        self._own_runtime = Path(tempfile.mkdtemp(prefix="sl-", dir="/tmp"))
        self.runtime = runtime or self._own_runtime
        self.tag = uuid.uuid4().hex
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("SAFELAUNCH_", "PYTEST_", "PET_"))}
        environ |= {
            "OMP_NUM_THREADS": "1",
            "XDG_RUNTIME_DIR": os.fspath(self.runtime),
            "XDG_CONFIG_HOME": "/nowhere",
            TAG: self.tag,
            **SECRETS,
        }
        is_static = any(os.fspath(word).startswith("--master-addr") for word in words)
        environ |= {} if is_static else port_of_its_own()
        if has_driver(environ):  # lets several jobs run on a machine with one GPU: they need none
            environ["SAFELAUNCH_NO_LEASE"] = "1"
        for name, value in (env or {}).items():
            environ.pop(name, None)
            if value is not None:
                environ[name] = value
        words = [os.fspath(word) for word in words]
        says_where = words[:1] == ["colaunch"] or (bundle_dir is None and "--bundle-dir" in words)
        own = [] if says_where or launcher else [f"--bundle-dir={self.bundle_dir}"]
        subcommand = 1 if words[:1] == ["exec"] else 0
        words[subcommand:subcommand] = own
        command = [*(launcher or interpreter or (sys.executable, "-m", "safelaunch")), *words]
        self._out, self._err = scratch / "stdout.txt", scratch / "stderr.txt"
        self.begin_s = time.monotonic()
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                command, cwd=scratch, env=environ, stdin=subprocess.PIPE, stdout=out, stderr=err
            )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.clean_up()

    @property
    def stderr(self) -> str:
        return self._err.read_text(errors="replace")

    @property
    def stdout(self) -> str:
        return self._out.read_text(errors="replace")

    def until(
        self, reached: Callable[[], object], what: str, patience_s: float = PATIENCE_S, *, every_s: float = 0.05
    ) -> None:
        """Waits until ``reached`` is true. Checks once more after the job has ended."""
        deadline = time.monotonic() + patience_s
        while not reached():
            assert time.monotonic() < deadline, f"waited {patience_s:g} s for {what}\n{self.stderr}"
            if self.process.poll() is not None:
                assert reached(), f"ended with {self.process.returncode} before {what}\n{self.stderr}"
                return
            time.sleep(every_s)

    def wait(self, patience_s: float = PATIENCE_S, *, grace_s: float = GRACE_S) -> Result:
        """Waits for safelaunch's end; returns the result. Pass ``grace_s=0`` if the job leaves a process on purpose."""
        self.until(lambda: self.process.poll() is not None, "the end of safelaunch", patience_s)
        took, left = self.seconds, tuple(self.left_behind(grace_s))
        return Result(self.process.returncode, self.stdout, self.stderr, took, self.bundles(), left)

    @property
    def seconds(self) -> float:
        """Returns the seconds since the start."""
        return time.monotonic() - self.begin_s

    def bundles(self) -> tuple[Bundle, ...]:
        """Returns the published bundles: an empty directory reserves a name until the bundle is moved to it."""
        found = self.bundle_dir.glob("[!.]*-*Z-*") if self.bundle_dir.is_dir() else ()
        there = (path for path in sorted(found) if path.is_dir() and not path.is_symlink())
        return tuple(Bundle(path) for path in there if any(path.iterdir()))

    def left_behind(self, grace_s: float = GRACE_S) -> list[str]:
        """Returns processes and run directories of this job that remain after a grace period."""
        deadline = time.monotonic() + grace_s
        while (pids := self.pids()) and time.monotonic() < deadline:
            time.sleep(0.05)
        left = [f"pid {pid}: {_command_of(pid)}" for pid in pids]
        runs = self.runtime / "safelaunch"
        return left + [str(path) for path in (runs.iterdir() if runs.is_dir() else ()) if path.name != "bundles"]

    def pids(self) -> list[int]:
        """Returns all processes of this job except safelaunch. Zombies have no environment and don't count."""
        mark = f"{TAG}={self.tag}".encode()
        found = []
        for entry in list(os.scandir("/proc")):
            if entry.name.isdigit() and int(entry.name) != self.process.pid:
                try:
                    environ = Path(entry.path, "environ").read_bytes()
                except OSError:
                    continue
                if mark in environ.split(b"\0"):
                    found.append(int(entry.name))
        return found

    def ranks(self) -> dict[int, int]:
        """Returns rank → pid of the live processes that torchrun started as ranks."""
        found = {}
        for pid in self.pids():
            try:
                environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                session = os.getsid(pid)
            except OSError:
                continue
            number = next((item[5:] for item in environ if item.startswith(b"RANK=")), None)
            if number is not None and session == pid:
                found[int(number)] = pid
        return found

    def clean_up(self) -> None:
        """Ends the processes of this job that remain, and removes its directories in /tmp."""
        if self.process.poll() is None:
            self.process.kill()
        for _ in range(600):
            pids = self.pids()
            if not pids:
                break
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            time.sleep(0.05)
        self.process.wait(60)
        assert self.process.stdin is not None
        self.process.stdin.close()
        shutil.rmtree(self._own_runtime, ignore_errors=True)


def _command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return "?"


def line_of(script: Path, mark: str) -> int:
    """The number of the line that ends in the comment ``mark``."""
    return next(n for n, text in enumerate(script.read_text().splitlines(), 1) if text.endswith(f"# {mark}"))
