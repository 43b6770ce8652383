"""A sweep as it is written: the file, the grid, placeholders, names and needs; and what is said about a wrong one."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from safelaunch.addons.sweep import spec
from safelaunch.addons.sweep.command import EPILOG
from safelaunch.addons.sweep.jobs import SweepJob
from safelaunch.addons.sweep.paths import SweepPaths
from safelaunch.addons.sweep.spec import (
    Template,
    TemplateText,
    axis,
    combinations,
    derive,
    expand,
    parse_grid,
    templates_of,
)
from safelaunch.settings.yamlfile import parse_yaml
from safelaunch.system.errors import UsageError
from tests.support.paths import ROOT

PATHS = SweepPaths(Path("/s"))


def jobs(text: str, metrics: tuple[str, ...] = ()) -> dict[str, SweepJob]:
    return {job.name: job for job in expand(templates_of(parse_yaml(text, "sweep.yaml"), metrics), PATHS, "/w")}


def error_of(text: str) -> UsageError:
    with pytest.raises(UsageError) as caught:
        jobs(text)
    return caught.value


def grid(*words: str, command: str = "train.py") -> tuple[SweepJob, ...]:
    axes = tuple(parse_grid(word) for word in words)
    texts = tuple(TemplateText(word, "the command line") for word in command.split())
    return expand([Template(SweepJob("", (), "the command line"), texts, axes)], PATHS, "/w")


# --- placeholders -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "fields", "filled"),
    [
        ("", set(), ""),
        ("plain", set(), "plain"),
        ("{lr}", {"lr"}, "1e-3"),
        ("--lr={lr},{seed}", {"lr", "seed"}, "--lr=1e-3,{lr}"),
        ('{{"a": {lr}}}', {"lr"}, '{"a": 1e-3}'),
        ("{{lr}}", set(), "{lr}"),
        ("{{{lr}}}", {"lr"}, "{1e-3}"),
        ("{{{{", set(), "{{"),
        ("{warm-up}", {"warm-up"}, "3"),
    ],
)
def test_placeholders_are_filled_in_once(text: str, fields: set[str], filled: str) -> None:
    """The value of seed is itself spelled like a placeholder: values are never looked into."""
    found = TemplateText(text, "here")
    assert found.fields() == fields
    assert found.fill({"lr": "1e-3", "seed": "{lr}", "warm-up": "3"}) == filled


@pytest.mark.parametrize("text", ["{", "}", "{lr", "lr}", "{1}", "{}", "{lr:3}", '{"a": 1}', "{{}", "{l r}"])
def test_single_brace_is_rejected_with_hint(text: str) -> None:
    with pytest.raises(UsageError, match=r"a single '[{}]' in") as caught:
        TemplateText(text, "sweep.yaml:3").fields()
    assert str(caught.value).startswith("sweep.yaml:3: ")
    assert "{{ and }}" in caught.value.fix


# --- the grid ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "name", "values"),
    [
        ("lr=1e-3,3e-4", "lr", ("1e-3", "3e-4")),
        ("seed=0..4", "seed", ("0", "1", "2", "3", "4")),
        ("seed=-1..1", "seed", ("-1", "0", "1")),
        ("seed=7", "seed", ("7",)),
        ("seed=5..5,9", "seed", ("5", "9")),
        ("path=a=b,../c", "path", ("a=b", "../c")),
        ("v=1.5..2", "v", ("1.5..2",)),
    ],
)
def test_grid_word_is_parsed_to_parameter_and_values(word: str, name: str, values: tuple[str, ...]) -> None:
    found = parse_grid(word)
    assert (found.name, found.values, found.where) == (name, values, f"--grid {word}")


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("lr", "expected NAME=VALUE"),
        ("lr=", "has no values"),
        ("=1", "cannot be a parameter's name"),
        ("1x=1", "cannot be a parameter's name"),
        ("lr=1,1", "'1' twice"),
        ("seed=4..0", "is empty"),
        ("seed=0..99999", "more than 10000 values"),
        ("seed=0..999999999999999999", "more than 10000 values"),
        ("name=a", "built-in placeholder"),
    ],
)
def test_invalid_grid_word_is_named(word: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        parse_grid(word)
    assert str(caught.value).startswith(f"--grid {word}: ")


def test_grid_gives_job_for_every_combination() -> None:
    found = grid("lr=1e-3,3e-4", "seed=0..1", command="--nproc-per-node=1 train.py --lr {lr} --seed {seed}")
    assert [job.name for job in found] == ["lr-1e-3_seed-0", "lr-1e-3_seed-1", "lr-3e-4_seed-0", "lr-3e-4_seed-1"]
    assert found[2].words == ("--nproc-per-node=1", "train.py", "--lr", "3e-4", "--seed", "0")
    assert found[2].params == (("lr", "3e-4"), ("seed", "0"))


def test_grid_without_parameter_gives_one_job() -> None:
    assert [job.name for job in grid(command="train.py")] == ["job"]


def test_unused_or_unknown_parameter_is_rejected() -> None:
    with pytest.raises(UsageError, match="--grid seed=0: the parameter 'seed' is not used"):
        grid("seed=0", command="train.py")
    with pytest.raises(UsageError, match=r"unknown placeholder \{sed\}.*did you mean 'seed'"):
        grid("seed=0", command="train.py {sed} {seed}")


def test_too_many_combinations_are_rejected_early() -> None:
    with pytest.raises(UsageError, match="1000000 combinations"):
        grid("a=0..99", "b=0..99", "c=0..99", command="t.py {a} {b} {c}")


# --- the file ---------------------------------------------------------------------------------------------------------

WHOLE = """
defaults:
  command: --nproc-per-node=2 train.py --lr {lr} --seed {seed}
  gpus: 2
  preset: [hang-debug, ./mine.yaml]
  env: {WANDB_NAME: "{name}", THREADS: 4}
  stall-timeout: 5m
  timeout: 2h
  retries: 1
  metric: val_loss=([0-9.]+)
matrix:
  lr: [1e-3, 3e-4]
  seed: 0..1
jobs:
  prepare:
    command: exec -- bash prepare.sh '{{a b}}'
    gpus: 0
    preset: []
  train: {needs: prepare, env: {THREADS: 8, OUT: "{job_dir}"}}
  report:
    command: [exec, --, python, report.py, "{sweep_dir}"]
    needs: [train, prepare]
    cwd: reports
"""


def test_complete_file_is_parsed() -> None:
    found = jobs(WHOLE)
    trained = ["train_lr-1e-3_seed-0", "train_lr-1e-3_seed-1", "train_lr-3e-4_seed-0", "train_lr-3e-4_seed-1"]
    assert list(found) == ["prepare", *trained, "report"]
    one = found["train_lr-3e-4_seed-0"]
    options = ("--preset", "hang-debug", "--preset", "./mine.yaml", "--stall-timeout", "5m")
    assert one.words == (*options, "--nproc-per-node=2", "train.py", "--lr", "3e-4", "--seed", "0")
    assert dict(one.env) == {
        "WANDB_NAME": "train_lr-3e-4_seed-0",
        "THREADS": "8",
        "OUT": "/s/jobs/train_lr-3e-4_seed-0",
    }
    assert (one.gpus, one.timeout_s, one.retries, one.needs) == (2, 7200.0, 1, ("prepare",))
    assert one.metrics == ("val_loss=([0-9.]+)",)
    assert found["prepare"].words == ("exec", "--stall-timeout", "5m", "--", "bash", "prepare.sh", "{a b}")
    assert found["prepare"].gpus == 0
    assert found["report"].needs == (*trained, "prepare")
    assert found["report"].cwd == "/w/reports"
    assert found["report"].words[-1] == "/s"


def test_arguments_begin_with_name_and_bundle_directory() -> None:
    found = jobs(WHOLE)
    assert found["prepare"].arguments("/b")[:6] == (
        "exec",
        "--run-name",
        "prepare",
        "--bundle-dir",
        "/b",
        "--stall-timeout",
    )
    one = found["train_lr-1e-3_seed-0"].arguments("/b")
    assert one[:4] == ("--run-name", "train_lr-1e-3_seed-0", "--bundle-dir", "/b")


PORTS = """
matrix: {p: [1, 2]}
jobs: {m: {ports: 2, command: 't.py {port2} {{port}} {p}', env: {TB: 'a{port}:{port}'}}}
"""


def test_ports_are_filled_in_once_known() -> None:
    one, other = jobs(PORTS).values()
    assert one.ports == 2 and one.fingerprint != other.fingerprint
    given = one.with_ports((20000, 20001))
    assert (given.words, given.env) == (("t.py", "20001", "{port}", "1"), (("TB", "a20000:20000"),))
    assert jobs(PORTS)[one.name].fingerprint == one.fingerprint != given.fingerprint, "resumed with other numbers"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("jobs: {m: {command: 't.py {port}'}}", "unknown placeholder {port}"),
        ("jobs: {m: {ports: 1, command: 't.py {port} {port2}'}}", "unknown placeholder {port2}"),
        ("jobs: {m: {ports: 2, command: 't.py {port}'}}", "the port {port2} is not used"),
        ("jobs: {m: {ports: 1, command: 't.py {port}', cwd: '{port}'}}", "unknown placeholder {port}"),
        ("{matrix: {port: 1}, jobs: {m: {ports: 1, command: 't.py {port}'}}}", "{port} is the name of a leased port"),
        ("jobs: {m: {ports: x, command: 't.py {port}'}}", "ports: 'x' is not a whole number"),
    ],
)
def test_invalid_ports_are_rejected(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        jobs(text)


def test_port_without_ports_is_ordinary_parameter() -> None:
    assert list(jobs("{matrix: {port: 1}, jobs: {m: {command: 't.py {port}'}}}")) == ["m_port-1"]


def test_file_with_matrix_and_defaults_is_enough() -> None:
    assert list(jobs("defaults: {command: 't.py {a}'}\nmatrix: {a: [x, y]}")) == ["a-x", "a-y"]


def test_values_keep_their_text() -> None:
    found = jobs("defaults: {command: 't.py {a}'}\nmatrix: {a: [1e-3, 010, 1.0, true, 'on', 1:30, 2024-01-01]}")
    assert [job.words[1] for job in found.values()] == ["1e-3", "010", "1.0", "true", "on", "1:30", "2024-01-01"]


def test_value_with_blanks_stays_one_word() -> None:
    found = jobs("defaults: {command: 't.py {a}'}\nmatrix: {a: ['x y']}")
    assert found["a-x-y"].words == ("t.py", "x y")


def test_metrics_of_command_line_apply_to_every_job() -> None:
    found = jobs("jobs: {a: {command: t.py, metric: 'x=(.)'}}", ("y=(.)",))
    assert found["a"].metrics == ("x=(.)", "y=(.)")


def test_fingerprint_ignores_limits() -> None:
    def of(text: str) -> str:
        return jobs(f"jobs: {{a: {text}}}")["a"].fingerprint

    plain = of("{command: t.py 1}")
    assert of("{command: t.py 1, timeout: 5, retries: 3, gpus: 2}") == plain
    for other in ("{command: t.py 2}", "{command: t.py 1, env: {A: 1}}", "{command: t.py 1, cwd: x}"):
        assert of(other) != plain


PAGE = ROOT / "docs" / "sweeps.md"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (re.findall(r"```yaml title=\S+\n(defaults:.*?)```", PAGE.read_text(), re.S)[0], 6),
        (textwrap.dedent(re.findall(r"^  defaults:.*?(?=^  more keys)", EPILOG, re.S | re.M)[0]), 11),
        (textwrap.dedent(re.findall(r"^    defaults:.*?(?=^Scalars)", spec.__doc__ or "", re.S | re.M)[0]), 11),
    ],
    ids=["docs", "help", "module"],
)
def test_documented_examples_are_valid(text: str, count: int) -> None:
    assert len(jobs(text)) == count


# --- names ------------------------------------------------------------------------------------------------------------


def test_job_names_are_distinct_file_names() -> None:
    found = jobs("{matrix: {p: [a/b, 'a b', ../c, 'é']}, jobs: {m: {command: 't.py {p}'}}}")
    names = list(found)
    assert len(set(names)) == 4
    assert all(name.isascii() and "/" not in name and len(name) <= 64 for name in names)
    assert names[0].startswith("m_p-a-b-") and names[1].startswith("m_p-a-b-")
    assert names[2] == "m_p-..-c"


def test_long_job_name_is_cut_and_stays_unique() -> None:
    values = ", ".join(f"{'x' * 80}{number}" for number in range(3))
    names = list(jobs(f"{{matrix: {{p: [{values}]}}, jobs: {{m: {{command: 't.py {{p}}'}}}}}}"))
    assert len(set(names)) == 3
    assert {len(name) for name in names} == {64}


def test_custom_job_name_is_used() -> None:
    found = jobs("{matrix: {a: [1, 2]}, jobs: {m: {name: 'run{a}', command: 't.py {a}'}}}")
    assert list(found) == ["run1", "run2"]


def test_job_names_are_derived_from_parameters() -> None:
    assert derive("", ()) == "job"
    assert derive("train", ()) == "train"
    assert derive("", (("lr", "-1"),)) == "lr--1"


# --- what is wrong ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "sweep.yaml:1: the file is empty"),
        ("jobs:\n  a: {comand: x}", "sweep.yaml:2: unknown key 'comand'; did you mean 'command'?"),
        ("job: {}", "sweep.yaml:1: unknown key 'job'; did you mean 'jobs'?"),
        ("defaults: {gpus: 1}", "both 'jobs' and a 'command'"),
        ("defaults: {name: x, command: y}", "sweep.yaml:1: unknown key 'name'"),
        ("jobs:\n  - command: x", "sweep.yaml:2: jobs must be a mapping"),
        ("jobs: {}", "'jobs' is empty"),
        ("jobs: {a: {gpus: 1}}", "the job 'a' has no 'command'"),
        ("jobs: {a: {command: ''}}", "command must be text, not empty"),
        ("jobs: {a: {command: []}}", "command is empty"),
        ('jobs: {a: {command: "x \'y"}}', "command: No closing quotation"),
        (
            "jobs:\n  a:\n    command: [t.py, {lr}]",
            "sweep.yaml:3: command: a value must be text or a number, not a mapping",
        ),
        ("jobs:\n  a:\n    command: t.py\n    gpus: two", "sweep.yaml:4: gpus: 'two' is not a whole number"),
        ("jobs:\n  a:\n    command: t.py\n    gpus: -1", "sweep.yaml:4: gpus: '-1' is not a whole number"),
        ("jobs: {a: {command: t.py, timeout: soon}}", "timeout: 'soon' is not a positive number"),
        ("jobs: {a: {command: t.py, stall-timeout: soon}}", "stall-timeout: 'soon' is not"),
        ("jobs: {a: {command: t.py, env: {A B: 1}}}", "not the name of an environment variable"),
        ("jobs: {a: {command: t.py, env: {SAFELAUNCH_X: 1}}}", "cannot be set here"),
        ("jobs: {a: {command: t.py, env: {A: yes}}}", "is a boolean"),
        ("jobs: {a: {command: t.py, env: {A: [1]}}}", "a value must be text or a number, not a list"),
        ("jobs: {a: {command: t.py, metric: '('}}", "is not a regular expression"),
        ("jobs: {a: {command: t.py, metric: 'loss'}}", "must begin with the metric's name"),
        ("jobs: {../a: {command: t.py}}", "'../a' cannot be a job's name"),
        ("jobs: {a: {command: t.py, name: 'x y'}}", "'x y' cannot be a job's name"),
        ("jobs: {a: {command: t.py, name: '{name}'}}", "unknown placeholder {name}"),
        ("jobs: {a: {command: t.py, name: B}, b: {command: t.py}}", "two jobs are called"),
        ("jobs: {a: {command: 't.py {b}'}}", "unknown placeholder {b}"),
        ("jobs:\n  a:\n    command: t.py\n    cwd: '{b}'", "sweep.yaml:4: unknown placeholder {b}"),
        (
            "jobs: {a: {command: t.py}}\nmatrix:\n  lr: [1]",
            "sweep.yaml:3: the parameter 'lr' is not used",
        ),
        ("{matrix: {lr: [1]}, jobs: {a: {command: t.py, name: 'a{lr}'}}}", "unknown placeholder {lr}"),
        ("jobs: {a: {command: t.py, needs: b}}", "needs: unknown job 'b'"),
        ("jobs: {abc: {command: t.py}, b: {command: t.py, needs: abd}}", "did you mean 'abc'?"),
        ("jobs: {a: {command: t.py, needs: a}}", "needs form a cycle: a -> a"),
        (
            "jobs: {a: {command: t.py, needs: c}, b: {command: t.py, needs: a}, c: {command: t.py, needs: b}}",
            "a -> c -> b -> a",
        ),
    ],
)
def test_invalid_file_is_reported_with_line(text: str, said: str) -> None:
    message = error_of(text).message
    assert said in message
    assert message.startswith("sweep.yaml:") or "no 'command'" in message


@pytest.mark.parametrize(
    ("matrix", "said"),
    [
        ("{a: []}", "'a' has no values"),
        ("{a: [1, 1]}", "'1' twice"),
        ("{a: [[1]]}", "a value must be text or a number, not a list"),
        ("{a: [~]}", "not nothing"),
        ("{job_dir: [1]}", "built-in placeholder"),
    ],
)
def test_invalid_matrix_is_rejected(matrix: str, said: str) -> None:
    assert said in error_of(f"{{matrix: {matrix}, jobs: {{j: {{command: 't.py {{a}}'}}}}}}").message


def test_needs_can_name_one_job_of_a_group() -> None:
    text = """
matrix: {s: 0..2}
jobs:
  train: {name: "train-{s}", command: "t.py {s}"}
  test: {name: "test-{s}", command: "e.py {s}", needs: "train-{s}"}
"""
    assert [jobs(text)[f"test-{seed}"].needs for seed in range(3)] == [("train-0",), ("train-1",), ("train-2",)]


def test_matrix_changes_first_parameter_slowest() -> None:
    axes = [axis("a", ["1", "2"], ""), axis("b", ["x", "y"], "")]
    assert [dict(params) for params in combinations(axes)] == [
        {"a": "1", "b": "x"},
        {"a": "1", "b": "y"},
        {"a": "2", "b": "x"},
        {"a": "2", "b": "y"},
    ]
