"""Bundles and folders of dumps, as safelaunch and torch write them."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import tarfile
from pathlib import Path
from typing import Any

import msgspec
import pytest

from safelaunch.beacon import layout, page
from safelaunch.cli import main
from safelaunch.job.paths import RunPaths, create_run
from safelaunch.model import Collective, Evidence, FlightRecord, RankFile
from tests.support.evidence import behind, entry, in_user, job, past, rank, record, waiting

SLEEPER = rank(1, in_user(7, "load"), "sleep", flight=behind())


def dump_of(flight: FlightRecord, *, groups: dict[str, list[int]] | None = None) -> dict[str, Any]:
    """Returns the dump that c10d would write."""
    return {
        "version": "2.10",
        "entries": [_entry(item) for item in flight.entries],
        "pg_config": {n: {"name": n, "desc": "", "ranks": json.dumps(r)} for n, r in (groups or {}).items()},
        "pg_status": {},
    }


def _entry(item: Collective) -> dict[str, Any]:
    return {
        "frames": [{"filename": f.file, "line": f.line, "name": f.function} for f in item.frames],
        "record_id": item.record_id,
        "pg_id": 0,
        "process_group": (item.group, item.description),
        "collective_seq_id": item.seq,
        "p2p_seq_id": item.p2p_seq,
        "profiling_name": item.op,
        "input_sizes": [list(size) for size in item.input_sizes],
        "input_dtypes": list(item.input_dtypes),
        "state": item.state,
        "retired": item.completed,
        "is_p2p": item.is_p2p,
    }


def write_bundle(root: Path, evidence: Evidence, host: str = "node1") -> Path:
    """The files that the reading relies on."""
    for one in evidence.ranks:
        folder = root / "ranks" / str(one.rank)
        folder.mkdir(parents=True)
        write_json(folder / "rank.json", RankFile.of(one))
        write_json(folder / "progress.json", one.progress)
        write_json(folder / "proc.json", {"main": one.main, "children": one.children})
        if one.flight_record is not None:
            (folder / "flight_recorder.pickle").write_bytes(pickle.dumps(dump_of(one.flight_record)))
        if one.exception is not None:
            write_json(folder / "exception.json", one.exception)
    if evidence.launched is not None:
        write_json(root / "launch.json", evidence.launched)
    described = {"outcome": evidence.outcome, "world_size": evidence.world_size, "moving": evidence.moving}
    write_json(root / "manifest.json", {"schema": 1, "host": host, "watch": {"stalled_s": 30.0}, "job": described})
    return root


def write_json(path: Path, value: object) -> None:
    path.write_bytes(msgspec.json.encode(value))


def hang(world: int = 4) -> Evidence:
    return job(*(SLEEPER if n == 1 else waiting(n) for n in range(world)))


def verdict_at(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    code = main(["diagnose", str(path), "--json"])
    return code, json.loads(capsys.readouterr().out)


NAMES = {
    "nccl_trace_rank_{}": "pickle",
    "comm_lib_trace_rank_{}": "pickle",
    "nccl_trace_rank_{}.json": "json",
    "my-job_2026.rank{}.json": "json",
    "dump.{}.pkl": "pickle",
}


def dumps(folder: Path, flights: dict[int, FlightRecord], name: str = "nccl_trace_rank_{}", **fields: Any) -> Path:
    folder.mkdir(exist_ok=True)
    for number, flight in flights.items():
        dump = dump_of(flight, **fields)
        data = pickle.dumps(dump, protocol=2) if NAMES[name] == "pickle" else json.dumps(dump).encode()
        (folder / name.format(number)).write_bytes(data)
    return folder


def mismatching(world: int = 4, odd: int = 2) -> dict[int, FlightRecord]:
    usual = record(*past(3), entry("all_reduce", 4, line=50))
    return {n: record(*past(3), entry("all_gather", 4, line=41)) if n == odd else usual for n in range(world)}


def run_directory(tmp_path: Path, ranks: int) -> RunPaths:
    """Pages as the beacons of this process's ranks would have left them."""
    run = create_run(tmp_path, os.getpid(), os.getuid())
    for number in range(ranks):
        _, words = page.create(str(run.pages / f"0-{number}-{os.getpid()}"))
        words[layout.RANK], words[layout.WORLD_SIZE], words[layout.PID] = number, ranks, os.getpid()
        words[layout.KIND], words[layout.STATE] = layout.EXPLICIT, layout.TORCH
        words[layout.USER_STEPS], words[layout.READY] = 40 + number, layout.MAGIC
    return run


ZEROS = gzip.compress(bytes(16 << 20))  # members of a gzip file stand one after the other


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    """The header of a member of an archive, which announces ``size`` bytes."""
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    return info.tobuf(tarfile.GNU_FORMAT)


def sparse(path: Path, size: int = 1 << 40) -> None:
    """Makes a file that seems to have ``size`` bytes."""
    with path.open("wb") as file:
        file.truncate(size)
