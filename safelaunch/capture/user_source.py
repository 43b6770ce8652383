"""Reads the user's source, for reports and for rules that need the loop around a line.

Paths come from the job, or from a stranger's bundle, and may name anything: only regular files named ``*.py`` are read,
also behind a link. The file may be on a disk that does not answer: each read has a deadline, and a path that
missed it is not retried.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from safelaunch.capture.result import within
from safelaunch.model import Evidence, Frame, RankEvidence
from safelaunch.model.entries import Entries
from safelaunch.stacks.guards import assignments_of_the_rank
from safelaunch.stacks.source import begin_of, end_of, tree_of
from safelaunch.system.errors import CaptureError
from safelaunch.system.files import link_of
from safelaunch.system.redaction.redactor import Redactor

DEADLINE_S = 1.0
MOST_BYTES = 4 << 20
SOURCE_FILE = "source.json"  # of a bundle: path → excerpt
_MOST_LINKS = 40
_dead: set[str] = set()
_root: list[int] = []  # an open directory: the paths are below it


@contextmanager
def seen_by(pid: int) -> Iterator[None]:
    """Reads the files that the paths lead to in process ``pid``, which may be in a container."""
    try:
        if link_of(f"/proc/{pid}/ns/mnt") != link_of("/proc/self/ns/mnt"):
            _root.append(os.open(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
    except OSError:
        pass  # it has ended, or may not be read
    try:
        yield
    finally:
        _dead.clear()
        while _root:
            os.close(_root.pop())


def text(path: str) -> str | None:
    """The file's text, at most 4 MB of it, or None if it can't be read within a second."""
    if path in _dead:
        return None
    try:
        return within(DEADLINE_S, path, lambda: _read(path))
    except CaptureError:
        _dead.add(path)
        return None


def line(path: str, number: int) -> str | None:
    """Line ``number`` (from 1) of a file, or None. It may contain a key that is hard-coded in the program."""
    content = text(path)
    lines = content.splitlines() if content is not None else []
    return lines[number - 1] if 0 < number <= len(lines) else None


def text_for_stranger(path: str) -> str | None:
    """As ``text``, for evidence from elsewhere: a relative path meant another directory than the reader's."""
    return text(path) if path.startswith("/") else None


def line_for_stranger(path: str, number: int) -> str | None:
    """As ``line``, for evidence from elsewhere."""
    return line(path, number) if path.startswith("/") else None


def _read(path: str) -> str | None:
    root = _root[0] if _root else None
    try:
        real = os.path.realpath(path) if root is None else _below(root, path)
        if not (path.endswith(".py") and real.endswith(".py")):
            return None
        with open(real, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK, dir_fd=root)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return None
            return file.read(MOST_BYTES).decode("utf-8", "replace")
    except (OSError, ValueError):
        return None


def _below(root: int, path: str) -> str:
    """The path relative to the open directory ``root``, to which its links are confined. Raises OSError."""
    found: list[str] = []
    left = path.split("/")[::-1]
    links = 0
    while left:
        part = left.pop()
        if part in ("", ".", ".."):
            found = found[:-1] if part == ".." else found
            continue
        try:
            target = os.readlink("/".join([*found, part]), dir_fd=root)
        except OSError:
            found.append(part)
            continue
        links += 1
        if links > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        found = [] if target.startswith("/") else found
        left += target.split("/")[::-1]
    return "/".join(found)


# --- what a verdict has read ------------------------------------------------------------------------------------------


class Excerpts:
    """The source that a verdict may read, and that the bundle keeps, so that reading it again gives the same verdict.

    Of a file, these are the functions, classes and other statements of the module in which the evidence has a line, and
    its assignments of the rank. All other lines are empty, and there are no secrets. ``read``: path → excerpt, of all
    that ``text`` was asked for.
    """

    def __init__(self, evidence: Evidence, redactor: Redactor) -> None:
        self._evidence = evidence
        self._redactor = redactor
        self._lines: dict[str, set[int]] | None = None
        self.read: dict[str, str] = {}

    def text(self, path: str) -> str | None:
        """The excerpt, or None if the file can't be read."""
        if path not in self.read:
            if self._lines is None:  # most verdicts read nothing
                self._lines = _lines_of(self._evidence)
            kept = excerpt(text(path) or "", self._lines.get(path, set()))
            whole = self._redactor.said(kept)
            if whole.count("\n") != kept.count("\n"):  # a secret of several lines would move those after it
                whole = "\n".join(self._redactor.said(one) for one in kept.split("\n"))
            self.read[path] = whole
        return self.read[path] or None


def excerpt(source: str, lines: set[int]) -> str:
    """``source`` with only those of the module's statements that hold one of ``lines``, and those that assign the rank
    to a name, as conditions ask for it; the others' lines are empty.
    """
    tree = tree_of(source)
    kept: set[int] = set()
    asked = assignments_of_the_rank(tree) if lines else []
    for statement in tree.body:
        whole = range(begin_of(statement), end_of(statement) + 1)
        if lines.intersection(whole) or statement in asked:
            kept.update(whole)
    last = max(kept, default=0)
    split = source.split("\n")[:last]
    return "".join(f"{line if number in kept else ''}\n" for number, line in enumerate(split, 1))


def _lines_of(evidence: Evidence) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for rank in evidence.ranks:
        for frame in _frames_of(rank):
            found.setdefault(frame.file, set()).add(frame.line)
    return found


def _frames_of(rank: RankEvidence) -> Iterator[Frame]:
    for process in (rank.main, *rank.children):
        for sample in process.stacks if process is not None else ():
            for thread in sample.threads:
                yield from thread.frames
    if rank.flight_record is not None:
        entries = rank.flight_record.entries
        for kind in entries.used().values() if isinstance(entries, Entries) else entries:
            yield from kind.frames
    for told in (rank.exception, rank.fatal, rank.exit_call, *rank.gil.handling):
        yield from told.frames if told is not None else ()
    for one in rank.caught:
        yield from (one.raised, one.caught)
