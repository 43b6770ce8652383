"""Collects each rank's evidence, and writes each file as it arrives.

The least intrusive sources come first: those that need nothing from the rank, then those that don't need its GIL, then
the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec

from safelaunch.capture import flight_dump, flight_recorder, last_words, stacks, worker_server
from safelaunch.capture.gather import gather, late
from safelaunch.capture.redaction import without_secrets
from safelaunch.capture.result import Result
from safelaunch.capture.sink import FileGroup, Gate, Sink
from safelaunch.model import OWN_RECORDS, Artifact, GilTest, Processes, Progress, RankEvidence, RankExit
from safelaunch.system.printable import is_clean
from safelaunch.system.redaction.redactor import Redactor

from .flight_recorder import FlightCapture
from .last_words import LastWords
from .look import Look, RankLook, Target, process_evidence

RANK_DEADLINE_S = 8.0
RAW_OUTPUT = "contains the job's terminal sequences: read it with less or vim, not with cat"


ServerReply = tuple[GilTest, FlightCapture]  # from a rank's worker server


@dataclass(frozen=True, slots=True)
class RankBasics:
    progress: Progress | None = None
    pid: int = 0
    page_name: str = ""
    exit: RankExit | None = None
    code_roots: tuple[str, ...] = ()
    gpu: str = ""
    answer: ServerReply | None = None  # received before the rank was released
    output: Result[str] | None = None  # its tail, if the rank has no beacon


def ranks(
    targets: Sequence[Target],
    looks: Sequence[Look],
    basics: Mapping[int, RankBasics],
    pages: Path,
    host: str,
    sink: Sink,
    evidence: dict[int, RankEvidence] | None = None,
    *,
    ask: bool = True,
    patience: float = 1.0,
) -> tuple[RankEvidence, ...]:
    """Collects the evidence on all ``targets`` in parallel; each file, or the reason for its absence, goes to ``sink``.

    Args:
        looks: The looks so far, oldest first.
        basics: Facts known about each rank.
        pages: The directory of progress pages.
        evidence: Receives each rank's evidence as it arrives. If a rank is late, only its finished steps are included.
        ask: Whether to query the ranks' worker servers; False if the ranks are gone or about to end.
        patience: Factor for the deadline; 1 on an idle machine.
    """
    evidence = {} if evidence is None else evidence
    gates = [Gate(sink) for _ in targets]

    calls = [
        partial(_rank, target, looks, basics.get(target.rank, RankBasics()), pages, host, gate, ask, evidence)
        for target, gate in zip(targets, gates, strict=True)
    ]
    deadline_s = (RANK_DEADLINE_S + 2.0) * patience
    results = gather(calls, deadline_s=deadline_s)
    for target, gate, result in zip(targets, gates, results, strict=True):
        gate.close()
        if result is None:
            sink.add(Artifact(f"ranks/{target.rank}", "safelaunch", deadline_s, late(deadline_s)), None)
        if target.rank not in evidence:
            evidence[target.rank] = at_hand(target, looks, basics.get(target.rank, RankBasics()), host, sink)
    return tuple(evidence[target.rank] for target in targets)


def _evidence_at_hand(target: Target, looks: Sequence[Look], basics: RankBasics, host: str) -> RankEvidence:
    main, children = process_evidence(looks, target.rank)
    return RankEvidence(
        rank=target.rank,
        host=host,
        pid=target.pid,
        local_rank=target.local_rank,
        progress=basics.progress,
        main=main,
        children=children,
        flight_record=basics.answer[1].record.value if basics.answer is not None else None,
        exit=basics.exit,
        beacon=target.has_beacon,
        code_roots=basics.code_roots,
        gpu=basics.gpu,
    )


def at_hand(target: Target, looks: Sequence[Look], basics: RankBasics, host: str, sink: Sink) -> RankEvidence:
    """Returns the evidence that already exists, and writes its files.

    If a rank doesn't respond in time, it has no other evidence.
    """
    folder = f"ranks/{target.rank}"
    evidence = _evidence_at_hand(target, looks, basics, host)
    _write_stacks(folder, most_telling(looks, target.rank), sink)
    states = Processes(evidence.main, evidence.children) if evidence.main is not None else None
    sink.add_json(_from_proc(f"{folder}/proc.json", evidence.main is not None), states)
    progress = basics.progress
    sink.add_json(
        Artifact(f"{folder}/progress.json", "progress page", 0.0, "" if progress else "this rank has no beacon"),
        progress,
    )
    if basics.answer is not None:
        _write_flight_record(target.rank, basics.answer[1], sink)
        evidence = msgspec.structs.replace(evidence, gil=without_secrets(basics.answer[0], sink.redactor))
    return evidence


def _rank(
    target: Target,
    looks: Sequence[Look],
    basics: RankBasics,
    pages: Path,
    host: str,
    gate: Gate,
    ask: bool,
    by_rank: dict[int, RankEvidence],
) -> RankEvidence:
    folder = f"ranks/{target.rank}"
    step = FileGroup(gate)

    def take(evidence: RankEvidence) -> RankEvidence:
        step.done(lambda: by_rank.update({target.rank: evidence}))
        return evidence

    kept = None if ask else _kept_at_exit(pages, target.page_name or basics.page_name, gate.redactor)
    basics = _with_kept_record(basics, kept)
    evidence = take(at_hand(target, looks, basics, host, step))
    if basics.answer is None and ask and target.socket is not None:
        gil, capture = ask_server(target)
        gil, capture = without_secrets(gil, gate.redactor), without_secrets(capture, gate.redactor)
        _write_flight_record(target.rank, capture, step)
        evidence = take(msgspec.structs.replace(evidence, flight_record=capture.record.value, gil=gil))
    elif basics.answer is None:
        reason = "not queried: the rank is ending" if not ask else _no_server(target)
        step.add(Artifact(f"{folder}/flight_recorder.json", "worker server", 0.0, reason), None)
    words = without_secrets(_last_words(pages, target.page_name or basics.page_name, basics.output), gate.redactor)
    _write_last_words(folder, words, step)
    return take(_with_last_words(evidence, words))


def _with_kept_record(basics: RankBasics, kept: FlightCapture | None) -> RankBasics:
    if kept is None:
        return basics
    return replace(basics, answer=(basics.answer[0] if basics.answer else GilTest(), kept))


def most_telling(looks: Sequence[Look], rank: int) -> RankLook | None:
    """Returns the newest look that has the rank's stack, or else the newest look; None if no look has the rank.

    On a busy machine, a look can miss its deadline after an earlier one succeeded.
    """
    views = [look.ranks[rank] for look in looks if rank in look.ranks]
    with_main = [view for view in views if view.main is not None]
    with_stack = [view for view in with_main if view.main is not None and view.main.stack.value is not None]
    return next((group[-1] for group in (with_stack, with_main, views) if group), None)


def of_ended(rank: int, basics: RankBasics, pages: Path, host: str, sink: Sink) -> RankEvidence:
    """Returns the evidence on a rank that ended before it was looked at: the records that it left."""
    folder, progress = f"ranks/{rank}", basics.progress
    gone = "the rank ended before safelaunch could look at it"
    sink.add(Artifact(f"{folder}/stack.txt", "py-spy dump", 0.0, gone), None)
    kept = _kept_at_exit(pages, basics.page_name, sink.redactor)
    if kept is not None:
        _write_flight_record(rank, kept, sink)
    else:
        sink.add(Artifact(f"{folder}/flight_recorder.json", "worker server", 0.0, gone), None)
    if progress is not None:
        sink.add_json(Artifact(f"{folder}/progress.json", "progress page", 0.0), progress)
    words = without_secrets(_last_words(pages, basics.page_name), sink.redactor)
    _write_last_words(folder, words, sink)
    target = Target(rank, progress.local_rank if progress else -1, basics.pid, 0, basics.page_name)
    return _with_last_words(_evidence_at_hand(target, (), _with_kept_record(basics, kept), host), words)


def _with_last_words(evidence: RankEvidence, words: LastWords) -> RankEvidence:
    return msgspec.structs.replace(
        evidence,
        **{name: getattr(words, name) for name in OWN_RECORDS},
        fatal=words.fatal,
        log_tail=words.log.value or "",
        batch=words.noted.batch,
        device=words.noted.device,
    )


def of_another_node(evidence: RankEvidence, sink: Sink) -> None:
    folder, how = f"ranks/{evidence.rank}", f"from {evidence.host}"
    main, children = evidence.main, evidence.children
    states = Processes(main, children) if main is not None else None
    absent = "its node sent none"
    sink.add_json(Artifact(f"{folder}/proc.json", how, 0.0, "" if main else absent), states)
    processes = [process for process in (main, *children) if process is not None]
    samples = [process.stacks[-1] for process in processes if process.stacks]
    missing = "" if samples else absent
    sink.add_json(Artifact(f"{folder}/stack.json", how, 0.0, missing), samples or None)
    texts = [
        stacks.to_text(process.stacks[-1] if process.stacks else None, process.states[-1] if process.states else None)
        for process in processes
    ]
    sink.add(Artifact(f"{folder}/stack.txt", how, 0.0, "" if texts else missing), "\n".join(texts) if texts else None)
    record = flight_dump.to_json(evidence.flight_record) if evidence.flight_record is not None else None
    missing = "" if record else absent
    sink.add(Artifact(f"{folder}/flight_recorder.json", how, 0.0, missing), record)
    if evidence.progress is not None:
        sink.add_json(Artifact(f"{folder}/progress.json", how, 0.0), evidence.progress)
    _write_own_records(folder, evidence, how, sink)
    if evidence.log_tail:
        note = RAW_OUTPUT if not is_clean(evidence.log_tail) else ""
        sink.add(Artifact(f"{folder}/log_tail.txt", how, 0.0, note=note), evidence.log_tail)


def ask_server(target: Target, *, deadline_s: float = 2.0) -> ServerReply:
    """Queries a rank's GIL test and Flight Recorder. Skips requests that need the GIL if the rank is exiting."""
    path, questions = str(target.socket), target.questions
    gil = worker_server.gil_test(path, questions, deadline_s=deadline_s / 2) if questions is not None else GilTest()
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
    return "the worker server isn't running: torch.distributed wasn't imported yet, or this torch has none"


def _from_proc(path: str, exists: bool) -> Artifact:
    return Artifact(path, "/proc", 0.0, "" if exists else "the process has ended")


def _write_stacks(folder: str, look: RankLook | None, sink: Sink) -> None:
    main = look.main if look is not None else None
    if look is None or main is None:
        sink.add(Artifact(f"{folder}/stack.txt", "py-spy dump", 0.0, "safelaunch couldn't look at the rank"), None)
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
        # torchfrtrace reads this folder.
        sink.add(capture.pickle.artifact(f"flight_recorder/nccl_trace_rank_{rank}"), capture.pickle.value)


def _kept_at_exit(pages: Path, page_name: str, redactor: Redactor) -> FlightCapture | None:
    return without_secrets(flight_recorder.kept_at_exit(pages / page_name), redactor) if page_name else None


def _last_words(pages: Path, page_name: str, output: Result[str] | None = None) -> LastWords:
    if page_name:
        return last_words.read(pages / page_name)
    return LastWords(log=output) if output is not None else LastWords()


def _write_own_records(folder: str, records: RankEvidence | LastWords, how: str, sink: Sink) -> None:
    for name in OWN_RECORDS:
        if value := getattr(records, name):
            sink.add_json(Artifact(f"{folder}/{name}.json", how, 0.0), value)


def _write_last_words(folder: str, words: LastWords, sink: Sink) -> None:
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
