"""User source is quoted only from existing Python files."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from safelaunch.capture import excerpts, user_source
from safelaunch.model import Evidence, Frame, RankEvidence, RankException
from safelaunch.system.redaction.redactor import Redactor


def test_source_lines_are_counted_from_one(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import time\n    time.sleep(1)\n")
    assert [user_source.line(str(script), number) for number in (0, 1, 2, 3)] == [
        None,
        "import time",
        "    time.sleep(1)",
        None,
    ]


@pytest.mark.parametrize("kind", ["none", "text", "link to a text", "fifo", "directory", "loop"])
def test_source_text_reads_only_python_files(tmp_path: Path, kind: str) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("x\n")
    path = tmp_path / "evil.py"
    if kind == "text":
        path = secret
    elif kind == "link to a text":
        path.symlink_to(secret)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path)
    assert user_source.text(str(path)) is None


def test_source_link_to_python_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "real.py").write_text("x = 1\n")
    (tmp_path / "train.py").symlink_to(tmp_path / "real.py")
    assert user_source.line(str(tmp_path / "train.py"), 1) == "x = 1"


# Binds the shell's first argument over the second in its own mounts, with another train.py at the same path.
ELSEWHERE = """
mount --bind "$1" "$2" && echo mounted && read -r line
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")
def test_source_of_container_job_is_read_in_container(tmp_path: Path) -> None:
    outside, inside = tmp_path / "work", tmp_path / "image"
    for place, text in ((outside, "x = 'host'\n"), (inside, "x = 'container'\n")):
        place.mkdir()
        (place / "train.py").write_text(text)
    script = str(outside / "train.py")
    words = ["unshare", "--mount", "sh", "-c", ELSEWHERE, "sh", str(inside), str(outside)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None and job.stdin is not None
        if not job.stdout.readline():
            pytest.skip("mounts are not allowed here")
        with user_source.seen_by(job.pid):
            assert user_source.text(script) == "x = 'container'\n"
        assert user_source.text(script) == "x = 'host'\n"
        with user_source.seen_by(os.getpid()):
            assert user_source.text(script) == "x = 'host'\n"
        job.stdin.close()


@pytest.mark.parametrize(
    ("links", "path", "real"),
    [
        ({}, "/data/train.py", "data/train.py"),
        ({"data": "/opt/job"}, "/data/train.py", "opt/job/train.py"),
        ({"data": "opt"}, "/data/./train.py", "opt/train.py"),
        ({"data/train.py": "../../../../etc/hosts.py"}, "/data/train.py", "etc/hosts.py"),
        ({"a": "/b", "b": "/c/d", "c/d": "../e"}, "/a/../x/train.py", "x/train.py"),
        ({"a": "b", "b": "a"}, "/a/train.py", None),
    ],
)
def test_source_links_in_container_stay_inside(
    links: dict[str, str], path: str, real: str | None, tmp_path: Path
) -> None:
    for name, target in links.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).symlink_to(target)
    root = os.open(tmp_path, os.O_PATH)
    try:
        if real is None:
            with pytest.raises(OSError, match="symbolic links"):
                user_source._below(root, path)
        else:
            assert user_source._below(root, path) == real
    finally:
        os.close(root)


def test_relative_source_path_of_other_host_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("x = 1\n")
    monkeypatch.chdir(tmp_path)
    assert user_source.text("train.py") == "x = 1\n"
    assert user_source.text_for_stranger("train.py") is None
    assert user_source.line_for_stranger("train.py", 1) is None
    assert user_source.line_for_stranger(str(tmp_path / "train.py"), 1) == "x = 1"


MODULE = """import os
KEY = "AB"


@decorated
def one():
    return 1


def other(path):
    if path:
        wait(path, token="hunter2hunter2")


class Kept:
    pass
"""


@pytest.mark.parametrize(
    ("lines", "kept"),
    [((), ()), ((7,), (5, 6, 7)), ((12,), (10, 11, 12)), ((1, 15), (1, 15, 16)), ((3, 99), ())],
)
def test_excerpt_has_enclosing_statements_of_lines(lines: tuple[int, ...], kept: tuple[int, ...]) -> None:
    excerpt_lines = excerpts.excerpt(MODULE, set(lines)).split("\n")
    whole = MODULE.split("\n")
    assert {number: line for number, line in enumerate(excerpt_lines, 1) if line} == {n: whole[n - 1] for n in kept}


ALIASES = """import torch.distributed as dist
r = dist.get_rank()
is_writer, name = r == 0, "x"
last = dist.get_world_size() - 1
key = "AB"
if r == last and is_writer:
    save()
"""


def test_excerpt_has_assignments_of_rank_names() -> None:
    """Otherwise the verdict can't evaluate the condition."""
    excerpt_lines = excerpts.excerpt(ALIASES, {7}).split("\n")
    assert [number for number, line in enumerate(excerpt_lines, 1) if line] == [2, 3, 4, 6, 7]
    assert excerpts.excerpt(ALIASES, set()) == ""


def test_excerpt_of_invalid_python_is_empty() -> None:
    assert excerpts.excerpt("def f(:\n", {1}) == ""


def test_excerpts_keep_read_source_redacted(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(MODULE)
    frames = (Frame(str(script), 12, "other"),)
    raised = RankException("ValueError", "", 0.0, frames)
    evidence = Evidence("crash", 1, (RankEvidence(rank=0, host="here", pid=1, exception=raised),))
    source = excerpts.Excerpts(evidence, Redactor())
    assert source.text(str(tmp_path / "gone.py")) is None
    text = source.text(str(script))
    assert text is not None and text.splitlines()[11] == "        wait(path, token=[redacted])"
    script.write_text("changed\n")
    assert source.text(str(script)) == text
    assert source.read == {str(script): text, str(tmp_path / "gone.py"): ""}
