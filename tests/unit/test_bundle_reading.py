"""Evidence read from bundles, dumps and run directories in any state."""

from __future__ import annotations

import json
import os
import pickle
import tarfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from safelaunch import addons
from safelaunch.beacon import layout
from safelaunch.bundle.reading import locate
from safelaunch.bundle.reading.files import Unreadable
from safelaunch.capture.flight_recorder import NCCL_ONLY
from safelaunch.cli import main
from safelaunch.model import (
    FatalError,
    Frame,
    GilTest,
    Launched,
    MemoryKills,
    NcclLog,
    RankEvidence,
    RankException,
    RankExit,
    RankFile,
)
from safelaunch.verdict.diagnose import diagnose
from tests.support.bundles import (
    NAMES,
    SLEEPER,
    dumps,
    hang,
    mismatching,
    run_directory,
    verdict_at,
    write_bundle,
    write_json,
)
from tests.support.evidence import C10D, at, behind, entry, in_user, job, past, rank, record, waiting

# --- bundles ----------------------------------------------------------------------------------------------------------


def test_bundle_reads_back_to_same_evidence(tmp_path: Path) -> None:
    evidence = hang()
    assert locate.read(write_bundle(tmp_path / "b", evidence)).evidence == evidence


def test_bundle_diagnosed_again_has_same_job_facts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    launched = Launched(("--nproc-per-node=4", "train.py"), (), "2.13.0", run_name="train", host="n1", safelaunch="1")
    versions = {"python": "3.11", "torch": "2.13.0"}
    evidence = msgspec.structs.replace(hang(), launched=launched, time="2026-11-28T16:05:15Z", versions=versions)
    written = diagnose(evidence)
    root = write_bundle(tmp_path / "b", evidence)
    write_json(root / "verdict.json", written)
    again = verdict_at(root, capsys)[1]
    for field in ("run", "host", "time", "world_size", "versions", "command"):
        assert again[field] == json.loads(msgspec.json.encode(written))[field] and again[field], field
    assert again["command"] == ["safelaunch", "--nproc-per-node=4", "train.py"]


def test_older_bundle_without_job_facts_takes_them_from_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write_bundle(tmp_path / "b", msgspec.structs.replace(hang(), launched=Launched(run_name="train")))
    (root / "verdict.json").write_text('{"outcome": "hang"}')
    (root / "node" / "node1").mkdir(parents=True)
    (root / "node" / "node1" / "versions.json").write_text('{"python": "3.11", "kernel": "6.1"}')
    code, verdict = verdict_at(root, capsys)
    assert code == 0
    assert (verdict["run"], verdict["time"], verdict["world_size"]) == ("train", "", 4)
    assert (verdict["versions"], verdict["command"], verdict["host"]) == ({"python": "3.11"}, [], "")
    manifest = json.loads((root / "manifest.json").read_text())
    (tmp_path / "versions.json").write_text('{"python": "of somebody else"}')
    (root / "manifest.json").write_text(json.dumps({**manifest, "host": "../.."}))
    assert verdict_at(root, capsys)[1]["versions"] == {}, "a bundle is read from its own directory alone"


# Fields stored in other files of the bundle: the folder's name, progress.json, proc.json, stack.json and so on.
ELSEWHERE = {
    "rank",
    "progress",
    "main",
    "children",
    "flight_record",
    "exception",
    "exit_call",
    "caught",
    "log_tail",
} | {"device_memory"}


def test_every_rank_field_reads_back(tmp_path: Path) -> None:
    """Each field differs from its default, so that a forgotten field is noticed."""
    other = replace(
        SLEEPER,
        host="node7",
        pid=4711,
        local_rank=3,
        gil=GilTest(ping=True, python=False),
        exit=RankExit(-9, 12.5),
        fatal=FatalError("Segmentation fault"),
        memory_kills=MemoryKills("Killed process 4711", 1, 2),
        beacon=False,
        code_roots=("/usr/lib/python3",),
        gpu="GPU-1b3f",
        deaths=("python[17140]: segfault at 0",),
        gpu_errors=("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus",),
        batch=32,
        device=1,
        nccl_log=NcclLog("node/node7/nccl.log", ("Failed to open libibverbs.so",)),
    )
    assert {name for name in RankEvidence.__struct_fields__ if name not in RankFile.__struct_fields__} == ELSEWHERE
    defaults = RankFile()
    assert [name for name, value in RankFile.of(other).fields.items() if value == getattr(defaults, name)] == []
    (rank_read,) = locate.read(write_bundle(tmp_path / "b", job(other))).evidence.ranks
    assert rank_read == other


def test_bundle_json_verdict_equals_live_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, verdict = verdict_at(write_bundle(tmp_path / "b", hang()), capsys)
    assert (code, verdict["cause"], verdict["confidence"]) == (0, "stuck-in-user-code", "high")
    assert verdict == json.loads(msgspec.json.encode(diagnose(hang())))


def test_bundle_screen_names_cause_and_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", str(write_bundle(tmp_path / "b", hang()))]) == 0
    out = capsys.readouterr().out
    assert out.startswith("the job hangs: stuck-in-user-code (confidence: high)\n")
    assert out.endswith(f"read from: {tmp_path / 'b'}\n")


def test_bundle_archive_is_diagnosed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_bundle(tmp_path / "b", hang())
    with tarfile.open(tmp_path / "b.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "b", "b")
    assert verdict_at(tmp_path / "b.tar.gz", capsys)[1]["cause"] == "stuck-in-user-code"


def test_bundle_archive_members_outside_it_are_not_extracted(tmp_path: Path) -> None:
    write_bundle(tmp_path / "b", hang())
    with tarfile.open(tmp_path / "evil.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "b", "b")
        tar.add(tmp_path / "b" / "manifest.json", "../../escaped")
        tar.add(tmp_path / "b" / "manifest.json", str(tmp_path / "absolute").lstrip("/"))
        link = tarfile.TarInfo("b/link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    assert len(locate.read(tmp_path / "evil.tar.gz").evidence.ranks) == 4
    assert not list(tmp_path.parent.glob("escaped")) and not (tmp_path / "absolute").exists()


DAMAGE: dict[str, Callable[[Path], object]] = {
    "gone": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:-20]),
    "noise": lambda path: path.write_bytes(os.urandom(200)),
    "deep": lambda path: path.write_bytes(b"[" * 100_000),
    "another type": lambda path: path.write_bytes(b'{"main": 3, "pid": "x", "rank": "x", "job": []}'),
    "a fifo": lambda path: (path.unlink(), os.mkfifo(path)),
    "a directory": lambda path: (path.unlink(), path.mkdir()),
    "a link to nowhere": lambda path: (path.unlink(), path.symlink_to("/nowhere/at/all")),
}


@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("name", ["rank.json", "progress.json", "proc.json", "flight_recorder.pickle"])
def test_damaged_rank_file_loses_only_its_part_and_is_named(name: str, how: str, tmp_path: Path) -> None:
    root = write_bundle(tmp_path / "b", hang())
    DAMAGE[how](root / "ranks" / "2" / name)
    contents = locate.read(root)
    verdict = diagnose(contents.evidence)
    assert (verdict.cause, [c.rank for c in verdict.culprits]) == ("stuck-in-user-code", [1])
    absent = how in ("gone", "a link to nowhere")
    assert absent or any(f"ranks/2/{name}" in problem for problem in contents.problems)


@pytest.mark.parametrize(
    "how", [how for how in DAMAGE if how not in ("gone", "a link to nowhere", "a fifo", "a directory")]
)
def test_damaged_manifest_keeps_culprit_and_is_named(how: str, tmp_path: Path) -> None:
    root = write_bundle(tmp_path / "b", hang())
    DAMAGE[how](root / "manifest.json")
    contents = locate.read(root)
    assert [c.rank for c in diagnose(contents.evidence).culprits] == [1]
    assert any("manifest.json" in problem for problem in contents.problems)


def test_flight_record_without_jobs_backend_is_ignored(tmp_path: Path) -> None:
    """The live verdict does the same: before torch 2.13, no recorder has gloo's collectives."""
    root = write_bundle(tmp_path / "b", hang())
    manifest = json.loads((root / "manifest.json").read_text())
    manifest["artifacts"] = [
        {"path": "ranks/2/flight_recorder.pickle", "how": "worker server", "duration_s": 0.0, "note": NCCL_ONLY}
    ]
    write_json(root / "manifest.json", manifest)
    records = {rank.rank: rank.flight_record for rank in locate.read(root).evidence.ranks}
    assert [rank for rank, record in records.items() if record is None] == [2]


def test_bundle_pickle_that_would_run_code_is_refused(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "ran"),)

    root = write_bundle(tmp_path / "b", hang())
    (root / "ranks/2/flight_recorder.pickle").write_bytes(pickle.dumps({"version": "2.10", "entries": [Evil()]}))
    contents = locate.read(root)
    assert not (tmp_path / "ran").exists()
    assert any("which no dump does" in problem for problem in contents.problems)


# --- several nodes ----------------------------------------------------------------------------------------------------


def nodes(tmp_path: Path, *parts: tuple[int, ...], world: int = 4) -> Path:
    everybody = {rank.rank: rank for rank in hang(world).ranks}
    for number, ranks in enumerate(parts):
        missing = tuple(sorted(set(range(world)) - set(ranks)))
        part = job(*(everybody[r] for r in ranks), missing_ranks=missing, world=world)
        write_bundle(tmp_path / "all" / f"train-node{number}", part)
    return tmp_path / "all"


def test_bundles_of_several_nodes_are_joined_into_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = nodes(tmp_path, (0, 1), (2, 3))
    code, verdict = verdict_at(folder, capsys)
    assert (code, verdict["cause"], [c["rank"] for c in verdict["culprits"]]) == (0, "stuck-in-user-code", [1])
    assert verdict["victims"] == "0,2-3"
    assert all((folder / claim["file"]).parent.is_dir() for claim in verdict["evidence"])
    assert locate.read(folder).evidence.missing_ranks == ()


def test_absent_node_bundle_leaves_culprit_unnamed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, verdict = verdict_at(nodes(tmp_path, (2, 3)), capsys)
    assert (code, verdict["culprits"]) == (1, [])  # no rank is named by majority while members are unseen
    assert any("0-1" in text for text in verdict["missing"])


def test_bundles_of_different_jobs_are_not_joined(tmp_path: Path) -> None:
    with pytest.raises(Unreadable, match="rank 1 is in train-node0 and in train-node1"):
        locate.read(nodes(tmp_path, (0, 1), (1, 2, 3)))


@pytest.mark.parametrize(
    ("second", "same"),
    [
        ((1000.0, 2800.0), True),  # its supervisor was alone, and acted at --max-stall
        ((1100.0, 1160.0), True),  # by a clock that is fast
        ((1400.0, 1460.0), False),  # after a restart
    ],
)
def test_bundles_of_different_incidents_are_not_joined(tmp_path: Path, second: tuple[float, float], same: bool) -> None:
    folder = nodes(tmp_path, (0, 1), (2, 3))
    for number, (progress_s, written_s) in enumerate([(1000.0, 1060.0), second]):
        path = folder / f"train-node{number}/manifest.json"
        timeline = [{"stage": "last progress", "unix_s": progress_s}, {"stage": "written", "unix_s": written_s}]
        path.write_text(json.dumps({**json.loads(path.read_text()), "timeline": timeline, "written_unix_s": written_s}))
    if same:
        assert len(locate.read(folder).evidence.ranks) == 4
        return
    with pytest.raises(Unreadable, match=r"different incidents: .* in train-node1 6 minutes after train-node0 was"):
        locate.read(folder)


def test_dumps_of_nodes_at_different_times_are_joined_without_steps(tmp_path: Path) -> None:
    whole = replace(
        hang(), outcome="dump", ranks=tuple(replace(rank, beacon=False, progress=None) for rank in hang().ranks)
    )
    for number, at_s in enumerate((1000.0, 1900.0)):
        half = replace(whole, ranks=whole.ranks[2 * number : 2 * number + 2])
        path = write_bundle(tmp_path / f"train-node{number}", half) / "manifest.json"
        timeline = [{"stage": "first look", "unix_s": at_s}, {"stage": "written", "unix_s": at_s + 8}]
        path.write_text(json.dumps({**json.loads(path.read_text()), "timeline": timeline, "written_unix_s": at_s + 8}))
    assert locate.read(tmp_path).evidence.ranks == whole.ranks


def test_node_bundles_with_shared_verdict_use_complete_one(tmp_path: Path) -> None:
    """One bundle holds every rank, and the others add nothing."""
    folder = nodes(tmp_path, (0, 1), (0, 1, 2, 3), (2, 3))
    for number in range(3):
        verdict = {"outcome": "hang", "bundle": {"host": "h", "path": "/b/train-node1", "whole": number == 1}}
        (folder / f"train-node{number}" / "verdict.json").write_text(json.dumps(verdict))
    contents = locate.read(folder)
    assert ([rank.rank for rank in contents.evidence.ranks], contents.files) == ([0, 1, 2, 3], {"": "train-node1/"})
    verdict["bundle"] = {"host": "h", "path": "/b/another", "whole": False}
    (folder / "train-node2" / "verdict.json").write_text(json.dumps(verdict))
    with pytest.raises(Unreadable, match="rank 0 is in train-node0 and in train-node1"):
        locate.read(folder)


def lost(number: int) -> RankEvidence:
    """Returns a rank whose peer has ended."""
    frames = (Frame(C10D, 3252, "all_reduce"), at(50), at(100, "<module>"))
    text = "[/x/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711"
    return rank(number, frames, more={"exception": RankException("RuntimeError", text, 200.0, frames, text)})


def two_supervisors(root: Path, *ranks: RankEvidence) -> Path:
    """Supervisor of ranks 0-1 stopped its ranks because of a hang; then the other supervisor looked at its ranks."""
    first = job(waiting(0), waiting(1), missing_ranks=(2, 3), world=4, launched=LAUNCHED)
    write_bundle(root / "train-node0", first)
    write_bundle(root / "train-node1", job(*ranks, outcome="crash", missing_ranks=(0, 1), world=4), "node2")
    return root


LAUNCHED = Launched(("exec", "--", "python", "train.py"), ("hang-debug",), "2.13.0")


def test_ranks_stopped_by_other_supervisor_leave_no_culprit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The other ranks lost their connections by that, so whether they had arrived is unknown."""
    folder = two_supervisors(tmp_path, lost(2), lost(3))
    code, verdict = verdict_at(folder, capsys)
    assert (code, verdict["outcome"], verdict["cause"], verdict["confidence"]) == (
        1,
        "hang",
        "no-rank-stands-out",
        "low",
    )
    assert "every rank has arrived" not in verdict["summary"]
    assert "their own safelaunch stopped them. Ranks 2-3 were looked at only afterwards" in verdict["summary"]
    assert not any("transport" in text for text in verdict["suggestions"])
    assert any("--cluster-store" in text for text in verdict["suggestions"])


def test_own_failure_of_second_node_is_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = replace(lost(3), exception=RankException("ValueError", "bad sample", 100.0, (at(41),), "ValueError"))
    _, verdict = verdict_at(two_supervisors(tmp_path, lost(2), own), capsys)
    assert (verdict["cause"], [culprit["rank"] for culprit in verdict["culprits"]]) == ("rank-exception", [3])


def test_sleeping_rank_on_second_node_is_culprit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asleep = rank(3, in_user(7, "load"), "sleep", flight=behind())
    _, verdict = verdict_at(two_supervisors(tmp_path, lost(2), asleep), capsys)
    assert (verdict["cause"], [culprit["rank"] for culprit in verdict["culprits"]]) == ("stuck-in-user-code", [3])


def test_lost_connections_alone_are_no_proof_of_arrival() -> None:
    verdict = diagnose(job(lost(0), lost(1), outcome="crash"))
    assert "every rank has arrived" not in verdict.summary
    assert not any("transport" in text for text in verdict.suggestions)


def test_launch_record_reads_back_from_bundles(tmp_path: Path) -> None:
    folder = two_supervisors(tmp_path, lost(2), lost(3))
    assert locate.read(folder).evidence.launched == LAUNCHED
    assert locate.read(folder).evidence.stopped == (0, 1)
    (folder / "train-node0" / "launch.json").write_text('{"typed": 3}')
    contents = locate.read(folder)
    assert contents.evidence.launched is None
    assert any("launch.json" in problem for problem in contents.problems)


# --- plain dumps ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("odd", [0, 3])
def test_dump_folder_names_mismatching_rank(
    name: str, odd: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = dumps(tmp_path / "dumps", mismatching(odd=odd), name)
    (folder / "README").write_text("not a dump")
    (folder / "log_2024").write_text("nor this")
    code, verdict = verdict_at(folder, capsys)
    assert (code, verdict["cause"], [c["rank"] for c in verdict["culprits"]]) == (0, "collective-mismatch", [odd])
    assert verdict["culprits"][0]["frame"]["line"] == 41
    assert {claim["file"] for claim in verdict["evidence"]} <= {path.name for path in folder.iterdir()}


def test_dump_folder_evidence_cites_dumps_for_source_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The lines in the dumps show the conditions of the script, because there is no stack.txt."""
    script = tmp_path / "train.py"
    script.write_text(
        "import torch.distributed as d\nif d.get_rank() == 0:\n    d.all_gather()\nelse:\n    d.all_reduce()\n"
    )
    stuck = (
        (Frame(C10D, 1, "all_gather"), at(3, "<module>", str(script))),
        (Frame(C10D, 1, "x"), at(5, "<module>", str(script))),
    )
    calls = [
        replace(entry(op, 4), frames=frames) for op, frames in zip(("all_gather", "all_reduce"), stuck, strict=True)
    ]
    folder = dumps(tmp_path / "dumps", {n: record(*past(3), calls[n > 0]) for n in range(3)})
    out = tmp_path / "out"
    main(["diagnose", str(folder), "-o", str(out)])
    capsys.readouterr()
    verdict = json.loads((out / "verdict.json").read_text())
    assert any("Ranks 1-2 never reach train.py:3" in claim["claim"] for claim in verdict["evidence"])
    cited = {claim["file"] for claim in (*verdict["evidence"], *verdict["proof"])}
    assert cited and all((folder / name).is_file() for name in cited), cited
    page = (out / "report.html").read_text()
    assert "stack.txt" not in page and "flight_recorder.json" not in page and "nccl_trace_rank_0" in page


def test_truncated_dump_loses_its_rank_and_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = dumps(tmp_path / "dumps", mismatching(odd=0))
    broken = folder / "nccl_trace_rank_3"
    broken.write_bytes(broken.read_bytes()[:100])
    code, verdict = verdict_at(folder, capsys)
    assert (code, verdict["culprits"]) == (1, [])
    assert verdict["cause"] == "collective-mismatch"
    assert any("nccl_trace_rank_3" in text for text in verdict["missing"])


def test_group_members_without_dump_are_missing_ranks(tmp_path: Path) -> None:
    folder = dumps(tmp_path / "dumps", {0: behind(), 1: behind()}, groups={"0": [0, 1, 2, 3, 4]})
    evidence = locate.read(folder).evidence
    assert (evidence.world_size, evidence.missing_ranks) == (5, (2, 3, 4))


def test_fuller_of_two_dumps_per_rank_is_used(tmp_path: Path) -> None:
    folder = dumps(tmp_path / "dumps", mismatching())
    dumps(folder, {n: record(entry("all_reduce", 4)) for n in range(4)}, "nccl_trace_rank_{}.json")
    contents = locate.read(folder)
    assert all(
        rank.flight_record is not None and len(rank.flight_record.entries) == 4 for rank in contents.evidence.ranks
    )


@pytest.mark.parametrize("newest", ["dump.{}.pkl", "nccl_trace_rank_{}"])
def test_dumps_of_different_attempts_are_not_mixed(
    newest: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise the fuller dump of each rank would come from either attempt."""
    for age, name in ((100, "nccl_trace_rank_{}"), (100, "dump.{}.pkl"), (0, newest)):
        usual = record(*past(30), entry("all_reduce", 31, line=50))
        older = {n: record(*past(3), entry("all_reduce", 4, line=50)) if n == 1 else usual for n in range(4)}
        folder = dumps(tmp_path / "dumps", mismatching(odd=2) if age == 0 else older, name)
        for n in range(4):
            os.utime(folder / name.format(n), (time.time() - age, time.time() - age))
    _, verdict = verdict_at(folder, capsys)
    assert (verdict["cause"], [c["rank"] for c in verdict["culprits"]]) == ("collective-mismatch", [2])
    other = next(name for name in ("dump.{}.pkl", "nccl_trace_rank_{}") if name != newest)
    assert any(text.startswith(f"{other.format(0)} and 3 more: ignored") for text in verdict["missing"])


def test_dumps_with_different_names_per_node_are_joined(tmp_path: Path) -> None:
    flights = mismatching()
    dumps(tmp_path / "dumps", {n: flights[n] for n in (0, 1)}, "nccl_trace_rank_{}")
    folder = dumps(tmp_path / "dumps", {n: flights[n] for n in (2, 3)}, "dump.{}.pkl")
    contents = locate.read(folder)
    assert [rank.rank for rank in contents.evidence.ranks] == [0, 1, 2, 3] and contents.problems == ()


def test_fifo_among_dumps_does_not_block_reading(tmp_path: Path) -> None:
    folder = dumps(tmp_path / "dumps", mismatching())
    os.mkfifo(folder / "nccl_trace_rank_4")
    done = threading.Event()
    thread = threading.Thread(target=lambda: (locate.read(folder), done.set()), daemon=True)
    thread.start()
    assert done.wait(120)


# --- nothing to read --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["absent", "empty", "no archive", "pictures"])
def test_diagnose_of_path_without_evidence_exits_2(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "path"
    if what in ("empty", "pictures"):
        path.mkdir()
    if what == "pictures":
        (path / "img_1").write_bytes(b"\x89PNG")
    if what == "no archive":
        path = tmp_path / "x.tar.gz"
        path.write_bytes(os.urandom(500))
    assert main(["diagnose", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""


@pytest.mark.parametrize(
    ("name", "shown"),
    [("passwd", "passwd."), ("api_token", "api_token."), ("password=hunter2x", "password=[redacted]")],
)
def test_unreadable_path_is_shown_with_reason_without_secrets(
    name: str, shown: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(b"BZh\0")
    assert main(["diagnose", str(tmp_path / name)]) == 2
    said = f"safelaunch: cannot diagnose {tmp_path / shown} It is neither a directory nor a bundle's archive (.tar.gz)"
    assert capfd.readouterr().err.startswith(said)


# --- paths without evidence -------------------------------------------------------------------------------------------

GIVE = (
    "safelaunch:   Name a job's output, its stacks, its Flight Recorder dumps or a bundle. While the job hangs,"
    " `safelaunch dump --all` on its node needs no file.\n"
)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("x.pt", b"PK\x03\x04\0\xff" * 99, "It is a zip archive, such as a checkpoint, not the output of a job."),
        ("python", b"\x7fELF\0\0\xff\xfe" * 99, "It is a program, not the output of a job."),
    ],
)
def test_file_of_another_kind_is_named_by_kind(
    name: str, content: bytes, said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(content)
    assert main(["diagnose", str(tmp_path / name)]) == 2
    assert capfd.readouterr() == ("", f"safelaunch: cannot diagnose {tmp_path / name}. {said}\n{GIVE}")


@pytest.mark.parametrize("content", [b"\x80\x02}q\0.", b'{"version": "2.4", "pg_config": {}, "entries": []}'])
def test_single_dump_asks_for_folder_of_all_dumps(
    content: bytes, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "dump_0").write_bytes(content)
    assert main(["diagnose", str(tmp_path / "dump_0")]) == 2
    first, fix = capfd.readouterr().err.splitlines()
    assert first.endswith("It is one Flight Recorder dump, or a pickle.")
    assert fix == "safelaunch:   Name the folder with the dumps of all ranks."


@pytest.mark.parametrize(
    ("names", "said"),
    [(["a.md", "b.md", "c.md", "d.md"], ", only a.md, b.md, c.md and 1 more."), ([], " It is an empty folder.")],
)
def test_diagnose_of_folder_without_evidence_lists_its_contents(
    names: list[str], said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in names:
        (tmp_path / name).touch()
    assert main(["diagnose", str(tmp_path)]) == 2
    first, rest = capfd.readouterr().err.split("\n", 1)
    assert first.endswith(said) and rest == GIVE


@pytest.mark.parametrize("count", [1, 2])
def test_log_without_logs_addon_reports_missing_addon(
    count: int, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(addons, "is_present", lambda addon: False)
    (tmp_path / "job.log").write_text("ValueError: no sample\n")
    assert main(["diagnose", *[str(tmp_path / "job.log")] * count]) == 2
    assert "this installation can't read logs: its add-on 'logs' is missing." in capfd.readouterr().err


def test_rank_exit_reads_back_to_same_verdict(tmp_path: Path) -> None:
    killed = rank(1, seen=False, more={"exit": RankExit(-9, 5.0)})
    evidence = job(waiting(0), killed, waiting(2), waiting(3), outcome="crash")
    assert diagnose(locate.read(write_bundle(tmp_path / "b", evidence)).evidence) == diagnose(evidence)


# --- a run directory that was left behind -----------------------------------------------------------------------------


def test_run_directory_with_exception_names_culprit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_directory(tmp_path, 2)
    raised = {"type": "ValueError", "message": "a bad batch", "time_unix_s": 5.0, "text": "Traceback",
              "frames": [{"file": "/home/me/train.py", "line": 7, "function": "load"}]}  # fmt: skip
    write_json(run.of_page(f"0-1-{os.getpid()}", layout.EXCEPTION_SUFFIX), raised)
    line = {"event": "failing", "time_unix_s": 6.0, "attempt": 0, "exits": {"1": 1}}
    run.agent_events.write_text(json.dumps(line) + "\n")
    code, verdict = verdict_at(run.root, capsys)
    assert (code, verdict["outcome"], verdict["cause"]) == (0, "crash", "rank-exception")
    assert [(c["rank"], c["step"], c["frame"]["line"]) for c in verdict["culprits"]] == [(1, 41, 7)]
    assert all((run.root / claim["file"]).exists() for claim in verdict["evidence"])


def test_run_directory_with_torch_dumps_names_culprit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_directory(tmp_path, 4)
    dumps(run.flight_recorder, mismatching(odd=0))
    code, verdict = verdict_at(run.root, capsys)
    assert (code, verdict["cause"], [c["rank"] for c in verdict["culprits"]]) == (0, "collective-mismatch", [0])
    assert verdict["culprits"][0]["step"] == 40
    assert any(claim["file"] == "flight_recorder/nccl_trace_rank_0" for claim in verdict["evidence"])


def test_run_directory_without_evidence_names_no_culprit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, verdict = verdict_at(run_directory(tmp_path, 2).root, capsys)
    assert (code, verdict["culprits"]) == (1, [])
