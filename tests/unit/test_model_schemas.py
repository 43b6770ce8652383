"""JSON Schemas in the wheel are up to date and match the documents."""

from __future__ import annotations

import contextlib
import json

import msgspec
import pytest
from jsonschema import ValidationError

import safelaunch
from safelaunch import schemas
from safelaunch.cli import COMMANDS, doctor, dump, gpus, main, status
from safelaunch.cli.doctor_rules import failed, ok
from safelaunch.leases.choose import GpuUser, LeasableGpu
from safelaunch.leases.holder import LeaseHolder, User
from safelaunch.model import BundlePlace, NodeAtFault
from safelaunch.report import calls
from safelaunch.supervise.control.protocol import NodeStatus
from safelaunch.system.console import json_text
from safelaunch.verdict.rank_state import CaseFacts
from scripts.build import schemas as writer
from tests.support import incidents
from tests.support.documents import check
from tests.support.runs import rank, run, run_status


def test_schemas_match_records() -> None:
    """If this fails, run ``python -m scripts.build.schemas``."""
    assert writer.main(["--check"]) == 0, "run python -m scripts.build.schemas"


@pytest.mark.slow
@pytest.mark.parametrize("name", incidents.ALL)
def test_every_verdict_matches_schema(name: str) -> None:
    verdict = incidents.ALL[name]().verdict
    document = json.loads(msgspec.json.encode(verdict))
    check("verdict.json", document)
    check("verdict.json", json.loads(json_text(msgspec.to_builtins(verdict))))
    with pytest.raises(ValidationError):
        check("verdict.json", {**document, "confidence": "certain"})
    with pytest.raises(ValidationError):
        check("verdict.json", {key: value for key, value in document.items() if key != "culprits"})
    check("verdict.json", {**document, "added_by_a_newer_version": 1})


def test_verdict_of_several_nodes_matches_schema() -> None:
    verdict = msgspec.structs.replace(
        incidents.ALL["crash"]().verdict,
        bundle=BundlePlace("node1", "/bundles/one", True),
        nodes=(NodeAtFault("node2", "8-15", "it is gone"),),
    )
    check("verdict.json", json.loads(msgspec.json.encode(verdict)))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_json_output_has_schema(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):
        main([command, "--help"])
    if "--json" in capsys.readouterr().out:
        assert schemas.path(f"{'verdict' if command == 'diagnose' else command}.json").is_file()


GPU = LeasableGpu("0", "GPU-0", memory_used_bytes=1 << 30, processes=(GpuUser(5),))
HOLDER = LeaseHolder(7, 1, "trial", "train.py", 1.0, 0)
GPUS = gpus.rows([GPU, LeasableGpu("1.0", "MIG-1", parent="GPU-1")], {"GPU-0": HOLDER}, {5: User(5, "ann")})
RUNS = [run(10, run_status(rank(0), nodes=[NodeStatus("node1", "0")])), run(11, problem="gone", alive=False)]
CALLS = calls.table(CaseFacts.of(incidents.hang(4).evidence), calls.Selection(last=1))


@pytest.mark.parametrize(
    ("name", "found", "needed"),
    [
        ("status.json", [status.document(item) for item in RUNS], "directory"),
        ("dump.json", dump.Document(run="r1", name="trial", bundle="/b", summary="slow"), "run"),
        ("gpus.json", gpus.document(GPUS, [HOLDER], ""), "gpus"),
        ("doctor.json", doctor.document((ok("torch", "2.13"), failed("py-spy", "gone", "Install it."))), "checks"),
        ("calls.json", calls.document(CALLS), "ranks"),
    ],
)
def test_command_json_output_matches_schema(name: str, found: object, needed: str) -> None:
    printed = json.loads(json_text(msgspec.to_builtins(found)))
    check(name, printed)
    for item in printed if isinstance(printed, list) else [printed]:
        del item[needed]
    with pytest.raises(ValidationError):
        check(name, printed)


@pytest.mark.parametrize(("words", "name"), [((), "presets.json"), (("show", "hang-debug"), "preset.json")])
def test_presets_json_output_matches_schema(
    words: tuple[str, ...], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["presets", *words, "--json"]) == 0
    check(name, json.loads(capsys.readouterr().out))


def test_schema_path_of_unknown_document_raises() -> None:
    with pytest.raises(KeyError):
        schemas.path("manifest.json")
    assert safelaunch.schemas is schemas
