"""The JSON Schemas in the wheel: up to date, and true of the documents."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import msgspec
import pytest
from jsonschema import Draft202012Validator, ValidationError

import safelaunch
from safelaunch import schemas
from safelaunch.addons.record.report import Recorded
from safelaunch.addons.record.report import document as record_document
from safelaunch.addons.record.slowness import verdict_of
from safelaunch.addons.sweep.jobs import Job, Outcome, Track
from safelaunch.addons.sweep.runner import document
from safelaunch.cli import COMMANDS, doctor, dump, gpus, main, status
from safelaunch.cli.doctor_rules import failed, ok
from safelaunch.leases.choose import Gpu, GpuProcess
from safelaunch.leases.holder import Holder, User
from safelaunch.model import BundlePlace, NodeAtFault
from safelaunch.report import calls
from safelaunch.supervise.control.protocol import NodeStatus
from safelaunch.system.console import json_text
from safelaunch.verdict.rank_state import Facts
from scripts.build import schemas as writer
from tests.support import incidents
from tests.support.recordings import recorded
from tests.support.runs import rank, run, run_status


def check(name: str, found: Any) -> None:
    schema = json.loads(schemas.path(name).read_text("utf-8"))
    Draft202012Validator.check_schema(schema)
    Draft202012Validator(schema).validate(found)


def test_the_schemas_are_those_of_the_records() -> None:
    """If this fails, run ``python -m scripts.build.schemas``."""
    assert writer.main(["--check"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", incidents.ALL)
def test_every_verdict_is_valid(name: str) -> None:
    verdict = incidents.ALL[name]().verdict
    found = json.loads(msgspec.json.encode(verdict))
    check("verdict.json", found)
    check("verdict.json", json.loads(json_text(msgspec.to_builtins(verdict))))
    with pytest.raises(ValidationError):
        check("verdict.json", {**found, "confidence": "certain"})
    with pytest.raises(ValidationError):
        check("verdict.json", {key: value for key, value in found.items() if key != "culprits"})
    check("verdict.json", {**found, "added_by_a_newer_version": 1})


def test_the_verdict_of_several_nodes_is_valid() -> None:
    verdict = msgspec.structs.replace(
        incidents.ALL["crash"]().verdict,
        bundle=BundlePlace("node1", "/bundles/one", True),
        nodes=(NodeAtFault("node2", "8-15", "it is gone"),),
    )
    check("verdict.json", json.loads(msgspec.json.encode(verdict)))


def test_the_summary_of_a_sweep_is_valid() -> None:
    ended = Outcome("hung", 124, 61.5, 40, ("GPU-1",), "/bundles/one", {"loss": 0.5, "note": "late"})
    tracks = [_track("waiting", None), _track("hung", ended)]
    found = json.loads(json.dumps(document(tracks)))
    check("summary.json", found)
    assert [job["state"] for job in found["jobs"]] == ["waiting", "hung"]
    with pytest.raises(ValidationError):
        check("summary.json", {"jobs": [{"name": "a"}]})


def _track(state: Any, outcome: Outcome | None) -> Track:
    track = Track(Job(name=state, words=("train.py",), where="sweep.yaml:3", params=(("lr", "0.1"),)))
    track.state, track.outcome = state, outcome
    return track


@pytest.mark.parametrize("command", COMMANDS)
def test_every_json_of_a_command_has_a_schema(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):
        main([command, "--help"])
    if "--json" in capsys.readouterr().out:
        assert schemas.path(f"{'verdict' if command == 'diagnose' else command}.json").is_file()


GPU = Gpu("0", "GPU-0", memory_used_bytes=1 << 30, processes=(GpuProcess(5),))
HOLDER = Holder(7, 1, "trial", "train.py", 1.0, 0)
GPUS = gpus.rows([GPU, Gpu("1.0", "MIG-1", parent="GPU-1")], {"GPU-0": HOLDER}, {5: User(5, "ann")})
RUNS = [run(10, run_status(rank(0), nodes=[NodeStatus("node1", "0")])), run(11, problem="gone", alive=False)]
STRAGGLER = Recorded(recorded("straggler"), verdict_of(recorded("straggler")))
CALLS = calls.table(Facts.of(incidents.hang(4).evidence), calls.Selection(last=1))


@pytest.mark.parametrize(
    ("name", "found", "needed"),
    [
        ("status.json", [status.document(one) for one in RUNS], "directory"),
        ("dump.json", dump.Document(run="r1", name="trial", bundle="/b", summary="slow"), "run"),
        ("record.json", record_document(STRAGGLER, "r1", "/folder"), "findings"),
        ("gpus.json", gpus.document(GPUS, [HOLDER], ""), "gpus"),
        ("doctor.json", doctor.document((ok("torch", "2.13"), failed("py-spy", "gone", "Install it."))), "checks"),
        ("calls.json", calls.document(CALLS), "ranks"),
    ],
)
def test_what_a_command_prints_is_valid(name: str, found: object, needed: str) -> None:
    printed = json.loads(json_text(msgspec.to_builtins(found)))
    check(name, printed)
    for one in printed if isinstance(printed, list) else [printed]:
        del one[needed]
    with pytest.raises(ValidationError):
        check(name, printed)


@pytest.mark.parametrize(("words", "name"), [((), "presets.json"), (("show", "hang-debug"), "preset.json")])
def test_what_presets_prints_is_valid(words: tuple[str, ...], name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["presets", *words, "--json"]) == 0
    check(name, json.loads(capsys.readouterr().out))


def test_a_document_without_a_schema_is_an_error() -> None:
    with pytest.raises(KeyError):
        schemas.path("manifest.json")
    assert safelaunch.schemas is schemas
