"""Collects everything about each rank, from the looks already taken to the logs, and writes it as it arrives.

The least intrusive sources come first: those that need nothing of the rank, those without the GIL, then the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec

from safelaunch.capture import flight_dump, flight_recorder, last_words, stacks
from safelaunch.capture.redaction import without_secrets
from safelaunch.capture.result import FileGroup, Gate, Result, Sink, gather, late
from safelaunch.model import OWN_RECORDS, Artifact, GilTest, Processes, Progress, RankEvidence, RankExit
from safelaunch.system.printable import is_clean
from safelaunch.system.redaction.redactor import Redactor

from .flight_recorder import FlightCapture
from .last_words import LastWords
from .look import Look, RankLook, Target, evidence_of

RANK_DEADLINE_S = 8.0
RAW_OUTPUT = "contains the job's terminal sequences: read it with less or vim, not with cat"


ServerReply = tuple[GilTest, FlightCapture]  # of a rank's worker server


@dataclass(frozen=True, slots=True)
class Known:
    """What the supervisor knows about a rank without asking it."""

    progress: Progress | None = None
    pid: int = 0
    page_name: str = ""
    exit: RankExit | None = None
    code_roots: tuple[str, ...] = ()
    gpu: str = ""
    answer: ServerReply | None = None  # given before the rank was released
    output: Result[str] | None = None  # the end of it, of a rank without a beacon


def ranks(
    targets: Sequence[Target],
    looks: Sequence[Look],
    known: Mapping[int, Known],
    pages: Path,
    host: str,
    sink: Sink,
    found: dict[int, RankEvidence] | None = None,
    *,
    ask: bool = True,
    patience: float = 1.0,
) -> tuple[RankEvidence, ...]:
    """The evidence of all ``targets``, collected in parallel; every file, or its absence, goes to ``sink``.

    ``ask`` False: the ranks are gone or about to end, so their worker servers are not asked. ``patience``: so many
    times longer than on an idle machine it may take. Of a rank that comes too
    late, evidence and files are those of the steps that it finished. ``found`` has them by rank as they come.
    """
    found = {} if found is None else found
    gates = [Gate(sink) for _ in targets]

    calls = [
        partial(_rank, target, looks, known.get(target.rank, Known()), pages, host, gate, ask, found)
        for target, gate in zip(targets, gates, strict=True)
    ]
    deadline_s = (RANK_DEADLINE_S + 2.0) * patience
    results = gather(calls, deadline_s=deadline_s)
    for target, gate, result in zip(targets, gates, results, strict=True):
        gate.close()
        if result is None:
            sink.add(Artifact(f"ranks/{target.rank}", "safelaunch", deadline_s, late(deadline_s)), None)
        if target.rank not in found:
            found[target.rank] = at_hand(target, looks, known.get(target.rank, Known()), host, sink)
    return tuple(found[target.rank] for target in targets)


def _known_of(target: Target, looks: Sequence[Look], known: Known, host: str) -> RankEvidence:
    main, children = evidence_of(looks, target.rank)
    return RankEvidence(
        rank=target.rank,
        host=host,
        pid=target.pid,
        local_rank=target.local_rank,
        progress=known.progress,
        main=main,
        children=children,
        flight_record=known.answer[1].record.value if known.answer is not None else None,
        exit=known.exit,
        beacon=target.has_beacon,
        code_roots=known.code_roots,
        gpu=known.gpu,
    )


def at_hand(target: Target, looks: Sequence[Look], known: Known, host: str, sink: Sink) -> RankEvidence:
    """What is there already, with its files: all that is left of a rank whose other evidence comes too late."""
    folder = f"ranks/{target.rank}"
    found = _known_of(target, looks, known, host)
    _write_stacks(folder, most_telling(looks, target.rank), sink)
    seen = Processes(found.main, found.children) if found.main is not None else None
    sink.add_json(_from_proc(f"{folder}/proc.json", found.main is not None), seen)
    progress = known.progress
    sink.add_json(
        Artifact(f"{folder}/progress.json", "progress page", 0.0, "" if progress else "this rank has no beacon"),
        progress,
    )
    if known.answer is not None:
        _write_flight_record(target.rank, known.answer[1], sink)
        found = msgspec.structs.replace(found, gil=without_secrets(known.answer[0], sink.redactor))
    return found


def _rank(
    target: Target,
    looks: Sequence[Look],
    known: Known,
    pages: Path,
    host: str,
    gate: Gate,
    ask: bool,
    found: dict[int, RankEvidence],
) -> RankEvidence:
    """Collects the evidence of one rank in steps; after each, ``found`` has what there is so far."""
    folder = f"ranks/{target.rank}"
    step = FileGroup(gate)

    def take(side: RankEvidence) -> RankEvidence:
        step.done(lambda: found.update({target.rank: side}))
        return side

    kept = None if ask else _kept_at_exit(pages, target.page_name or known.page_name, gate.redactor)
    known = _answering(known, kept)
    side = take(at_hand(target, looks, known, host, step))
    if known.answer is None and ask and target.socket is not None:
        gil, capture = ask_server(target)
        gil, capture = without_secrets(gil, gate.redactor), without_secrets(capture, gate.redactor)
        _write_flight_record(target.rank, capture, step)
        side = take(msgspec.structs.replace(side, flight_record=capture.record.value, gil=gil))
    elif known.answer is None:
        reason = "not asked: the rank is ending" if not ask else _no_server(target)
        step.add(Artifact(f"{folder}/flight_recorder.json", "worker server", 0.0, reason), None)
    words = without_secrets(_last_words(pages, target.page_name or known.page_name, known.output), gate.redactor)
    _write_last_words(folder, words, step)
    return take(_with_last_words(side, words))


def _answering(known: Known, kept: FlightCapture | None) -> Known:
    """With the Flight Recorder that the rank has ``kept`` at its exit, if any."""
    if kept is None:
        return known
    return replace(known, answer=(known.answer[0] if known.answer else GilTest(), kept))


def most_telling(looks: Sequence[Look], rank: int) -> RankLook | None:
    """The newest look at a rank that has its stack; if none has, the newest that has anything about it.

    On a busy machine, a look may miss its deadline after an earlier one succeeded.
    """
    seen = [look.ranks[rank] for look in looks if rank in look.ranks]
    with_main = [look for look in seen if look.main is not None]
    with_stack = [look for look in with_main if look.main is not None and look.main.stack.value is not None]
    return next((group[-1] for group in (with_stack, with_main, seen) if group), None)


def of_ended(rank: int, known: Known, pages: Path, host: str, sink: Sink) -> RankEvidence:
    """The evidence of a rank that ended before a look at it: what it recorded itself."""
    folder, progress = f"ranks/{rank}", known.progress
    gone = "the rank ended before safelaunch could look at it"
    sink.add(Artifact(f"{folder}/stack.txt", "py-spy dump", 0.0, gone), None)
    kept = _kept_at_exit(pages, known.page_name, sink.redactor)
    if kept is not None:
        _write_flight_record(rank, kept, sink)
    else:
        sink.add(Artifact(f"{folder}/flight_recorder.json", "worker server", 0.0, gone), None)
    if progress is not None:
        sink.add_json(Artifact(f"{folder}/progress.json", "progress page", 0.0), progress)
    words = without_secrets(_last_words(pages, known.page_name), sink.redactor)
    _write_last_words(folder, words, sink)
    target = Target(rank, progress.local_rank if progress else -1, known.pid, 0, known.page_name)
    return _with_last_words(_known_of(target, (), _answering(known, kept), host), words)


def _with_last_words(side: RankEvidence, words: LastWords) -> RankEvidence:
    return msgspec.structs.replace(
        side,
        **{name: getattr(words, name) for name in OWN_RECORDS},
        fatal=words.fatal,
        log_tail=words.log.value or "",
        batch=words.noted.batch,
        device=words.noted.device,
    )


def of_another_node(side: RankEvidence, sink: Sink) -> None:
    """The files of a rank whose evidence came from its own node: what they are made from is in ``side``."""
    folder, how = f"ranks/{side.rank}", f"from {side.host}"
    main, children = side.main, side.children
    seen = Processes(main, children) if main is not None else None
    sink.add_json(Artifact(f"{folder}/proc.json", how, 0.0, "" if main else "its node has sent none"), seen)
    processes = [one for one in (main, *children) if one is not None]
    samples = [process.stacks[-1] for process in processes if process.stacks]
    missing = "" if samples else "its node has sent none"
    sink.add_json(Artifact(f"{folder}/stack.json", how, 0.0, missing), samples or None)
    texts = [
        stacks.to_text(process.stacks[-1] if process.stacks else None, process.states[-1] if process.states else None)
        for process in processes
    ]
    sink.add(Artifact(f"{folder}/stack.txt", how, 0.0, "" if texts else missing), "\n".join(texts) if texts else None)
    record = flight_dump.to_json(side.flight_record) if side.flight_record is not None else None
    missing = "" if record else "its node has sent none"
    sink.add(Artifact(f"{folder}/flight_recorder.json", how, 0.0, missing), record)
    if side.progress is not None:
        sink.add_json(Artifact(f"{folder}/progress.json", how, 0.0), side.progress)
    _write_own_records(folder, side, how, sink)
    if side.log_tail:
        note = RAW_OUTPUT if not is_clean(side.log_tail) else ""
        sink.add(Artifact(f"{folder}/log_tail.txt", how, 0.0, note=note), side.log_tail)


def ask_server(target: Target, *, deadline_s: float = 2.0) -> ServerReply:
    """The GIL test and the Flight Recorder of a rank. A rank that is exiting gets no question that needs the GIL."""
    path, questions = str(target.socket), target.questions
    gil = flight_recorder.gil_test(path, questions, deadline_s=deadline_s / 2) if questions is not None else GilTest()
    return gil, flight_recorder.flight_record_of(
        path,
        questions,
        json_deadline_s=deadline_s,
        pickle_deadline_s=deadline_s,
        ask_python=questions is not None and gil.python is not False,
    )


def _no_server(target: Target) -> str:
    if not target.has_beacon:
        return "this rank has no beacon (not started by safelaunch, python -I, or PYTHONPATH was replaced)"
    return "the worker server is not running: torch.distributed was not imported yet, or this torch has none"


def _from_proc(path: str, there: bool) -> Artifact:
    return Artifact(path, "/proc", 0.0, "" if there else "the process has ended")


def _write_stacks(folder: str, look: RankLook | None, sink: Sink) -> None:
    main = look.main if look is not None else None
    if look is None or main is None:
        sink.add(Artifact(f"{folder}/stack.txt", "py-spy dump", 0.0, "safelaunch could not look at the rank"), None)
        return
    texts = [stacks.to_text(main.stack.value, main.state, missing=main.stack.missing)]
    for child in look.children:
        texts.append(stacks.to_text(child.stack.value, child.state, missing=child.stack.missing))
    shown = main.stack.artifact(f"{folder}/stack.txt")
    shown = msgspec.structs.replace(shown, missing="", note=shown.missing or shown.note)
    sink.add(shown, "\n".join(texts))
    samples = [process.stack.value for process in (main, *look.children) if process.stack.value is not None]
    sink.add_json(main.stack.artifact(f"{folder}/stack.json"), samples or None)


def _write_flight_record(rank: int, capture: FlightCapture, sink: Sink) -> None:
    sink.add(capture.json.artifact(f"ranks/{rank}/flight_recorder.json"), capture.json.value)
    sink.add(capture.pickle.artifact(f"ranks/{rank}/flight_recorder.pickle"), capture.pickle.value)
    if capture.pickle.value is not None:
        # The folder that torchfrtrace reads.
        sink.add(capture.pickle.artifact(f"flight_recorder/nccl_trace_rank_{rank}"), capture.pickle.value)


def _kept_at_exit(pages: Path, page_name: str, redactor: Redactor) -> FlightCapture | None:
    return without_secrets(flight_recorder.kept_at_exit(pages / page_name), redactor) if page_name else None


def _last_words(pages: Path, page_name: str, output: Result[str] | None = None) -> LastWords:
    if page_name:
        return last_words.read(pages / page_name)
    return LastWords(log=output) if output is not None else LastWords()


def _write_own_records(folder: str, side: RankEvidence | LastWords, how: str, sink: Sink) -> None:
    for name in OWN_RECORDS:
        if value := getattr(side, name):
            sink.add_json(Artifact(f"{folder}/{name}.json", how, 0.0), value)


def _write_last_words(folder: str, words: LastWords, sink: Sink) -> None:
    """Writes the end of the rank's output, and its other records if they exist."""
    log = words.log.artifact(f"{folder}/log_tail.txt")
    if words.log.value and not is_clean(words.log.value):
        log = msgspec.structs.replace(log, note=RAW_OUTPUT)
    sink.add(log, words.log.value)
    if words.fault_text:
        sink.add(Artifact(f"{folder}/fault.txt", "faulthandler", 0.0), words.fault_text)
    _write_own_records(folder, words, "beacon", sink)
    if words.snapshot is not None:
        note = "for https://pytorch.org/memory_viz"
        snapshot = Artifact(f"{folder}/memory_snapshot.pickle", "torch's allocator", 0.0, note=note)
        sink.add_file(snapshot, words.snapshot, dump=True)
