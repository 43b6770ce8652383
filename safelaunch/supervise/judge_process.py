"""Puts an early look into words, in a short-lived child process.

Few quiet jobs hang, so the supervisor doesn't load the diagnosis for an early look: its modules would stay in memory,
and its faults would affect the watch.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import msgspec

from safelaunch.capture import command
from safelaunch.model import Evidence, FirstWord
from safelaunch.supervise.cluster.evidence import condense, unpack_evidence
from safelaunch.supervise.judge import proves
from safelaunch.system.decoding import from_json, from_msgpack
from safelaunch.system.errors import CaptureError

DEADLINE_S = 30.0  # on a busy machine, an interpreter takes seconds to start
_ROOT = Path(__file__).resolve().parents[2]


class _JudgeInput(msgspec.Struct, frozen=True):
    evidence: list[bytes]
    missing_ranks: tuple[int, ...] = ()
    active: tuple[int, ...] | None = None
    """ranks that compute, read or write; None: no rank moves"""
    prove: bool = False
    """check if the evidence proves the job dead"""


def ask(evidence: Evidence, active: Collection[int] | None, place: Path, *, prove: bool = False) -> FirstWord:
    """Returns, within ``DEADLINE_S``, what an early look found; empty if the child process fails.

    Args:
        place: Path of a temporary file.
    """
    ranks = tuple(active) if active is not None else None
    question = _JudgeInput(condense(evidence), evidence.missing_ranks, ranks, prove)
    try:
        place.write_bytes(msgspec.msgpack.encode(question))
        # The working directory can hold modules of any name.
        program = f"import sys; sys.path[:] = [{str(_ROOT)!r}, *filter(None, sys.path)]; from {__name__} import main; "
        output = command.run([sys.executable, "-c", f"{program}main({str(place)!r})"], deadline_s=DEADLINE_S)
        return from_json(output.stdout, FirstWord)
    except (OSError, CaptureError, msgspec.DecodeError):
        return FirstWord(common=True)
    finally:
        with suppress(OSError):
            place.unlink()


def main(place: str) -> None:
    from safelaunch.capture import user_source
    from safelaunch.verdict.first_word import first_word, first_word_of_active

    question = from_msgpack(Path(place).read_bytes(), _JudgeInput)
    evidence, _ = unpack_evidence(question.evidence)
    evidence = msgspec.structs.replace(evidence, missing_ranks=question.missing_ranks)
    if question.active is None:
        words = first_word(evidence, user_source.text)
        words = msgspec.structs.replace(words, proved=question.prove and proves(evidence))
    else:
        words = first_word_of_active(evidence, question.active)
    sys.stdout.buffer.write(msgspec.json.encode(words))
