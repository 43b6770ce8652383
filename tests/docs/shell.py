"""Runs the commands of a page in a shell."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from importlib.util import find_spec
from pathlib import Path

import pytest

from safelaunch.leases.inventory import has_driver
from tests.docs.pages import SETUP, Block, blocks, directive
from tests.support.jobs import TAG, port_of_its_own
from tests.support.nvml import stub

BLOCK_DEADLINE_S = 120
HUNG = 124
SHOWN = ("verdict", "printed")


def summary(place: Path) -> str:
    """The sentence of the newest verdict that a page's commands left."""
    return str(json.loads((place / "safelaunch-bundles" / "latest" / "verdict.json").read_text())["summary"])


def check_shown(block: Block, said: str) -> None:
    """Fails unless a page shows what there was: the verdict's sentence, or lines of the output.

    Line breaks and the start of safelaunch's lines do not matter, nor do pids, nor numbers in the output.
    """
    shown = [" ".join(line.removeprefix("safelaunch: ").split()) for line in block.text.splitlines()]
    if block.comment == "verdict":
        assert _without_pids(said) in _without_pids(" ".join(shown)), f"{block.where}: the verdict was\n{said}"
        return
    flat = _without_numbers(" ".join(line.removeprefix("safelaunch: ") for line in said.splitlines()))
    for line in shown:
        for part in _without_numbers(line).split("..."):
            assert part.strip() in flat, f"{block.where}: {part!r} is not in\n{said}"


def _without_pids(text: str) -> str:
    return re.sub(r"\bworker \d+", "worker N", text)


def _without_numbers(text: str) -> str:
    return re.sub(r"\d+(\.\d+)?", "N", " ".join(text.split()))


class Shell:
    """Runs the blocks of pages, each page in a directory of its own, and ends what they leave behind."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tag = uuid.uuid4().hex
        self.runtime = Path(tempfile.mkdtemp(prefix="sl-", dir="/tmp"))  # sockets need a short path
        self._done: dict[str, Path] = {}

    def page(self, page: str) -> Path:
        """The directory of a page whose commands have been run, once."""
        if page not in self._done:
            self._done[page] = self._run_page(page)
        return self._done[page]

    def _run_page(self, page: str) -> Path:
        place = self.root / page.replace("/", "-")
        before = directive(page, "continues")
        if before:
            shutil.copytree(self.page(before), place, symlinks=True)
        else:
            place.mkdir()
        environ = self._environ(page, place)
        for block in blocks(page):
            if block.title:
                (place / block.title).write_text(block.text + "\n")
        output, missing = "", list[str]()
        for block in blocks(page):
            if block.needs and find_spec(block.needs) is None:
                missing.append(block.needs)
            elif block.language in ("bash", SETUP):
                code, output = self._run(block.text, place, environ)
                assert code == block.exit_code, f"{block.where}: exit code {code}\n{output}"
            elif block.comment in SHOWN and not missing:
                check_shown(block, summary(place) if block.comment == "verdict" else output)
        assert not self.pids(), f"{page} leaves processes behind"
        return place

    def _run(self, text: str, place: Path, environ: dict[str, str]) -> tuple[int, str]:
        """What it prints goes into a file: jobs in the background keep the pipe open."""
        output = place / ".output"
        with output.open("w") as file:
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", text],
                cwd=place,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=BLOCK_DEADLINE_S,
            )
        return done.returncode, output.read_text(errors="replace")

    def _environ(self, page: str, place: Path) -> dict[str, str]:
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("SAFELAUNCH_", "PYTEST_", "PET_", "CUDA_"))}
        environ |= {"OMP_NUM_THREADS": "1", TAG: self.tag, "XDG_RUNTIME_DIR": os.fspath(self.runtime)}
        environ |= port_of_its_own()
        if any(block.exit_code == HUNG for block in blocks(page)):
            environ["SAFELAUNCH_STALL_TIMEOUT"] = (
                "2"  # the commands are those of real jobs; here it is a matter of seconds
            )
        environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environ['PATH']}"
        if directive(page, "node") == "gpus":
            environ |= self._node(place).environ
        elif has_driver(environ):
            environ["SAFELAUNCH_NO_LEASE"] = "1"
        return environ

    def _node(self, place: Path) -> stub.Node:
        if stub.library() is None:
            pytest.skip("no C compiler for the stand-in of libnvidia-ml.so.1")
        node = stub.Node(place / ".nvml.state", place / ".leases")
        node.write()
        return node

    def pids(self, patience_s: float = 30.0) -> list[int]:
        """Processes that the pages have started and that still live after a moment's grace."""
        deadline = time.monotonic() + patience_s
        while (found := self._tagged()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return found

    def _tagged(self) -> list[int]:
        mark = f"{TAG}={self.tag}".encode()
        found = []
        for entry in list(os.scandir("/proc")):
            if entry.name.isdigit():
                try:
                    environ = Path(entry.path, "environ").read_bytes()
                except OSError:
                    continue  # it is another user's, or has just ended
                if mark in environ.split(b"\0"):
                    found.append(int(entry.name))
        return found

    def clean_up(self) -> None:
        deadline = time.monotonic() + 60.0
        while (pids := self._tagged()) and time.monotonic() < deadline:
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue  # it has ended meanwhile
            time.sleep(0.05)
        shutil.rmtree(self.runtime, ignore_errors=True)
