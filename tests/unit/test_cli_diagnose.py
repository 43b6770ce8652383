"""``safelaunch diagnose``: the files that it writes or refuses to write, and the table of calls."""

from __future__ import annotations

import json
import os
import re
import stat
import tarfile
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from safelaunch.cli import main
from safelaunch.cli.diagnose import FILES, HTML, PERFETTO, VERDICT
from tests.support import incidents
from tests.support.bundles import dumps, hang, mismatching, verdict_at, write_bundle

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def contents(root: Path) -> dict[str, tuple[bytes, int]]:
    return {
        os.fspath(path.relative_to(root)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in root.rglob("*")
        if path.is_file()
    }


def data_of(page: Path) -> dict[str, Any]:
    """Returns the data of a page."""
    match = re.search(r'<script[^>]*type="application/json"[^>]*>(.*?)</script>', page.read_text(), re.S)
    assert match is not None
    document: dict[str, Any] = json.loads(match[1])
    return document


# --- files ------------------------------------------------------------------------------------------------------------


def bundle(root: Path) -> Path:
    return write_bundle(root / "bundle", incidents.hang(4).evidence)


def archive(root: Path) -> Path:
    with tarfile.open(root / "bundle.tar.gz", "w:gz") as tar:
        tar.add(bundle(root / "made"), "bundle")
    return root / "bundle.tar.gz"


def two_bundles(root: Path) -> Path:
    """Writes bundles of two nodes, each with half of the ranks."""
    evidence = incidents.hang(4).evidence
    for node, ranks in ((1, evidence.ranks[:2]), (2, evidence.ranks[2:])):
        part = write_bundle(root / "both" / f"node{node}", replace(evidence, ranks=ranks), host=f"node{node}")
        (part / "launch.json").write_text(json.dumps({"run_name": "twice", "command": ["safelaunch", "train.py"]}))
        (part / "node" / f"host{node}").mkdir(parents=True)
    return root / "both"


def folder(root: Path) -> Path:
    return dumps(root / "dumps", mismatching())


@pytest.mark.parametrize("kind", [bundle, archive, two_bundles, folder])
def test_diagnose_output_folder_has_all_reports(kind: Any, here: Path, capfd: Capture) -> None:
    path = kind(here)
    before = contents(here)
    assert main(["diagnose", str(path), "-o", "out/there"]) == 0
    shown = capfd.readouterr()
    out = here / "out" / "there"
    assert sorted(path.name for path in out.iterdir()) == sorted(FILES)
    assert all(f"safelaunch: written: {out / name}" in shown.err for name in FILES)
    assert {name: value for name, value in contents(here).items() if not name.startswith("out/")} == before
    _, verdict = verdict_at(path, capfd)
    assert json.loads((out / VERDICT).read_text()) == verdict
    assert verdict["summary"].split(" ")[0] in shown.out
    assert json.loads((out / PERFETTO).read_text())["traceEvents"]
    page = data_of(out / HTML)
    assert page["head"]["cause"] == verdict["cause"] and page["head"]["bundle"] == "", "no links to files elsewhere"
    assert page["timeline"]["lanes"]


def test_diagnose_without_path_reads_latest_bundle(here: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["diagnose"]) == 2
    assert "there is no safelaunch-bundles/latest here" in capfd.readouterr().err
    made = bundle(here / "safelaunch-bundles")
    (made.parent / "latest").symlink_to(made.name)
    assert main(["diagnose", "--json"]) == 0
    out, err = capfd.readouterr()
    assert (
        json.loads(out)["cause"] == "collective-mismatch"
        and err == "safelaunch: diagnosing safelaunch-bundles/bundle\n"
    )
    made.parent.rename(here / "elsewhere")
    monkeypatch.setenv("SAFELAUNCH_BUNDLE_DIR", "elsewhere")
    assert main(["diagnose", "--json"]) == 0


def test_diagnose_page_of_several_bundles_has_all_nodes(here: Path) -> None:
    assert main(["diagnose", str(two_bundles(here)), "--html", "page.html"]) == 0
    page = data_of(here / "page.html")
    assert ["run", "twice"] in page["head"]["facts"] and page["head"]["command"] == "safelaunch train.py"
    assert "host1" in json.dumps(page["nodes"]) and "host2" in json.dumps(page["nodes"])


def test_diagnose_html_writes_only_page(here: Path, capfd: Capture) -> None:
    (here / "page.html").write_text("an older one")
    assert main(["diagnose", str(bundle(here)), "--json", "--html", "page.html"]) == 0
    assert json.loads(capfd.readouterr().out)["cause"] == "collective-mismatch"
    assert data_of(here / "page.html")["head"]["cause"] == "collective-mismatch"
    assert stat.S_IMODE((here / "page.html").stat().st_mode) == 0o600, "evidence is its owner's"
    assert sorted(path.name for path in here.iterdir()) == ["bundle", "page.html"]


@pytest.mark.parametrize(
    "words",
    [
        ["-o", "bundle"],
        ["-o", "bundle/reports"],
        ["--html", "bundle/report.html"],
        ["--html", "link/report.html"],
        ["-o", "other"],
        ["--html", "other/ranks/0/report.html"],
        ["--html", "other"],
    ],
)
def test_diagnose_refuses_to_write_into_bundle(words: list[str], here: Path, capfd: Capture) -> None:
    bundle(here)
    write_bundle(here / "other", hang())
    (here / "link").symlink_to("bundle")
    before = contents(here)
    assert main(["diagnose", "bundle", *words]) == 2
    shown = capfd.readouterr()
    assert shown.out == "" and "is within" in shown.err
    assert contents(here) == before


def test_diagnose_does_not_replace_archive(here: Path, capfd: Capture) -> None:
    path = archive(here)
    before = path.read_bytes()
    assert main(["diagnose", str(path), "--html", str(path)]) == 2
    assert path.read_bytes() == before


@pytest.mark.parametrize(("words", "why"), [(["--html", "."], "is a directory"), (["-o", "file"], "could not be")])
def test_diagnose_unwritable_output_is_reported(words: list[str], why: str, here: Path, capfd: Capture) -> None:
    bundle(here / "far")
    (here / "file").write_text("")
    assert main(["diagnose", "far/bundle", *words]) in (1, 2)
    err = capfd.readouterr().err
    assert why in err and "Traceback" not in err


def test_diagnose_page_escapes_hostile_evidence(here: Path) -> None:
    write_bundle(here / "b", incidents.hostile().evidence)
    main(["diagnose", "b", "--html", "page.html"])
    text = (here / "page.html").read_text()
    assert text.count("</script>") == 2 and "<img" not in text


# --- the table of calls -----------------------------------------------------------------------------------------------


def test_diagnose_calls_option_prints_call_table(here: Path, capfd: Capture) -> None:
    path = folder(here)
    assert main(["diagnose", str(path), "-j"]) == 0
    shown = capfd.readouterr()
    lines = [" ".join(line.split()) for line in shown.out.splitlines()]
    assert lines[0] == "group number call ranks state at"
    assert lines[-2:] == [
        "0 default_pg 4 all_reduce of float32[4] 0-1,3 pending train.py:50 (train)",
        "0 default_pg 4 all_gather of float32[4] 2 pending train.py:41 (train)",
    ]
    assert "4 of 4 ranks" in shown.err


@pytest.mark.parametrize(
    ("words", "ranks", "numbers"),
    [
        (["--ranks", "0,2-3"], {0, 2, 3}, {1, 2, 3, 4}),
        (["--last", "2"], {0, 1, 2, 3}, {3, 4}),
        (["--groups", "default_pg", "--ranks", "1", "--last", "1"], {1}, {4}),
        (["--groups", "tp,0", "--last", "0"], {0, 1, 2, 3}, {1, 2, 3, 4}),
    ],
)
def test_call_table_is_filtered_by_options(
    words: list[str], ranks: set[int], numbers: set[int], here: Path, capfd: Capture
) -> None:
    assert main(["diagnose", str(folder(here)), "--json", *words]) == 0
    document = json.loads(capfd.readouterr().out)
    assert {rank for call in document for rank in call["ranks"]} == ranks
    assert {call["number"] for call in document} == numbers


def test_call_table_reports_omitted_calls_and_ranks(here: Path, capfd: Capture) -> None:
    assert main(["diagnose", str(folder(here)), "--last", "1", "--ranks", "0,9"]) == 0
    err = capfd.readouterr().err
    assert "--last 0 shows all" in err and "no Flight Recorder of rank 9" in err


def test_call_table_without_match_exits_1(here: Path, capfd: Capture) -> None:
    assert main(["diagnose", str(folder(here)), "--groups", "nope"]) == 1
    shown = capfd.readouterr()
    assert shown.out == "" and "no recorded call matches (groups: 0 default_pg)" in shown.err


@pytest.mark.parametrize("words", [["--ranks", "x"], ["--ranks", "3-1"], ["--ranks", "0-99999999"], ["--last", "-1"]])
def test_call_table_invalid_selection_exits_2(words: list[str], here: Path, capfd: Capture) -> None:
    assert main(["diagnose", str(folder(here)), *words]) == 2
    assert f"argument {words[0]}" in capfd.readouterr().err


# --- next step --------------------------------------------------------------------------------------------------------


def test_diagnose_of_dumps_suggests_dumping_job(here: Path, capfd: Capture) -> None:
    assert main(["diagnose", str(folder(here))]) == 0
    lines = capfd.readouterr().out.splitlines()
    at = lines.index("  If the job still hangs, on its node:")
    assert lines[at + 1 : at + 3] == ["    safelaunch dump --all", "  more: safelaunch explain collective-mismatch"]


def test_diagnose_of_bundle_suggests_no_dump(here: Path, capfd: Capture) -> None:
    assert main(["diagnose", str(bundle(here))]) == 0
    shown = capfd.readouterr().out
    assert "dump --all" not in shown and "under safelaunch" not in shown
