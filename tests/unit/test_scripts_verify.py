"""``verify.py`` and ``checks.py``: what is run again and what isn't, and how results are read."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scripts.build import checks, verify
from scripts.build.checks import Check, CheckError, Found, Record
from tests.qa.faults.row import HEAD

COUNT = """printf %s "$2" >> runs.txt
printf '"%s"' "${HOW:-plain}" > "$1"
exit "$3"
"""


def read(files: Sequence[Path]) -> Found:
    return Found("+".join(json.loads(file.read_text()) for file in files), ("", "seen"), (("a", "b"),))


def check(letter: str, code: int = 0, **fields: Any) -> Check:
    return Check((("sh", "count.sh", "{out}", letter, str(code)),), read, ("count.sh",), 1, **fields)


class Place:
    """A git repository with a product and a script, and the checks that are run there."""

    def __init__(self, root: Path) -> None:
        self.root, self.results = root, root / "figures.json"
        (root / "safelaunch").mkdir()
        (root / "safelaunch" / "core.py").write_text("")
        (root / "count.sh").write_text(COUNT)
        self.git("init", "-q")
        self.commit("one")

    def git(self, *words: str) -> None:
        settings = ("-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false", "-c", "core.hooksPath=")
        subprocess.run(["git", "-C", str(self.root), *settings, *words], check=True, capture_output=True)

    def commit(self, word: str, path: str = "safelaunch/core.py") -> None:
        (self.root / path).write_text((self.root / path).read_text() + f"# {word}\n")
        self.git("add", "safelaunch", "count.sh")
        self.git("commit", "-q", "-m", word)

    def verify(self, known: dict[str, Check], **options: Any) -> bool:
        logs = self.root / "build"
        return verify.verify(list(known), known, self.results, root=self.root, logs=logs, **options)

    @property
    def runs(self) -> str:
        return (self.root / "runs.txt").read_text()


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_what_is_recorded_for_this_commit_is_not_run_again(place: Place) -> None:
    known = {"a": check("a"), "b": check("b")}
    assert place.verify(known) and place.verify(known)
    assert place.runs == "ab"
    assert place.verify(known, again=True)
    assert place.runs == "abab"
    record = checks.load(place.results)["a"]
    assert (record.exit, record.result, record.rows) == (0, "plain", (("a", "b"),))
    assert record.commit == checks.commit_of(known["a"], place.root)


@pytest.mark.parametrize("path", ["safelaunch/core.py", "count.sh"])
def test_a_change_of_the_product_or_of_the_check_makes_a_record_old(place: Place, path: str) -> None:
    place.verify({"a": check("a")})
    place.commit("two", path)
    place.verify({"a": check("a")})
    assert place.runs == "aa"


def test_a_change_of_anything_else_does_not(place: Place) -> None:
    """Among them the record itself, which is committed with the figures that the documents show."""
    place.verify({"a": check("a")})
    place.git("add", "figures.json")
    place.git("commit", "-q", "-m", "figures")
    place.verify({"a": check("a")})
    assert place.runs == "a"


def test_a_record_of_uncommitted_changes_stands_for_nothing(place: Place) -> None:
    (place.root / "safelaunch" / "core.py").write_text("changed")
    place.verify({"a": check("a")})
    assert checks.load(place.results)["a"].commit.endswith("+changes")
    place.verify({"a": check("a")})
    assert place.runs == "aa"


def test_what_failed_is_recorded_and_run_again(place: Place) -> None:
    assert not place.verify({"a": check("a", 3), "b": check("b")})
    assert [record.exit for record in checks.load(place.results).values()] == [3, 0]
    assert place.verify({"a": check("a"), "b": check("b")})
    assert place.runs == "aba"


def test_a_check_that_left_no_results_has_failed(place: Place) -> None:
    silent = Check((("true",),), read, (), 1)
    assert not place.verify({"a": silent})
    assert checks.load(place.results)["a"].result == "no results"


def test_a_check_that_resumes_finds_the_rows_of_an_interrupted_run(place: Place) -> None:
    one = check("a")
    place.verify({"a": one})
    place.commit("two")
    resumes = Check((("test", "-e", "{out}"),), one.read, one.inputs, 1, resumes=True)
    assert place.verify({"a": resumes})
    assert not place.verify({"a": resumes}, again=True)


def test_interrupted_it_goes_on_with_the_check_that_was_cut_short(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {"a": check("a"), "b": check("b"), "c": check("c")}
    real = verify.run

    def interrupted(name: str, *rest: Any, **named: Any) -> Record:
        if name == "b":
            raise KeyboardInterrupt
        return real(name, *rest, **named)

    monkeypatch.setattr(verify, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        place.verify(known)
    monkeypatch.undo()
    assert place.verify(known)
    assert place.runs == "abc"


def test_after_a_command_that_failed_the_next_is_not_run(place: Place) -> None:
    one = check("a", 1)
    place.verify({"a": replace(one, commands=one.commands * 2)})
    assert place.runs == "a"


def test_the_table_says_what_is_old_what_failed_and_what_is_missing(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    known = {"a": check("a"), "b": check("b", 2), "c": check("c")}
    place.verify({name: known[name] for name in "ab"})
    place.commit("two")
    verify.show("abc", known, place.results, place.root)
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert lines["a"].endswith(f"plain; older than {checks.commit_of(known['a'], place.root)}")
    assert "FAILED (2): plain" in lines["b"]
    assert lines["c"].endswith("not run")


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(CheckError, match="no such check: zo; there are launch"):
        verify.chosen("zoo, zo")


def test_a_damaged_record_is_an_error(tmp_path: Path) -> None:
    for text in ("{", "[]", '{"zoo": {"rows": []}}', '{"zoo": 7}'):
        (tmp_path / "figures.json").write_text(text)
        with pytest.raises(CheckError, match="holds no figures"):
            checks.load(tmp_path / "figures.json")


# --- reading ----------------------------------------------------------------------------------------------------------


def found(name: str, tmp_path: Path, *contents: Any) -> Found:
    files = [tmp_path / str(number) for number in range(len(contents))]
    for file, content in zip(files, contents, strict=True):
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    return checks.CHECKS[name].read(files)


def figure(name: str, values: list[float], target: str = "", unit: str = "", met: bool | None = None) -> dict[str, Any]:
    return {"name": name, "values": values, "unit": unit, "target": target, "note": "", "met": met}


def test_benchmarks_show_what_has_an_aim_and_what_stands_beneath_it(tmp_path: Path) -> None:
    one = {"figures": [
        figure("CPU", [0.5, 0.3, 0.4], "<= 0.5", "%", True), figure("  of that, ours", [0.1], "", "%"),
        figure("beside", [1.0]), figure("  beneath it", [1.0]),
    ]}  # fmt: skip
    other = {"figures": [figure("faster", [12.0, 9.0], ">= 15", "x", False)]}
    told = found("detect", tmp_path, one, other)
    assert told.rows == (
        ("CPU", "0.400 % (0.300 to 0.500)", "≤ 0.5 %"),
        ("– of that, ours", "0.100 %", ""),
        ("faster", "10.5 x (9.00 to 12.0)", "≥ 15 x: missed"),
    )
    assert told.result == "1 of 2 aims met"


def test_the_zoo_names_what_was_wrong_and_counts_what_cannot_run(tmp_path: Path) -> None:
    right = {"class": "gil", "culprit": 0, "ranks": 2, "wrong": []}
    wrong = {"class": "asleep", "culprit": 1, "ranks": 2, "wrong": ["cause", "line"]}
    told = found("zoo", tmp_path, [right, wrong, {"class": "swallowed", "not run": "Python 3.12"}])
    assert told.result == "1 of 2 right: cause, rank, line"
    assert told.rows[0][0] == "the hang zoo: 2 classes, the culprit on each rank in turn (1 more cannot run here)"
    assert told.rows[1:] == (("– asleep, rank 1 of 2", "cause; line"),)


@pytest.mark.parametrize("name", ["faults", "faults-nodes"])
def test_the_fault_matrix_counts_promises(name: str, tmp_path: Path) -> None:
    row = dict(zip(HEAD, ("kill -9", "writing", "hang", "124", "0", "1", "-", "9.1", "kept"), strict=True))
    rows = [row, row | {"promise": "2 processes left"}, row | {"promise": "not run: no root"}]
    told = found(name, tmp_path, rows)
    assert told.result == "1 of 2 kept"
    assert told.rows[1] == ("– kill -9, writing, hang", "2 processes left")
    assert "(1 rows cannot run here)" in told.rows[0][0]


def test_every_check_saves_its_results_and_its_inputs_exist() -> None:
    for name, one in checks.CHECKS.items():
        assert all("{out}" in command for command in one.commands), name
        assert [path for path in one.inputs if not (checks.ROOT / path).exists()] == [], name
        assert one.inputs, name
