"""Hostile bundles, archives and run directories are read within limits and without leaving PATH."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import resource
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from safelaunch.beacon import layout
from safelaunch.bundle.reading import locate
from safelaunch.bundle.reading.archive import unpack
from safelaunch.bundle.reading.files import Unreadable
from safelaunch.cli import main
from safelaunch.verdict.diagnose import diagnose
from tests.support.bundles import (
    ZEROS,
    dumps,
    hang,
    header,
    mismatching,
    run_directory,
    sparse,
    verdict_at,
    write_bundle,
)


def changed(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2_000_000_000, 65_537, -1, 10**23])
@pytest.mark.parametrize("name", ["manifest.json", "ranks/2/progress.json"])
def test_impossible_world_size_is_ignored_and_named(name: str, size: int, tmp_path: Path) -> None:
    root = write_bundle(tmp_path / "b", hang())
    changed(root / name, **{"job": {"world_size": size}} if name == "manifest.json" else {"world_size": size})
    contents = locate.read(root)
    assert contents.evidence.world_size == 4
    assert any(name in problem for problem in contents.problems)
    assert [c.rank for c in diagnose(contents.evidence).culprits] == [1]


@pytest.mark.parametrize("name", ["999999999999", "²", "٣", "007", "65536", "1e9", "9" * 250])
def test_rank_folder_with_invalid_name_is_ignored_and_named(name: str, tmp_path: Path) -> None:
    root = write_bundle(tmp_path / "b", hang())
    (root / "ranks" / name).mkdir()
    contents = locate.read(root)
    assert ([rank.rank for rank in contents.evidence.ranks], contents.evidence.world_size) == ([0, 1, 2, 3], 4)
    assert contents.problems == (f"ranks/{name}: the name is not a rank number",)


# --- links ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ranks", "ranks/1", "ranks/1/rank.json", "ranks/1/log_tail.txt", "manifest.json"])
def test_link_out_of_bundle_is_not_followed(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    other = write_bundle(tmp_path / "other", hang(), host="elsewhere")
    for number in range(4):
        changed(other / f"ranks/{number}/rank.json", host="elsewhere")
        (other / f"ranks/{number}/log_tail.txt").write_text("elsewhere")
    root = write_bundle(tmp_path / "b", hang())
    path = root / name
    if path.exists():
        path.rename(tmp_path / "moved")
    path.symlink_to(other / name)
    main(["diagnose", str(root), "--json"])
    captured = capfd.readouterr()
    assert "elsewhere" not in captured.out + captured.err
    assert "link" in captured.out + captured.err


def test_dump_linked_from_outside_folder_is_not_read(tmp_path: Path) -> None:
    folder = dumps(tmp_path / "dumps", mismatching())
    (folder / "nccl_trace_rank_2").rename(tmp_path / "outside")
    (folder / "nccl_trace_rank_2").symlink_to("../outside")
    (folder / "nccl_trace_rank_1").rename(folder / "moved")
    (folder / "nccl_trace_rank_1").symlink_to("moved")  # a link within the folder is as good as a file
    contents = locate.read(folder)
    assert [rank.rank for rank in contents.evidence.ranks] == [0, 1, 3]
    assert contents.problems == ("nccl_trace_rank_2: it is a link, and safelaunch follows no links here",)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes devices")
def test_device_in_bundle_is_not_opened(tmp_path: Path) -> None:
    root = write_bundle(tmp_path / "b", hang())
    (root / "ranks/1/rank.json").unlink()
    os.mknod(root / "ranks/1/rank.json", 0o20666, os.makedev(1, 5))  # /dev/zero
    assert "ranks/1/rank.json: it is not a regular file" in locate.read(root).problems


# --- archives ---------------------------------------------------------------------------------------------------------


def archive(path: Path, *members: tuple[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directory into which archives are unpacked."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return tmp_path / "tmp"


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME])
def test_archive_header_of_gigabytes_exceeds_memory_limit(
    kind: bytes, tmp_path: Path, temporary: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "b.tar.gz"
    path.write_bytes(gzip.compress(header("x", 3200 << 20, kind)) + ZEROS * 20)
    assert main(["diagnose", str(path)]) == 2
    message = f"safelaunch: cannot diagnose {path}. Reading it takes more than 256 MB of memory.\n"
    assert tuple(capfd.readouterr()) == ("", message)
    assert not list(temporary.iterdir())


@pytest.mark.parametrize("size", [320, 3200])
def test_archive_skipped_members_count_towards_size_limit(size: int, tmp_path: Path, temporary: Path) -> None:
    """A sparse member has no data, but skipping it would decompress gigabytes."""
    path = tmp_path / "b.tar.gz"
    made = header("x", size << 20, tarfile.GNUTYPE_SPARSE), header("y", 800 << 20, tarfile.GNUTYPE_SPARSE)
    path.write_bytes(gzip.compress(made[0]) + ZEROS * (size // 16) + gzip.compress(made[1]))
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    with pytest.raises(Unreadable, match="larger than any bundle: unpack it"):
        locate.read(path)
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert now.ru_utime - used.ru_utime < 5
    assert not list(temporary.iterdir())


@pytest.mark.parametrize("what", ["bytes", "files", "one file"])
def test_archive_beyond_limit_is_refused_before_unpacking(
    what: str, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = {"bytes": "MAX_UNPACKED_BYTES", "files": "MAX_UNPACKED_FILES", "one file": "MAX_FILE_BYTES"}[what]
    monkeypatch.setattr(f"safelaunch.bundle.reading.archive.{limit}", 50)
    path = archive(
        tmp_path / "b.tar.gz", *((f"ranks/0/{n}", bytes(60 if what == "one file" else 1)) for n in range(60))
    )
    with pytest.raises(Unreadable, match="larger than any bundle: unpack it"):
        locate.read(path)
    assert not list(temporary.iterdir())
    with pytest.raises(Unreadable, match="larger than any bundle"):
        unpack(path, temporary)
    assert not list(temporary.iterdir()), "it is rejected before a file is written"


def test_archive_with_impossible_names_is_still_read(tmp_path: Path, temporary: Path) -> None:
    with tarfile.open(tmp_path / "b.tar.gz", "w:gz") as tar:
        tar.add(write_bundle(tmp_path / "b", hang()), "b")
        for name in ("/".join("a" * 2000), "b/" + "a" * 4000, "b/ranks/0/rank.json/x", "b/ranks/1", "b/\udcff", ""):
            info = tarfile.TarInfo(name)
            info.size = 1
            tar.addfile(info, io.BytesIO(b"x"))
    contents = locate.read(tmp_path / "b.tar.gz")
    assert [c.rank for c in diagnose(contents.evidence).culprits] == [1]
    assert not list(temporary.iterdir())


@pytest.mark.parametrize("mode", ["w:", "w:gz", "w:bz2", "w:xz"])
def test_damaged_archive_reports_message_and_fix(
    mode: str, tmp_path: Path, temporary: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with tarfile.open(tmp_path / "archive", mode) as tar:  # type: ignore[call-overload]
        tar.add(write_bundle(tmp_path / "b", hang()), "b")
    data = bytearray((tmp_path / "archive").read_bytes())
    for damage in (slice(0, 10), slice(len(data) // 3, len(data) // 3 + 40), slice(len(data) // 2, len(data))):
        damaged = bytearray(data)
        damaged[damage] = b"\xff" * (damage.stop - damage.start)
        (tmp_path / "archive").write_bytes(damaged)
        code = main(["diagnose", str(tmp_path / "archive")])
        stderr = capfd.readouterr().err
        assert code in (0, 1, 2) and (code != 2 or stderr.count("\n") <= 2)
        assert code != 2 or re.search(
            "damaged or incomplete: copy it again|neither a directory nor|holds no bundle", stderr
        )


# --- run directories --------------------------------------------------------------------------------------------------

SUFFIXES = (layout.RING_SUFFIX, layout.META_SUFFIX, layout.FAULT_SUFFIX, layout.EXCEPTION_SUFFIX, layout.EXIT_SUFFIX,
            layout.CAUGHT_SUFFIX)  # fmt: skip


@pytest.mark.parametrize("make", [os.mkfifo, sparse, lambda path: path.symlink_to("/etc/passwd")])
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_page_companion_that_is_no_small_file_is_named(
    suffix: str, make: Callable[[Path], object], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = run_directory(tmp_path, 2)
    make(run.of_page(f"0-1-{os.getpid()}", suffix))
    code, verdict = verdict_at(run.root, capfd)
    assert code in (0, 1)
    assert any(f"pages/0-1-{os.getpid()}{suffix}: it " in text for text in verdict["missing"])


@pytest.mark.parametrize("value", [2**64 - 1, 70_000])
@pytest.mark.parametrize(
    "word",
    [layout.RANK, layout.WORLD_SIZE, layout.STATE, layout.USER_STEPS, layout.PHASE_LENGTH, layout.OPTIMIZERS,
     layout.PHASE_TIMEOUT_NS, layout.LAST_STEP_NS],
)  # fmt: skip
def test_page_with_impossible_word_keeps_world_size(word: int, value: int, tmp_path: Path) -> None:
    run = run_directory(tmp_path, 2)
    path = run.pages / f"0-1-{os.getpid()}"
    data = bytearray(path.read_bytes())
    data[8 * word : 8 * word + 8] = value.to_bytes(8, "little")
    path.write_bytes(data)
    assert locate.read(run.root).evidence.world_size == 2


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_page_companion_of_random_bytes_is_ignored(suffix: str, tmp_path: Path) -> None:
    run = run_directory(tmp_path, 2)
    run.of_page(f"0-1-{os.getpid()}", suffix).write_bytes(Random(1).randbytes(9000))
    assert locate.read(run.root).evidence.world_size == 2


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (layout.EVENTS, '{"event": "failing", "time_unix_s": 1.0, "exits": {"²": 1}}\n'),
        (layout.EVENTS, '{"event": "started", "time_unix_s": 1.0, "workers": {"99999999999": [0, 1, 2]}}\n'),
        (layout.EVENTS, '{"event": "started", "time_unix_s": 1.0, "workers": {"-1": [0, 1, 2]}}\n'),
        (layout.EVENTS, '{"event": "failing", "time_unix_s": 1.0, "exits": {"0": -999}}\n'),
        (layout.EVENTS, "[" * 500_000 + "\n"),
        ("pages/0-0-" + "9" * 200, "x" * layout.SIZE),
        ("pages/²-²-²", "x" * layout.SIZE),
        ("pages/0-1-{pid}" + layout.EXIT_SUFFIX, '{"function": "sys.exit", "code": "²"}'),
        ("pages/0-1-{pid}" + layout.EXIT_SUFFIX, '{"function": "sys.exit", "code": ' + "9" * 5000 + "}"),
        ("pages/0-1-{pid}" + layout.EXCEPTION_SUFFIX, "[" * 500_000),
    ],
)
def test_impossible_beacon_records_are_ignored(name: str, text: str, tmp_path: Path) -> None:
    run = run_directory(tmp_path, 2)
    (run.root / name.format(pid=os.getpid())).write_text(text)
    assert locate.read(run.root).evidence.world_size == 2


# --- text on the terminal ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_job_text_sends_no_terminal_sequences(words: list[str], tmp_path: Path, capfd: Any) -> None:
    evil = "\x1b]0;x\x07\x9b31m\u202e\x7f"
    root = write_bundle(tmp_path / "b", hang(), host=f"node{evil}")
    for number in range(4):
        changed(root / f"ranks/{number}/rank.json", host=f"node{evil}")
    (root / "ranks" / f"1{evil}").mkdir()
    assert main(["diagnose", str(root), *words]) == 0
    captured = capfd.readouterr()
    assert not set(evil[:1] + evil[5:]) & {*captured.out, *captured.err} - {*"31mx"}
    if words:
        assert json.loads(captured.out)["culprits"][0]["host"] == f"node{evil}"


def test_dump_names_that_are_not_utf8_are_shown_printable(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = dumps(tmp_path / "dumps", mismatching())
    for number in range(4):
        (folder / f"nccl_trace_rank_{number}").rename(folder / os.fsdecode(b"trace\xff_%d" % number))
    (folder / "nccl_trace_rank_9").write_bytes(b"")
    code, verdict = verdict_at(folder, capfd)
    assert (code, [c["rank"] for c in verdict["culprits"]]) == (0, [2])
    assert {claim["file"] for claim in verdict["evidence"]} >= {"trace?_2"}


@pytest.mark.parametrize("name", ["x_rank_2", "manifest.json", "pages", "flight_recorder"])
def test_dangling_link_in_dump_folder_is_ignored(name: str, tmp_path: Path) -> None:
    folder = dumps(tmp_path / "dumps", mismatching())
    (folder / name).symlink_to("/" + "a" * 300)
    assert len(locate.read(folder).evidence.ranks) == 4


def test_dump_entry_without_state_or_number_names_no_culprit(tmp_path: Path) -> None:
    folder = tmp_path / "dumps"
    folder.mkdir()
    (folder / "t_rank_0.json").write_text('{"version": "2.10", "entries": [{"collective_seq_id": NaN, "state": {}}]}')
    (folder / "t_rank_1.json").write_text('{"version": "2.10", "entries": []}')
    assert diagnose(locate.read(folder).evidence).culprits == ()
