"""Shipped presets, composition of several, and errors in preset files."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from safelaunch.cli import presets as command
from safelaunch.settings.options import EnvSetting
from safelaunch.settings.presets import find_builtin_dir, list_presets, load_presets, preset_chain, version_matches
from safelaunch.system.errors import PresetError, UsageError

SHIPPED = [
    "collective-timing",
    "compile-debug",
    "consistency",
    "cpp-stacks",
    "cuda-sync",
    "desync-detail",
    "hang-debug",
    "nccl-debug",
    "oom-debug",
    "production",
]
OLD_NAMES = {"TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_NCCL_TRACE_CPP_STACK"}
NEW_NAMES = {"TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE", "TORCH_FR_CPP_STACK"}


def names(refs: list[str], version: str | None, cwd: Path = Path()) -> set[str]:
    return {setting.name for setting in load_presets(refs, cwd=cwd, torch_version=version).env}


def values(refs: list[str], cwd: Path, version: str | None = "2.13.0") -> dict[str, str]:
    return {setting.name: setting.value for setting in load_presets(refs, cwd=cwd, torch_version=version).env}


def write(directory: Path, **files: str) -> None:
    for name, text in files.items():
        (directory / f"{name}.yaml").write_text(f"description: {name}\n{text}")


def error_of(directory: Path, text: str | bytes, ref: str = "my.yaml") -> PresetError:
    (directory / "my.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(PresetError) as caught:
        load_presets([ref], cwd=directory, torch_version="2.13.0")
    return caught.value


# --- shipped presets --------------------------------------------------------------------------------------------------


def test_shipped_presets_are_listed() -> None:
    assert [preset.name for preset in list_presets()] == SHIPPED


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_preset_explains_itself_and_each_variable(name: str) -> None:
    composition = load_presets([name], cwd=Path(), torch_version="2.13.0")
    preset = preset_chain([name], cwd=Path())[-1]
    assert 20 < len(preset.summary) < 110
    assert composition.env or composition.watchdog
    assert all(len(setting.why) > 20 and "\n" not in setting.why for setting in composition.env)
    assert {setting.origin for setting in preset.env} <= {f"preset {name}"}


@pytest.mark.parametrize("name", ["hang-debug", "production"])
def test_preset_paths_are_in_run_directory(name: str) -> None:
    for version in ("2.6.0", "2.13.0"):
        settings = load_presets([name], cwd=Path(), torch_version=version).env
        paths = [setting for setting in settings if "/" in setting.value or setting.name.endswith("_FILE")]
        assert paths
        for setting in paths:
            assert setting.expand("/run/r7").startswith("/run/r7/flight_recorder/"), setting.name


def test_hang_debug_enables_flight_recorder_and_timeout_dumps() -> None:
    variables = values(["hang-debug"], Path())
    assert int(variables["TORCH_FR_BUFFER_SIZE"]) >= 2000
    assert variables["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"


@pytest.mark.parametrize(
    ("version", "idle"), [("2.9.1", ()), ("2.13.0+cpu", ("desync-detail",)), (None, ("desync-detail",))]
)
def test_desync_detail_is_idle_if_ddp_would_fail(version: str | None, idle: tuple[str, ...]) -> None:
    """The start notes a preset that has nothing to set."""
    composition = load_presets(["desync-detail"], cwd=Path(), torch_version=version)
    assert composition.idle == idle
    assert ("TORCH_DISTRIBUTED_DEBUG" in {setting.name for setting in composition.env}) is not bool(idle)
    assert load_presets(["hang-debug", "production"], cwd=Path(), torch_version=version).idle == ()


@pytest.mark.parametrize("name", ["hang-debug", "desync-detail", "production"])
def test_presets_keep_nccl_output_off_console(name: str) -> None:
    """NCCL before 2.22 (with torch 2.6) prints its version on stdout at any NCCL_DEBUG level."""
    assert "NCCL_DEBUG" not in names([name], "2.6.0")
    for setting in load_presets([name], cwd=Path(), torch_version="2.13.0").env:
        if setting.name == "NCCL_DEBUG":
            assert "NCCL_DEBUG_FILE" in names([name], "2.13.0")
        if setting.name == "NCCL_DEBUG_FILE":
            assert setting.yields_to == ("NCCL_DEBUG",), "an exported NCCL_DEBUG keeps its output on the console"


@pytest.mark.parametrize(
    ("version", "expected", "absent"),
    [
        ("2.6.0", OLD_NAMES, NEW_NAMES),
        ("2.8.0+cu128", OLD_NAMES, NEW_NAMES),
        ("2.9.0", NEW_NAMES, OLD_NAMES),
        ("2.9.0a0+git1234", NEW_NAMES, OLD_NAMES),
        ("2.13.0+cpu", NEW_NAMES, OLD_NAMES),
        ("3.0", NEW_NAMES, OLD_NAMES),
        (None, NEW_NAMES, OLD_NAMES),
        ("unknown", NEW_NAMES, OLD_NAMES),
    ],
)
def test_presets_set_names_of_installed_torch(version: str | None, expected: set[str], absent: set[str]) -> None:
    variables = names(["hang-debug"], version)
    assert expected <= variables
    assert not absent & variables


@pytest.mark.parametrize(
    ("version", "expected"),
    [("2.6.0", "PYTORCH_CUDA_ALLOC_CONF"), ("2.9.1", "PYTORCH_CUDA_ALLOC_CONF"), ("2.13.0", "PYTORCH_ALLOC_CONF")],
)
def test_oom_debug_uses_allocator_name_of_torch_version(version: str, expected: str) -> None:
    assert {name for name in names(["oom-debug"], version) if "ALLOC_CONF" in name} == {expected}


def test_renamed_variable_yields_to_exported_old_name() -> None:
    """The user's exported old name must not lose to the preset's new one."""
    renamed = [s for s in load_presets(["hang-debug"], cwd=Path(), torch_version="2.13").env if s.name in NEW_NAMES]
    assert len(renamed) == 3
    assert {name for setting in renamed for name in setting.yields_to} == OLD_NAMES


# --- versions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("specifier", "version", "expected"),
    [
        ("", "2.6", True),
        (">=2.9", "2.10.0", True),
        (">=2.9", "2.9", True),
        (">=2.9", "2.8.1", False),
        ("<2.9", "2.13.0+cpu", False),
        (">=2.6,<2.9", "2.7.1", True),
        (">=2.6, <2.9", "2.9.0", False),
        ("==2.9", "2.9.0", True),
        ("!=2.9.1", "2.9.1", False),
        (">2.9", "2.9.0", False),
        ("<=2.9", "2.9.0", True),
        ("<2.9", None, False),
        (">=99", None, True),
    ],
)
def test_version_condition_matches_version(specifier: str, version: str | None, expected: bool) -> None:
    assert version_matches(specifier, version) is expected


# --- composition ------------------------------------------------------------------------------------------------------


def test_later_preset_and_extending_preset_win(tmp_path: Path) -> None:
    write(
        tmp_path,
        base="env: {A: {value: base, why: w}, B: {value: base, why: w}}\nwatchdog: {stall-timeout: 60}",
        child="extends: base.yaml\nenv: {B: {value: child, why: w}}",
        other="env: {A: {value: other, why: w}}\nwatchdog: {stall-timeout: 2m, on-stall: dump}",
    )
    composition = load_presets(["./child.yaml", "other.yaml"], cwd=tmp_path, torch_version=None)
    assert [(s.name, s.value, s.origin) for s in composition.env] == [
        ("A", "other", "preset other.yaml"),
        ("B", "child", "preset ./child.yaml"),
    ]
    assert dict(composition.watchdog) == {
        "stall-timeout": (120.0, "preset other.yaml"),
        "on-stall": ("dump", "preset other.yaml"),
    }
    chain = preset_chain(["./child.yaml", "other.yaml"], cwd=tmp_path)
    assert [preset.name for preset in chain] == ["base.yaml", "./child.yaml", "other.yaml"]


def test_shared_base_preset_does_not_override_extensions(tmp_path: Path) -> None:
    write(
        tmp_path,
        base="env: {A: {value: base, why: w}}",
        left="extends: base.yaml\nenv: {A: {value: left, why: w}}",
        right="extends: base.yaml\nenv: {C: {value: right, why: w}}",
        both="extends: [left.yaml, right.yaml]",
    )
    assert values(["./both.yaml"], tmp_path) == {"A": "left", "C": "right"}
    assert values(["left.yaml", "base.yaml"], tmp_path) == {"A": "base"}, "but asked for by name, later wins"


def test_variable_for_other_torch_does_not_hide_matching_one(tmp_path: Path) -> None:
    write(
        tmp_path,
        first='env: {A: {value: new, why: w, torch: ">=2.9"}}',
        second='env: {A: {value: old, why: w, torch: "<2.9"}}',
    )
    assert values(["first.yaml", "second.yaml"], tmp_path, "2.13") == {"A": "new"}
    assert values(["first.yaml", "second.yaml"], tmp_path, "2.6") == {"A": "old"}


def test_preset_file_extends_shipped_and_relative_presets(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    write(tmp_path / "sub", base="env: {A: {value: sub, why: w}}")
    write(tmp_path / "sub", my="extends: [hang-debug, ./base.yaml]")
    variables = values(["sub/my.yaml"], tmp_path)
    assert variables["A"] == "sub"
    assert set(variables) >= NEW_NAMES


def test_preset_cycle_is_named(tmp_path: Path) -> None:
    write(tmp_path, a="extends: b.yaml", b="extends: a.yaml")
    with pytest.raises(PresetError, match=r"^b\.yaml:2: presets extend each other in a cycle: a -> b -> a"):
        load_presets(["a.yaml"], cwd=tmp_path, torch_version=None)


def test_deep_or_doubling_preset_chains_end_quickly(tmp_path: Path) -> None:
    for n in range(1, 40):
        write(tmp_path, **{f"p{n}": f"extends: [p{n - 1}.yaml, ./p{n - 1}.yaml]"})
    write(tmp_path, p0="env: {A: {value: 1, why: w}}")
    assert values(["p12.yaml"], tmp_path) == {"A": "1"}
    with pytest.raises(PresetError, match="more than 16 deep"):
        load_presets(["p39.yaml"], cwd=tmp_path, torch_version=None)


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("1", "1"),
        ("012", "012"),
        ("1:30", "1:30"),
        ("1_000", "1_000"),
        ("1e-3", "1e-3"),
        ("2.50", "2.50"),
        ("2026-11-20", "2026-11-20"),
        ('"true"', "true"),
        ('""', ""),
        ("text", "text"),
        ('"{run_dir}/x"', "/r/x"),
        ("""'{{"a": 1}}'""", '{"a": 1}'),
        ('"{{run_dir}}"', "{run_dir}"),
    ],
)
def test_preset_value_is_text_as_written(tmp_path: Path, written: str, expected: str) -> None:
    write(tmp_path, my=f"env:\n  A: {{value: {written}, why: w}}\n")
    (setting,) = load_presets(["my.yaml"], cwd=tmp_path, torch_version=None).env
    assert setting.expand("/r") == expected


def test_expand_leaves_braces_of_run_directory() -> None:
    assert EnvSetting("A", "{run_dir}/x", "", "").expand("/odd{name}") == "/odd{name}/x"


HEAD = "description: d\n"


@pytest.mark.parametrize(
    ("text", "message", "fix"),
    [
        (
            HEAD + "watchdgo: {}\n",
            "my.yaml:2: unknown key 'watchdgo'; did you mean 'watchdog'?",
            "description, extends",
        ),
        (HEAD + "env:\n  A:\n    valu: 1\n    why: w\n", "my.yaml:4: unknown key 'valu'; did you mean 'value'?", "why"),
        (HEAD + "watchdog:\n  stall_timeout: 5\n", "my.yaml:3: unknown key 'stall_timeout'; did you mean 'stall-t", ""),
        (HEAD + "zzz: 1\n", "my.yaml:2: unknown key 'zzz'", "description, extends, env, watchdog"),
        (HEAD + "env:\n  A: {value: 1}\n", "my.yaml:3: A has no 'why'", ""),
        (HEAD + "env:\n  A: {why: w}\n", "my.yaml:3: A has no 'value'", ""),
        (HEAD + "env:\n  A: 1\n", "my.yaml:3: A must be a mapping with 'value' and 'why', not a number", ""),
        (HEAD + "env:\n  A: {value: true, why: w}\n", "my.yaml:3: A: true is a boolean", 'write "true" in quotes'),
        (HEAD + "env:\n  A: {value: off, why: w}\n", "my.yaml:3: A: off is a boolean", '"off"'),
        (HEAD + "env:\n  A: {value: ~, why: w}\n", "my.yaml:3: A: a value must be text or a number, not nothing", '""'),
        (HEAD + "env:\n  A: {value: [1], why: w}\n", "my.yaml:3: A: a value must be text or a number, not a list", ""),
        (HEAD + 'env:\n  A: {value: "a\\0b", why: w}\n', "my.yaml:3: A: a value cannot contain a NUL", ""),
        (HEAD + 'env:\n  A: {value: 1, why: "a\\nb"}\n', "my.yaml:3: A: why must be one line", ""),
        (HEAD + 'env:\n  A: {value: 1, why: " "}\n', "my.yaml:3: A: why must be text, not empty", ""),
        (HEAD + "env:\n  A: {value: 1, why: w, torch: 2.9}\n", "my.yaml:3: A: torch must be text, not a number", ""),
        (HEAD + 'env:\n  A: {value: 1, why: w, torch: "~2"}\n', "my.yaml:3: '~2' is not a version condition", ">=2.9"),
        (HEAD + "env:\n  A-B: {value: 1, why: w}\n", "my.yaml:3: 'A-B' is not the name of an environment variable", ""),
        (HEAD + "env:\n  SAFELAUNCH_X: {value: 1, why: w}\n", "my.yaml:3: SAFELAUNCH_X cannot be set here", "watchdog"),
        (
            HEAD + 'env:\n  A: {value: "{rundir}", why: w}\n',
            "unknown placeholder {rundir}; did you mean 'run_dir'?",
            "",
        ),
        (HEAD + 'env:\n  A: {value: "{run_dir.x}", why: w}\n', "my.yaml:3: A: unknown placeholder {run_dir.x}", "{{"),
        (HEAD + 'env:\n  A: {value: "{run_dir!r}", why: w}\n', "my.yaml:3: A: unknown placeholder", ""),
        (HEAD + 'env:\n  A: {value: "{}", why: w}\n', "my.yaml:3: A: unknown placeholder {}", ""),
        (HEAD + 'env:\n  A: {value: "a}b", why: w}\n', "my.yaml:3: A: Single '}'", "{{ and }}"),
        (HEAD + "env:\n  A: {value: 1, why: w}\n  A: {value: 2, why: w}\n", "my.yaml:4: key 'A' occurs twice", ""),
        (HEAD + "description: e\n", "my.yaml:2: key 'description' occurs twice (first at my.yaml:1)", ""),
        (HEAD + "env: [A]\n", "my.yaml:2: env must be a mapping, not a list", ""),
        (
            HEAD + "extends: hang-debgu\n",
            "my.yaml:2: unknown preset 'hang-debgu'; did you mean 'hang-debug'?",
            "shipped",
        ),
        (HEAD + "extends:\n- hang-debug\n- 3\n", "my.yaml:4: extends must be text, not a number", ""),
        (
            HEAD + "extends: ./hang-debug.yaml\n",
            "my.yaml:2: preset file ./hang-debug.yaml does not exist",
            "called hang-d",
        ),
        (HEAD + "watchdog:\n  stall-timeout: -5\n", "my.yaml:3: stall-timeout: '-5' is not auto or a positive", ""),
        (HEAD + "watchdog:\n  max-stall: auto\n", "my.yaml:3: max-stall: 'auto' is not a positive number", ""),
        (HEAD + "watchdog:\n  on-stall: kil\n", "my.yaml:3: on-stall: 'kil' is not kill, restart or dump; did you", ""),
        (
            HEAD + "watchdog:\n  on-stall: no\n",
            "my.yaml:3: on-stall must be kill, restart or dump; this is a bool",
            '"no"',
        ),
        ("env: {}\n", "my.yaml:1: no 'description'", ""),
        ("description:\n", "my.yaml:1: description must be text, not nothing", ""),
        ("", "my.yaml:1: the file is empty", ""),
        ("- a\n", "my.yaml:1: a preset must be a mapping, not a list", ""),
        ("description: d\n---\ndescription: e\n", "my.yaml:2: not valid YAML: but found another document", ""),
        (HEAD + "env: {A: [\n", "my.yaml:3: not valid YAML", ""),
        (HEAD + "env:\n\tA: 1\n", "my.yaml:3: not valid YAML", ""),
        (HEAD + "x: \x01\n", "my.yaml:2: not valid YAML: special characters are not allowed", ""),
        (HEAD + "extends: &a hang-debug\nenv: *a\n", "my.yaml:2: anchors and aliases are not supported", ""),
        ("a: &a [*a]\n", "my.yaml:1: anchors and aliases are not supported", ""),
        (HEAD + "env: {<<: {A: 1}}\n", "my.yaml:2: the tag tag:yaml.org,2002:merge is not supported", ""),
        (HEAD + "extends: !!python/name:os.system x\n", "my.yaml:2: the tag tag:yaml.org,2002:python/name:os", ""),
        (HEAD + "extends: !!map x\n", "my.yaml:2: the tag tag:yaml.org,2002:map does not fit", ""),
        (HEAD + "env:\n  ? [a]\n  : 1\n", "my.yaml:3: a key must be a name, not a list", ""),
        ("[" * 5000, "my.yaml: nested too deeply", ""),
        (b"description: d\nx: \xff\n", "my.yaml:2: not UTF-8 text", ""),
        (b"#" * (1 << 20) + b"\n", "my.yaml: larger than 1 MiB", ""),
    ],
)
def test_invalid_yaml_file_is_named_with_line(tmp_path: Path, text: str | bytes, message: str, fix: str) -> None:
    error = error_of(tmp_path, text)
    assert error.exit_code == 2
    assert message in error.message
    assert error.message.startswith("my.yaml:")
    assert fix in error.fix


@pytest.mark.parametrize(
    ("ref", "message", "fix"),
    [
        ("hang-debgu", "unknown preset 'hang-debgu'; did you mean 'hang-debug'?", "shipped presets: collective-timing"),
        ("hang", "unknown preset 'hang'; did you mean 'hang-debug'?", ""),
        ("qqq", "unknown preset 'qqq'", "give its path"),
        ("", "unknown preset ''", ""),
        ("./none.yaml", "preset file ./none.yaml does not exist", "check the path"),
        ("hang-debug.yaml", "preset file hang-debug.yaml does not exist", "the shipped preset is called hang-debug"),
        ("../", "..: not a regular file", ""),
        ("/dev/null", "/dev/null: not a regular file", ""),
    ],
)
def test_missing_preset_is_error_with_fix(tmp_path: Path, ref: str, message: str, fix: str) -> None:
    with pytest.raises(PresetError) as caught:
        load_presets([ref], cwd=tmp_path, torch_version=None)
    assert message.lstrip(".") in caught.value.message
    assert fix in caught.value.fix


def test_preset_fifo_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(PresetError, match=r"^pipe\.yaml: not a regular file"):
        load_presets(["pipe.yaml"], cwd=tmp_path, torch_version=None)


def test_preset_error_names_requesting_file() -> None:
    with pytest.raises(PresetError, match=r"^safelaunch\.yaml:3: unknown preset 'x'"):
        load_presets(["x"], cwd=Path(), torch_version=None, asked_by="safelaunch.yaml:3")


# --- safelaunch presets -----------------------------------------------------------------------------------------------


def test_presets_lists_each_preset_on_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    listed = [re.fullmatch(r"(\S+) {2,}(\S.*)", line) for line in lines[: len(SHIPPED)]]
    assert [match and match[1] for match in listed] == SHIPPED
    assert len({match.start(2) for match in listed if match}) == 1, "aligned"


def test_presets_list_is_same_as_presets(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["list"]) == command.main([]) == 0
    out = capsys.readouterr().out
    assert out[: len(out) // 2] == out[len(out) // 2 :]


def test_presets_json_lists_names_and_descriptions(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [entry["name"] for entry in document] == SHIPPED
    assert all(entry["description"] for entry in document)


def test_presets_show_lists_variables_with_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["show", "desync-detail"]) == 0
    out = capsys.readouterr().out
    assert "extends hang-debug" in out
    assert "  TORCH_DISTRIBUTED_DEBUG=DETAIL\n      Ranks compare" in out
    assert "(torch >=2.9; not if you export TORCH_NCCL_TRACE_BUFFER_SIZE; from hang-debug)" in out
    assert "timing" in out
    assert max(map(len, out.splitlines())) <= 100


def test_presets_show_lists_watchdog_settings_of_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, my="watchdog: {stall-timeout: auto, max-stall: 10m, on-stall: dump}")
    assert command.main(["show", "my.yaml"]) == 0
    assert "watchdog:\n  stall-timeout auto\n  max-stall 600 s\n  on-stall dump\n" in capsys.readouterr().out
    assert command.main(["show", "my.yaml", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["watchdog"] == {"stall-timeout": "auto", "max-stall": 600.0, "on-stall": "dump"}
    assert document["env"] == []
    write(tmp_path, my="")
    assert command.main(["show", "my.yaml"]) == 0
    assert "It sets nothing." in capsys.readouterr().out


def test_presets_show_json_has_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--json", "show", "desync-detail"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["extends"] == ["hang-debug"]
    by_name = {entry["name"]: entry for entry in document["env"]}
    assert by_name["TORCH_DISTRIBUTED_DEBUG"]["from"] == "preset desync-detail"
    assert by_name["TORCH_FR_BUFFER_SIZE"] == {
        "name": "TORCH_FR_BUFFER_SIZE",
        "value": "2000",
        "why": by_name["TORCH_FR_BUFFER_SIZE"]["why"],
        "torch": ">=2.9",
        "yields-to": ["TORCH_NCCL_TRACE_BUFFER_SIZE"],
        "from": "preset hang-debug",
    }


@pytest.mark.parametrize(
    ("argv", "message", "fix"),
    [
        (["show"], "takes one name or file", "usage"),
        (["show", "a", "b"], "takes one name or file", "usage"),
        (["hang-debug"], "unexpected 'hang-debug'", "safelaunch presets show hang-debug"),
        (["shwo"], "unexpected 'shwo'", "usage"),
        (["--jsn"], "no option --jsn; did you mean '--json'?", "presets --help"),
        (["show", "hang-debg"], "unknown preset 'hang-debg'; did you mean 'hang-debug'?", "shipped"),
    ],
)
def test_presets_wrong_arguments_are_usage_errors(argv: list[str], message: str, fix: str) -> None:
    with pytest.raises(UsageError) as caught:
        command.main(argv)
    assert message in caught.value.message
    assert fix in caught.value.fix


def test_builtin_directory_has_shipped_presets() -> None:
    assert {path.stem for path in find_builtin_dir().glob("*.yaml")} == set(SHIPPED)
