"""Configuration files that are found by place: read if they are the user's, otherwise ignored with one line."""

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
def test_config_file_writable_by_others_is_ignored_once(
    name: str, mode: int, owner: dict[str, int], reason: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, name, mode, **owner)
    settings = found(tmp_path)
    assert settings.stall_timeout_s == (None if reason else 7.0)
    assert bool(settings.env) == (name == CONFIG_FILE and not reason)
    stderr = capfd.readouterr().err.splitlines()
    assert len(stderr) == bool(reason)
    assert not reason or (f"ignoring {name}, because {reason}" in stderr[0] and f"--config {name}" in stderr[0])
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
def test_private_group_has_no_other_members(
    uid: int, gid: int, group: str, members: list[str], private: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    primary = gid if gid != 2000 else 1000
    monkeypatch.setattr(pwd, "getpwuid", lambda number: SimpleNamespace(pw_name="ada", pw_gid=primary))
    monkeypatch.setattr(grp, "getgrgid", lambda number: SimpleNamespace(gr_name=group, gr_mem=members))
    assert config._is_private_group(gid, uid) is private


def test_private_group_of_unknown_user_has_same_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many containers have such users."""
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
def test_hostile_config_of_other_user_is_ignored(
    name: str, make: Callable[[Path], object], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path / name)
    os.chown(tmp_path / name, STRANGER, STRANGER)
    settings = found(tmp_path)
    assert (settings.stall_timeout_s, settings.env) == (None, ())
    assert len(capfd.readouterr().err.splitlines()) == (name == CONFIG_FILE or make is huge)


@ROOT
def test_config_link_of_other_user_is_ignored(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other"
    other.mkdir()
    link = tmp_path / CONFIG_FILE
    link.symlink_to(write(other, CONFIG_FILE))
    assert found(tmp_path).stall_timeout_s == 7.0, "our own link"
    os.chown(link, STRANGER, STRANGER, follow_symlinks=False)
    assert found(tmp_path).stall_timeout_s is None
    assert "because it belongs to user" in capfd.readouterr().err


@ROOT
def test_own_config_link_to_other_users_file_is_ignored(tmp_path: Path) -> None:
    write(tmp_path, "theirs", uid=STRANGER)
    (tmp_path / CONFIG_FILE).symlink_to("theirs")
    assert found(tmp_path).stall_timeout_s is None


def test_own_unreadable_config_is_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / CONFIG_FILE)
    with pytest.raises(PresetError, match="not a regular file"):
        found(tmp_path)


def test_foreign_pyproject_without_table_gives_no_warning(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / PYPROJECT).write_text("[tool.black]\n")
    (tmp_path / PYPROJECT).chmod(0o666)
    assert found(tmp_path).stall_timeout_s is None and capfd.readouterr().err == ""
    assert stat.S_IMODE((tmp_path / PYPROJECT).stat().st_mode) == 0o666


@pytest.mark.parametrize("name", [CONFIG_FILE, PYPROJECT])
@pytest.mark.parametrize("to", ["/" + "a" * 300, "/proc/1/nowhere/at/all"])
def test_dangling_config_link_counts_as_absent(name: str, to: str, tmp_path: Path) -> None:
    (tmp_path / name).symlink_to(to)
    assert found(tmp_path).stall_timeout_s is None


# --- configuration for all projects of a machine or of a user --------------------------------------------------------


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Files of the machine, the user and the project, none of which exists yet."""
    places = {name: tmp_path / name for name in ("etc", "home/.config/safelaunch", "project")}
    for place in places.values():
        place.mkdir(parents=True)
    machine, user, project = places.values()
    monkeypatch.setattr(config, "MACHINE_FILE", os.fspath(machine / "safelaunch.yaml"))
    return {"machine": machine / "safelaunch.yaml", "user": user / "config.yaml", "project": project / CONFIG_FILE}


def resolved(shared: dict[str, Path], *cli: tuple[str, str], **environ: str) -> Settings:
    home = os.fspath(shared["user"].parents[2])
    return resolve(list(cli), {"HOME": home, **environ}, shared["project"].parent, lambda: "2.13.0")


def test_shared_config_option_comes_from_nearest_file(shared: dict[str, Path]) -> None:
    shared["machine"].write_text(
        "stall-timeout: 1m\nmax-stall: 3h\nstartup-timeout: 1h\nenv:\n  A: machine\n  B: machine\n"
    )
    shared["user"].write_text("stall-timeout: 2m\nmax-stall: 2h\nenv:\n  B: user\n")
    shared["project"].write_text("stall-timeout: 3m\n")
    settings = resolved(shared)
    assert (settings.stall_timeout_s, settings.max_stall_s, settings.startup_timeout_s) == (180.0, 7200.0, 3600.0)
    assert {setting.name: setting.value for setting in settings.env} == {"A": "machine", "B": "user"}
    assert settings.origins["stall-timeout"] == "safelaunch.yaml:1"
    assert settings.origins["max-stall"] == "~/.config/safelaunch/config.yaml:2"
    assert settings.origins["startup-timeout"] == f"{shared['machine']}:3"


def test_shared_config_files_stay_with_config_option(shared: dict[str, Path]) -> None:
    shared["user"].write_text("max-stall: 2h\n")
    shared["project"].write_text("stall-timeout: 3m\nstartup-timeout: 1h\n")
    (shared["project"].parent / "other.yaml").write_text("stall-timeout: 4m\n")
    settings = resolved(shared, ("--config", "other.yaml"))
    assert (settings.stall_timeout_s, settings.max_stall_s, settings.origins["startup-timeout"]) == (
        240.0,
        7200.0,
        "default",
    )


def test_shared_config_presets_come_from_nearest_file(shared: dict[str, Path]) -> None:
    shared["machine"].write_text("preset: [hang-debug]\n")
    shared["user"].write_text("preset: [./mine.yaml]\n")
    (shared["user"].parent / "mine.yaml").write_text("description: mine\nenv:\n  MINE: {value: '1', why: a test}\n")
    assert [setting.name for setting in resolved(shared).env] == ["MINE"]
    shared["project"].write_text("preset: []\n")
    assert resolved(shared).env == ()


def test_shared_config_user_file_follows_xdg_config_home(shared: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "xdg" / "safelaunch").mkdir(parents=True)
    (tmp_path / "xdg" / "safelaunch" / "config.yaml").write_text("stall-timeout: 9m\n")
    assert resolved(shared, XDG_CONFIG_HOME=os.fspath(tmp_path / "xdg")).stall_timeout_s == 540.0


def test_shared_config_error_names_file_and_line(shared: dict[str, Path]) -> None:
    shared["user"].write_text("stall-timeout: 2m\nmax-stal: 2h\n")
    with pytest.raises(PresetError, match=r"~/\.config/safelaunch/config\.yaml:2.*max-stal"):
        resolved(shared)


def test_shared_config_writable_by_others_is_ignored(
    shared: dict[str, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    shared["machine"].write_text("stall-timeout: 2m\n")
    shared["machine"].chmod(0o666)
    assert resolved(shared).stall_timeout_s is None
    assert f"ignoring {shared['machine']}, because every user can write it" in capfd.readouterr().err
