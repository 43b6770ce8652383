"""What an early look has found, in words: by a process of its own that ends at once.

Most jobs are quiet now and then, and few of them hang. So the supervisor never loads the diagnosis for it, which would
stay in its memory, and no fault there reaches the watch.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import msgspec

from safelaunch.capture import command
from safelaunch.model import Evidence, FirstWord
from safelaunch.supervise.cluster.evidence import condensed, received
from safelaunch.system.decoding import from_json, from_msgpack
from safelaunch.system.errors import CaptureError

DEADLINE_S = 30.0  # of a busy machine, where an interpreter alone takes seconds
_ROOT = Path(__file__).resolve().parents[2]


class _Question(msgspec.Struct, frozen=True):
    """``active``: the ranks that compute, read or write; None: none moves. ``prove``: everything was seen."""

    evidence: list[bytes]
    missing_ranks: tuple[int, ...] = ()
    active: tuple[int, ...] | None = None
    prove: bool = False


def ask(evidence: Evidence, active: Collection[int] | None, place: Path, *, prove: bool = False) -> FirstWord:
    """The answer of a new process, or an empty one if it fails; takes ``DEADLINE_S`` at most. ``place``: for a file.

    ``prove``: also whether the evidence, which lacks nothing, proves that the job is dead.
    """
    ranks = tuple(active) if active is not None else None
    question = _Question(condensed(evidence), evidence.missing_ranks, ranks, prove)
    try:
        place.write_bytes(msgspec.msgpack.encode(question))
        # The working directory may hold anybody's modules.
        program = f"import sys; sys.path[:] = [{str(_ROOT)!r}, *filter(None, sys.path)]; from {__name__} import main; "
        output = command.run([sys.executable, "-c", f"{program}main({str(place)!r})"], deadline_s=DEADLINE_S)
        return from_json(output.stdout, FirstWord)
    except (OSError, CaptureError, msgspec.DecodeError):
        return FirstWord(common=True)
    finally:
        with suppress(OSError):
            place.unlink()


def main(place: str) -> None:
    """Prints the answer to the question in the file ``place``."""
    from safelaunch.capture import user_source
    from safelaunch.supervise import answer
    from safelaunch.verdict.diagnose import first_word, first_word_of_active

    question = from_msgpack(Path(place).read_bytes(), _Question)
    evidence, _ = received(question.evidence)
    evidence = msgspec.structs.replace(evidence, missing_ranks=question.missing_ranks)
    if question.active is None:
        found = first_word(evidence, user_source.text)
        found = msgspec.structs.replace(found, proved=question.prove and answer.proves(evidence))
    else:
        found = first_word_of_active(evidence, question.active)
    sys.stdout.buffer.write(msgspec.json.encode(found))
