"""Configuration that is only found where we happen to be: read if it is ours, passed over with one line if not."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from safelaunch.settings import config
from safelaunch.settings.config import CONFIG_FILE, PYPROJECT, resolve
from safelaunch.settings.options import Settings
from safelaunch.system.errors import PresetError

ROOT = pytest.mark.skipif(os.getuid() != 0, reason="takes root to be several users")
STRANGER = 65534
YAML = "stall-timeout: 7\nenv:\n  LD_PRELOAD: /tmp/evil.so\n"
TOML = "[tool.safelaunch]\nstall-timeout = 7\n"


def found(directory: Path, *cli: tuple[str, str]) -> Settings:
    return resolve(list(cli), {}, directory, lambda: "2.13.0")


def write(directory: Path, name: str, mode: int = 0o644, *, uid: int = -1, gid: int = -1) -> Path:
    path = directory / name
    path.write_text(TOML if name == PYPROJECT else YAML)
    path.chmod(mode)
    os.chown(path, uid, gid)
    return path


@pytest.mark.parametrize("name", [CONFIG_FILE, PYPROJECT])
@pytest.mark.parametrize(
    ("mode", "owner", "reason"),
    [
        (0o600, {}, ""),
        (0o644, {}, ""),
        (0o646, {}, "every user can write it"),
        (0o666, {}, "every user can write it"),
        pytest.param(0o664, {"gid": 4711}, "group 4711 may write it", marks=ROOT),
        pytest.param(0o644, {"gid": 4711}, "", marks=ROOT),
        pytest.param(0o644, {"uid": STRANGER}, f"it belongs to user {STRANGER}", marks=ROOT),
        pytest.param(0o600, {"uid": STRANGER}, f"it belongs to user {STRANGER}", marks=ROOT),
    ],
)
def test_whose_file_it_is(
    name: str, mode: int, owner: dict[str, int], reason: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, name, mode, **owner)
    settings = found(tmp_path)
    assert settings.stall_timeout_s == (None if reason else 7.0)
    assert bool(settings.env) == (name == CONFIG_FILE and not reason)
    said = capfd.readouterr().err.splitlines()
    assert len(said) == bool(reason)
    assert not reason or (f"ignoring {name}, because {reason}" in said[0] and f"--config {name}" in said[0])
    found(tmp_path)
    assert capfd.readouterr().err == "", "it is said once"
    assert found(tmp_path, ("--config", name)).stall_timeout_s == 7.0, "named, it is read"


@pytest.mark.parametrize(
    ("uid", "gid", "group", "members", "private"),
    [
        (1000, 1000, "ada", [], True),
        (1000, 1000, "ada", ["ada"], True),
        (1000, 1000, "ada", ["eve"], False),
        (1000, 500, "ada", [], True),
        (1000, 100, "users", [], False),
        (1000, 2000, "project", ["ada"], False),
    ],
)
def test_the_group_of_one_user(
    uid: int, gid: int, group: str, members: list[str], private: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    primary = gid if gid != 2000 else 1000
    monkeypatch.setattr(pwd, "getpwuid", lambda number: SimpleNamespace(pw_name="ada", pw_gid=primary))
    monkeypatch.setattr(grp, "getgrgid", lambda number: SimpleNamespace(gr_name=group, gr_mem=members))
    assert config._is_private_group(gid, uid) is private


def test_a_user_whom_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in many containers."""
    monkeypatch.setattr(pwd, "getpwuid", lambda number: {}[number])
    assert config._is_private_group(1234, 1234) and not config._is_private_group(0, 1234)


def fifo(path: Path) -> None:
    os.mkfifo(path)


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


@ROOT
@pytest.mark.parametrize("name", [CONFIG_FILE, PYPROJECT])
@pytest.mark.parametrize(
    "make",
    [fifo, huge, Path.mkdir, lambda path: path.write_bytes(b"\xff\x00: ["), lambda path: path.write_text("x: 1")],
)
def test_whatever_a_stranger_leaves_stops_nobody(
    name: str, make: Callable[[Path], object], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path / name)
    os.chown(tmp_path / name, STRANGER, STRANGER)
    settings = found(tmp_path)
    assert (settings.stall_timeout_s, settings.env) == (None, ())
    assert len(capfd.readouterr().err.splitlines()) == (name == CONFIG_FILE or make is huge)


@ROOT
def test_a_strangers_link_to_a_file_of_ours(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other"
    other.mkdir()
    link = tmp_path / CONFIG_FILE
    link.symlink_to(write(other, CONFIG_FILE))
    assert found(tmp_path).stall_timeout_s == 7.0, "our own link"
    os.chown(link, STRANGER, STRANGER, follow_symlinks=False)
    assert found(tmp_path).stall_timeout_s is None
    assert "because it belongs to user" in capfd.readouterr().err


@ROOT
def test_our_link_to_a_strangers_file(tmp_path: Path) -> None:
    write(tmp_path, "theirs", uid=STRANGER)
    (tmp_path / CONFIG_FILE).symlink_to("theirs")
    assert found(tmp_path).stall_timeout_s is None


def test_a_file_of_ours_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / CONFIG_FILE)
    with pytest.raises(PresetError, match="not a regular file"):
        found(tmp_path)


def test_a_stranger_pyproject_without_our_table_is_not_worth_a_word(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / PYPROJECT).write_text("[tool.black]\n")
    (tmp_path / PYPROJECT).chmod(0o666)
    assert found(tmp_path).stall_timeout_s is None and capfd.readouterr().err == ""
    assert stat.S_IMODE((tmp_path / PYPROJECT).stat().st_mode) == 0o666


@pytest.mark.parametrize("name", [CONFIG_FILE, PYPROJECT])
@pytest.mark.parametrize("to", ["/" + "a" * 300, "/proc/1/nowhere/at/all"])
def test_a_link_that_leads_nowhere_is_no_file(name: str, to: str, tmp_path: Path) -> None:
    (tmp_path / name).symlink_to(to)
    assert found(tmp_path).stall_timeout_s is None
