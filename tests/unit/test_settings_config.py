"""Table of own options, and sources of a setting's value."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

import pytest

from safelaunch.cli import COMMANDS, module_of
from safelaunch.settings.config import HOOK_ENV, INTERNAL_ENV, resolve
from safelaunch.settings.options import (
    BY_FLAG,
    ON_STALL,
    OWN_OPTIONS,
    Settings,
    help_text,
    one_of,
    options_of,
    parse_count,
    parse_flag,
    parse_gpus,
    parse_path,
    parse_run_name,
    parse_seconds,
    parse_stall_timeout,
)
from safelaunch.system.errors import PresetError, UsageError

NOT_ASKED = "torch's version must not be asked for"


def never() -> str | None:
    raise AssertionError(NOT_ASKED)


def settle(
    cwd: Path,
    *cli: str,
    env: dict[str, str] | None = None,
    yaml: str | None = None,
    toml: str | None = None,
) -> Settings:
    """Resolves settings from arguments (``--name=value`` or ``--switch``), variables and files."""
    if yaml is not None:
        (cwd / "safelaunch.yaml").write_text(yaml)
    if toml is not None:
        (cwd / "pyproject.toml").write_text(toml)
    pairs = [(word.partition("=")[0], word.partition("=")[2] if "=" in word else None) for word in cli]
    return resolve(pairs, env or {}, cwd, lambda: "2.13.0")


# --- options ----------------------------------------------------------------------------------------------------------


def test_own_options_are_declared() -> None:
    assert {option.flag: option.takes_value for option in OWN_OPTIONS} == {
        "--preset": True,
        "--stall-timeout": True,
        "--max-stall": True,
        "--pg-timeout": True,
        "--stall-floor": True,
        "--startup-timeout": True,
        "--on-stall": True,
        "--no-watch": False,
        "--bundle-dir": True,
        "--keep-bundles": True,
        "--on-bundle": True,
        "--no-early-look": False,
        "--on-suspect": True,
        "--check-every": True,
        "--on-inconsistent": True,
        "--gpus": True,
        "--wait": None,
        "--no-lease": False,
        "--run-name": True,
        "--cluster-key-file": True,
        "--cluster-store": True,
        "--config": True,
        "--dry-run": False,
    }
    assert [option.name for option in OWN_OPTIONS if option.repeatable] == ["preset"]


@pytest.mark.parametrize(
    ("words", "env", "yaml", "expected"),
    [
        ((), {}, "", (False, None)),
        (("--wait",), {}, "", (True, None)),
        (("--wait=10m",), {}, "", (True, 600.0)),
        ((), {"SAFELAUNCH_WAIT": "1"}, "", (True, None)),
        ((), {"SAFELAUNCH_WAIT": "0"}, "wait: 90s\n", (False, None)),
        ((), {}, "wait: true\n", (True, None)),
        ((), {}, "wait: 90\n", (True, 90.0)),
    ],
)
def test_wait_option_takes_optional_timeout(
    words: tuple[str, ...], env: dict[str, str], yaml: str, expected: tuple[bool, float | None], tmp_path: Path
) -> None:
    settings = settle(tmp_path, *words, env=env, yaml=yaml)
    assert (settings.wait, settings.wait_timeout_s) == expected


def test_subcommands_take_applicable_options() -> None:
    assert options_of("run") == OWN_OPTIONS
    assert options_of("exec") == OWN_OPTIONS
    assert options_of("doctor") == ()


@pytest.mark.parametrize("command", [name for name in ("demo", "dump", "colaunch") if name in COMMANDS])
def test_subcommand_parser_matches_option_table(command: str) -> None:
    parser: argparse.ArgumentParser = module_of(command).parser()
    taken = {flag for action in parser._actions for flag in action.option_strings} & set(BY_FLAG)
    assert taken == {option.flag for option in options_of(command)}


def test_option_help_names_every_option_within_width() -> None:
    text = help_text(width=80)
    for option in OWN_OPTIONS:
        assert (f"  {option.usage}" in text) == option.is_available
    assert max(map(len, text.splitlines())) <= 80
    assert "--gpus" not in help_text("dump")


@pytest.mark.parametrize(
    ("parse", "text", "expected"),
    [
        (parse_seconds, "600", 600.0),
        (parse_seconds, "1.5", 1.5),
        (parse_seconds, ".5", 0.5),
        (parse_seconds, "90s", 90.0),
        (parse_seconds, "10m", 600.0),
        (parse_seconds, "1.5H", 5400.0),
        (parse_seconds, "1e3", 1000.0),
        (parse_stall_timeout, "auto", None),
        (parse_stall_timeout, "2m", 120.0),
        (one_of(ON_STALL), "restart", "restart"),
        (parse_flag, "1", True),
        (parse_flag, "Yes", True),
        (parse_flag, "off", False),
        (parse_run_name, "a.B_c-9", "a.B_c-9"),
        (parse_run_name, "x" * 64, "x" * 64),
        (parse_count, "0", 0),
        (parse_count, " 12 ", 12),
        (parse_gpus, "all", "all"),
        (parse_gpus, "none", "none"),
        (parse_gpus, "08", "8"),
        (parse_gpus, "0, 2", "0,2"),
        (parse_gpus, "3,", "3,"),
        (parse_gpus, "GPU-1a2b,MIG-3c", "GPU-1a2b,MIG-3c"),
    ],
)
def test_option_value_is_parsed(parse: object, text: str, expected: object) -> None:
    assert callable(parse)
    assert parse(text) == expected


@pytest.mark.parametrize(
    ("parse", "texts"),
    [
        (
            parse_seconds,
            ["", "0", "-5", "0s", "inf", "nan", "1e400", "10 m", "5d", "1:30", "auto", "٣", "1_000", "0x10"],
        ),
        (parse_stall_timeout, ["", "Auto", "0", "never"]),
        (one_of(ON_STALL), ["", "kil", "Kill"]),
        (parse_flag, ["", "2", "maybe"]),
        (parse_run_name, ["", ".a", "-a", "a/b", "a b", "x" * 65, "a\n", "é"]),
        (parse_gpus, ["", "0", "-1", "0,0", "0,,1", ",", "a", "0-3", "gpu-1", "1.5", "GPU-"]),
        (parse_path, ["", " ", "a\0b"]),
        (parse_count, ["", "-1", "1.5", "1e3", "٣", "1234567", "all"]),
    ],
)
def test_invalid_option_value_is_rejected(parse: object, texts: list[str]) -> None:
    assert callable(parse)
    for text in texts:
        with pytest.raises(ValueError):
            parse(text)


# --- defaults ---------------------------------------------------------------------------------------------------------


def test_settings_defaults_without_any_source(tmp_path: Path) -> None:
    settings = resolve([], {"PATH": "/bin", **dict.fromkeys([*INTERNAL_ENV, *HOOK_ENV], "x")}, tmp_path, never)
    assert settings.presets == ()
    assert settings.stall_timeout_s is None
    assert settings.effective_stall_timeout_s == 600.0
    assert settings.startup_timeout_s == 1800.0
    assert settings.effective_max_stall_s is None
    assert settings.max_stall_origin == "default"
    assert settings.on_stall == "kill"
    assert settings.watch is True
    assert settings.keep_bundles == 0
    assert settings.on_bundle is None
    assert (settings.early_look, settings.on_suspect) == (True, None)
    assert settings.wait is False
    assert settings.dry_run is False
    assert settings.bundle_dir == tmp_path / "safelaunch-bundles"
    assert (settings.gpus, settings.run_name, settings.config, settings.env) == (None, None, None, ())
    assert set(settings.origins.values()) == {"default"}
    assert set(settings.origins) == {option.name for option in OWN_OPTIONS}
    assert not settings.is_explicit("stall-timeout")


@pytest.mark.parametrize(
    ("cli", "seconds", "origin"),
    [
        (["--stall-timeout=10"], 120.0, "12 x stall-timeout (command line)"),
        (["--stall-timeout=auto"], None, "default"),
        (["--stall-timeout=10", "--max-stall=50"], 50.0, "command line"),
        (["--max-stall=50"], 50.0, "command line"),
    ],
)
def test_max_stall_defaults_to_multiple_of_stall_timeout(
    tmp_path: Path, cli: list[str], seconds: float | None, origin: str
) -> None:
    settings = settle(tmp_path, *cli)
    assert (settings.effective_max_stall_s, settings.max_stall_origin) == (seconds, origin)


def test_settings_without_file_import_no_parser(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from safelaunch.settings.config import resolve\n"
        f"resolve([('--stall-timeout', '5')], {{}}, Path({str(tmp_path)!r}), lambda: None)\n"
        "print(sorted({'yaml', 'msgspec', 'rich', 'tomllib', 'tomli', 'torch', 'difflib'} & set(sys.modules)))"
    )
    (tmp_path / "pyproject.toml").write_text("[tool.other]\n")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


# --- precedence -------------------------------------------------------------------------------------------------------

PRESET = "description: d\nwatchdog: {stall-timeout: 5, startup-timeout: 5, max-stall: 500, on-stall: dump}\n"


def test_settings_precedence_is_cli_environment_file_preset(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text(PRESET)
    settings = settle(
        tmp_path,
        "--stall-timeout=1",
        env={"SAFELAUNCH_STALL_TIMEOUT": "2", "SAFELAUNCH_STARTUP_TIMEOUT": "2"},
        yaml="# mine\npreset: ./p.yaml\nstall-timeout: 3\nstartup-timeout: 3\nmax-stall: 3m\n",
    )
    assert (settings.stall_timeout_s, settings.startup_timeout_s, settings.max_stall_s) == (1.0, 2.0, 180.0)
    assert settings.on_stall == "dump"
    assert {name: settings.origin(name) for name in ("stall-timeout", "startup-timeout", "max-stall", "on-stall")} == {
        "stall-timeout": "command line",
        "startup-timeout": "environment SAFELAUNCH_STARTUP_TIMEOUT",
        "max-stall": "safelaunch.yaml:5",
        "on-stall": "preset ./p.yaml",
    }
    assert settings.is_explicit("on-stall")


def test_stall_timeout_auto_overrides_preset(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text(PRESET)
    settings = settle(tmp_path, "--preset=./p.yaml", "--stall-timeout=auto")
    assert settings.stall_timeout_s is None
    assert settings.origin("stall-timeout") == "command line"


@pytest.mark.parametrize(
    ("cli", "env", "expected", "origin"),
    [
        (["--preset=nccl-debug", "--preset=cuda-sync"], "production", ("nccl-debug", "cuda-sync"), "command line"),
        ([], "production, cuda-sync,", ("production", "cuda-sync"), "environment SAFELAUNCH_PRESET"),
        ([], "", ("hang-debug", "compile-debug"), "safelaunch.yaml:1"),
    ],
)
def test_presets_of_higher_level_replace_lower_ones(
    tmp_path: Path, cli: list[str], env: str, expected: tuple[str, ...], origin: str
) -> None:
    settings = settle(tmp_path, *cli, env={"SAFELAUNCH_PRESET": env}, yaml="preset: [hang-debug, compile-debug]\n")
    assert settings.presets == expected
    assert settings.origin("preset") == origin
    assert {setting.origin for setting in settings.env} == {f"preset {name}" for name in expected}


def test_last_of_repeated_option_counts(tmp_path: Path) -> None:
    assert settle(tmp_path, "--run-name=a", "--run-name=b").run_name == "b"


def test_switches_and_paths_are_resolved(tmp_path: Path) -> None:
    settings = settle(tmp_path, "--wait", "--dry-run", "--bundle-dir=out", "--gpus=2", env={"SAFELAUNCH_NO_WATCH": "1"})
    assert (settings.wait, settings.dry_run, settings.watch) == (True, True, False)
    assert settings.origin("no-watch") == "environment SAFELAUNCH_NO_WATCH"
    assert settings.bundle_dir == tmp_path / "out"
    assert settings.gpus == "2"
    assert settle(tmp_path, "--bundle-dir=/abs", env={"SAFELAUNCH_NO_WATCH": "0"}).bundle_dir == Path("/abs")
    assert settle(tmp_path, env={"SAFELAUNCH_NO_WATCH": "0"}).watch is True


# --- configuration file -----------------------------------------------------------------------------------------------


def test_env_of_config_file_overrides_presets(tmp_path: Path) -> None:
    settings = settle(
        tmp_path,
        yaml="preset: cuda-sync\nenv:\n  CUDA_LAUNCH_BLOCKING: 0\n  B:\n    value: '{run_dir}/b'\n    why: mine\n"
        "  C: {value: 1, torch: '<2'}\n",
    )
    assert [(s.name, s.expand("/r"), s.why, s.origin) for s in settings.env] == [
        ("CUDA_LAUNCH_BLOCKING", "0", "", "safelaunch.yaml:3"),
        ("B", "/r/b", "mine", "safelaunch.yaml:4"),
    ]


def test_pyproject_table_is_read(tmp_path: Path) -> None:
    settings = settle(
        tmp_path,
        toml='[project]\nname = "x"\nwait = 3\n\n[tool.safelaunch]\nstall-timeout = 90\nno-watch = true\n'
        'preset = ["cuda-sync"]\n\n[tool.safelaunch.env]\nA = 1\nB = "t"\n',
    )
    assert settings.stall_timeout_s == 90.0
    assert settings.watch is False
    assert settings.presets == ("cuda-sync",)
    assert settings.origin("stall-timeout") == "pyproject.toml:6"
    assert [(s.name, s.value, s.origin) for s in settings.env[1:]] == [
        ("A", "1", "pyproject.toml:11"),
        ("B", "t", "pyproject.toml:12"),
    ]


def test_safelaunch_yaml_precedes_pyproject(tmp_path: Path) -> None:
    settings = settle(tmp_path, yaml="stall-timeout: 1\n", toml="[tool.safelaunch]\nstall-timeout = 2\nwait = true\n")
    assert settings.stall_timeout_s == 1.0
    assert settings.wait is False


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("# mine\nstall-timeout = '90s'\n[env]\nA = 1\n", 2),
        ("[other]\nwait = 3\n[tool.safelaunch]\nstall-timeout = 90\n[tool.safelaunch.env]\nA = 1\n", 4),
    ],
    ids=["top level", "table"],
)
def test_named_toml_config_is_read(tmp_path: Path, text: str, line: int) -> None:
    (tmp_path / "other.toml").write_text(text)
    settings = settle(tmp_path, "--config=other.toml")
    assert (settings.stall_timeout_s, settings.origin("stall-timeout")) == (90.0, f"other.toml:{line}")
    assert [(variable.name, variable.value) for variable in settings.env] == [("A", "1")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stall-timout = 3\n", "other.toml:1: unknown key 'stall-timout'; did you mean 'stall-timeout'?"),
        ("stall-timeout: 3\n", "other.toml: not valid TOML"),
    ],
)
def test_named_toml_config_error_names_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "other.toml").write_text(text)
    with pytest.raises(PresetError, match=f"^{re.escape(message)}"):
        settle(tmp_path, "--config=other.toml")


def test_named_toml_config_can_be_empty(tmp_path: Path) -> None:
    (tmp_path / "other.toml").write_text("")
    assert settle(tmp_path, "--config=other.toml").stall_timeout_s is None


@pytest.mark.parametrize("toml", ["broken [", "[tool.safelaunch-x]\na = 1\n", "[tool.other]\nx = '[tool.safelaunch'\n"])
def test_pyproject_without_table_is_ignored(tmp_path: Path, toml: str) -> None:
    assert set(settle(tmp_path, toml=toml).origins.values()) == {"default"}


def test_empty_config_file_sets_nothing(tmp_path: Path) -> None:
    assert set(settle(tmp_path, yaml="# nothing yet\n").origins.values()) == {"default"}


@pytest.mark.parametrize("where", ["command line", "environment SAFELAUNCH_CONFIG"])
def test_config_option_names_file_and_base_for_presets(tmp_path: Path, where: str) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "p.yaml").write_text("description: d\nenv: {A: {value: 1, why: w}}\n")
    (tmp_path / "sub" / "c.yaml").write_text("preset: ./p.yaml\nbundle-dir: out\n")
    if where == "command line":
        settings = settle(tmp_path, "--config=sub/c.yaml", yaml="wait: true\n")
    else:
        settings = settle(tmp_path, env={"SAFELAUNCH_CONFIG": "sub/c.yaml"}, yaml="wait: true\n")
    assert settings.wait is False, "the named file is read instead of safelaunch.yaml"
    assert [setting.name for setting in settings.env] == ["A"]
    assert settings.bundle_dir == tmp_path / "out"
    assert settings.origin("preset") == "sub/c.yaml:1"
    assert settings.origin("config") == where


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("yaml", "message"),
    [
        ("stall-timout: 3\n", "safelaunch.yaml:1: unknown key 'stall-timout'; did you mean 'stall-timeout'?"),
        ("\nstall_timeout: 3\n", "safelaunch.yaml:2: unknown key 'stall_timeout'; did you mean 'stall-timeout'?"),
        ("config: x\n", "safelaunch.yaml:1: unknown key 'config'"),
        ("no-lease: 3\n", "safelaunch.yaml:1: no-lease must be true or false, not 3"),
        ("no-lease:\n", "safelaunch.yaml:1: no-lease must be true or false, not nothing"),
        ("wait: [1]\n", "safelaunch.yaml:1: wait: "),
        ("stall-timeout: soon\n", "safelaunch.yaml:1: stall-timeout: 'soon' is not auto or a positive number"),
        ("max-stall: [1]\n", "safelaunch.yaml:1: max-stall must be a positive number"),
        ("gpus: no\n", "safelaunch.yaml:1: gpus must be a number of GPUs"),
        ("preset: hang-debgu\n", "safelaunch.yaml:1: unknown preset 'hang-debgu'; did you mean 'hang-debug'?"),
        ("preset: 3\n", "safelaunch.yaml:1: preset must be text, not a number"),
        ("env:\n  A: true\n", "safelaunch.yaml:2: A: true is a boolean"),
        ("env:\n  A: {why: w}\n", "safelaunch.yaml:2: A has no 'value'"),
        ("env:\n  A: {value: 1, wy: w}\n", "safelaunch.yaml:2: unknown key 'wy'; did you mean 'why'?"),
        ("env: 3\n", "safelaunch.yaml:1: env must be a mapping, not a number"),
        ("- a\n", "safelaunch.yaml:1: the configuration must be a mapping, not a list"),
        ("a: {\n", "safelaunch.yaml:2: not valid YAML"),
    ],
)
def test_invalid_yaml_file_is_named_with_line(tmp_path: Path, yaml: str, message: str) -> None:
    with pytest.raises(PresetError) as caught:
        settle(tmp_path, yaml=yaml)
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("[tool.safelaunch]\nwait = true\nstall-timout = 3\n", "pyproject.toml:3: unknown key 'stall-timout'; did you"),
        ("[tool.safelaunch]\nno-lease = 3\n", "pyproject.toml:2: no-lease must be true or false, not 3"),
        ('[tool.safelaunch]\n"max-stall" = "soon"\n', "pyproject.toml:2: max-stall: 'soon' is not a positive"),
        ("[tool.safelaunch.env]\nA = true\n", "pyproject.toml:2: A: true is a boolean"),
        ("[tool.safelaunch.evn]\nA = 1\n", "pyproject.toml:1: unknown key 'evn'; did you mean 'env'?"),
        ("[tool.safelaunch]\nwait = \n", "pyproject.toml: not valid TOML"),
    ],
)
def test_invalid_pyproject_is_named_with_line(tmp_path: Path, toml: str, message: str) -> None:
    with pytest.raises(PresetError) as caught:
        settle(tmp_path, toml=toml)
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("cli", "env", "message", "fix"),
    [
        (["--stall-timeout=-5"], {}, "--stall-timeout: '-5' is not auto or a positive number of seconds (also 90s", ""),
        (["--on-stall=kil"], {}, "--on-stall: 'kil' is not kill, restart or dump; did you mean 'kill'?", ""),
        (["--gpus=0"], {}, "--gpus: '0' is not a number of GPUs, all, none, or ids", ""),
        (["--run-name=../x"], {}, "--run-name: '../x' is not a name of 1 to 64 letters", ""),
        (["--preset=hang-debgu"], {}, "unknown preset 'hang-debgu'; did you mean 'hang-debug'?", "shipped presets"),
        (["--preset="], {}, "--preset: '' is not a preset's name or file", ""),
        (["--wait=soon"], {}, "--wait: 'soon' is not 1, 0 or a duration (90s, 10m, 2h)", ""),
        (["--gpus"], {}, "--gpus needs a value", ""),
        (["--wiat"], {}, "unknown option --wiat; did you mean '--wait'?", ""),
        (["--config=none.yaml"], {}, "configuration file none.yaml does not exist (command line)", "check the path"),
        ([], {"SAFELAUNCH_MAX_STALL": "x"}, "SAFELAUNCH_MAX_STALL: 'x' is not a positive number", ""),
        ([], {"SAFELAUNCH_WAIT": "maybe"}, "SAFELAUNCH_WAIT: 'maybe' is not 1, 0 or a duration", ""),
        ([], {"SAFELAUNCH_PRESET": "nope"}, "environment SAFELAUNCH_PRESET: unknown preset 'nope'", ""),
        (
            [],
            {"SAFELAUNCH_STALL_TIMOUT": "5"},
            "environment variable SAFELAUNCH_STALL_TIMOUT is not one of safelaunch's; did you mean 'SAFELAUNCH_STALL",
            "rename it to SAFELAUNCH_STALL_TIMEOUT, or unset it",
        ),
        (
            ["--max-stall=5"],
            {"SAFELAUNCH_STALL_TIMEOUT": "10"},
            "max-stall (5 s, command line) is shorter than stall-timeout (10 s, environment SAFELAUNCH_STALL_TIMEOUT)",
            "at least the stall timeout",
        ),
    ],
)
def test_invalid_options_are_usage_errors(
    tmp_path: Path, cli: list[str], env: dict[str, str], message: str, fix: str
) -> None:
    with pytest.raises(UsageError) as caught:
        settle(tmp_path, *cli, env=env)
    assert message in caught.value.message
    assert fix in caught.value.fix
    assert caught.value.exit_code == 2


def test_early_look_settings_come_from_every_source(tmp_path: Path) -> None:
    in_file = settle(tmp_path, yaml="no-early-look: true\non-suspect: 'post \"$SAFELAUNCH_SUMMARY\"'\n")
    assert (in_file.early_look, in_file.on_suspect) == (False, 'post "$SAFELAUNCH_SUMMARY"')
    assert in_file.origin("no-early-look") == "safelaunch.yaml:1"
    env = {"SAFELAUNCH_NO_EARLY_LOOK": "0", "SAFELAUNCH_RANKS": "1", "SAFELAUNCH_QUIET_S": "7"}
    assert settle(tmp_path, env=env, yaml="no-early-look: true\n").early_look
    assert not settle(tmp_path, "--no-early-look").early_look


def test_bundle_settings_come_from_every_source(tmp_path: Path) -> None:
    settings = settle(
        tmp_path,
        "--keep-bundles=3",
        env={"SAFELAUNCH_BUNDLE": "/x", "SAFELAUNCH_KEEP_BUNDLES": "9"},
        yaml="on-bundle: 'post \"$SAFELAUNCH_BUNDLE\"'\nkeep-bundles: 4\n",
    )
    assert settings.keep_bundles == 3
    assert settings.on_bundle == 'post "$SAFELAUNCH_BUNDLE"'
    assert settings.origin("on-bundle") == "safelaunch.yaml:1"
