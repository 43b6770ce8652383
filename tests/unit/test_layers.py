"""Direction of imports between modules, and the modules that a job loads before it starts."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path

import pytest

import safelaunch

PACKAGE = Path(safelaunch.__file__).parent

# The floors, lowest first. A module imports only from lower floors, from packages of its floor that are listed before
# its own, and from its own. ``addons`` is the interface to the add-ons, which are above the core.
FLOORS = (
    (
        ("beacon", "what runs inside the ranks and the torchrun agent, and the probes"),
        ("safelaunch", "the public package: version, step(), phase(), pause(); the names of the API"),
    ),
    (
        ("addons", "the interface between the core and its add-ons"),
        ("system", "processes, NVML, the console, threads, deadlines, errors, secrets"),
        ("model", "records that travel between the packages, and the JSON Schemas of documents"),
        ("settings", "options, configuration files, presets"),
    ),
    (
        ("job", "command line, plan, start, signals and end; the guardian; the run directory"),
        ("leases", "holders of GPUs and ports"),
    ),
    (
        ("stacks", "the vocabulary of frames, calls, system calls and source lines (pure)"),
        ("verdict", "evidence to verdict (pure)"),
        ("capture", "one file per source of evidence"),
        ("report", "what a person reads, of a verdict or of a recording"),
        ("bundle", "assembled privately, published whole, read back"),
    ),
    (("supervise", "the loop over one job: stalls, crashes, incidents, nodes, live requests"),),
    (
        ("cli", "one file per subcommand, the Python API, the doctor, the demos"),
        ("__main__", "python -m safelaunch"),
    ),
    tuple((f"addons.{path.parent.name}", "an add-on") for path in sorted(PACKAGE.glob("addons/*/__init__.py"))),
)
ORDER = {name: number for number, (name, _) in enumerate(chain.from_iterable(FLOORS))}
# Parts of packages in order: within its package, each uses only itself and earlier parts.
PARTS = (
    "bundle.reading",
    "supervise.control",
    "supervise.cluster",
    "supervise.watch",
)
# Modules that take values and return values: no clock, no process, no file, no environment.
PURE = {"model.*", "stacks.*", "verdict.*", "report.*", "supervise.watch.*", "job.argv", "leases.choose"}
PURE |= {
    f"supervise.cluster.{name}"
    for name in ("rendezvous", "messages", "codec", "exchange", "evidence", "merge", "election", "leader")
}
PURE |= {
    f"addons.sweep.{name}" for name in ("jobs", "spec", "sweep", "lineup", "position", "engine", "scheduler", "view")
}
PURE |= {
    f"addons.reproduce.{name}"
    for name in (
        "families",
        "fewer_ranks",
        "fold",
        "gloo",
        "hang",
        "program",
        "programs",
        "rank_expressions",
        "recorded",
    )
}
PURE |= {f"addons.reproduce.{name}" for name in ("script_verdict", "tensor_sizes", "text")}
PURE |= {
    f"addons.record.{name}"
    for name in ("comparison", "document", "page", "recording", "rows", "screen", "shares", "slowness", "speedscope")
}
PURE |= {"addons.consistency.compare", "addons.consistency.wire"}
PURE |= {f"addons.slow.{name}" for name in ("arrivals", "late_rank", "step_times")}
PURE |= {"cli.doctor_rules"}
READS_THE_CLOCK = {"report.page", "addons.record.page", "report.sentences"}
# Add-ons that import another one, which can't be deleted without them.
ADDONS_THAT_USE_OTHERS = {("addons.slow", "addons.record")}  # the samples that show the line
IMPURE = {"os", "subprocess", "time", "socket", "threading", "shutil"}
# Scripts that hang on purpose and run as jobs, programs that torchrun runs, and code in the job's interpreter.
NOT_OURS = ("cli/demos/", "job/launcher/", "supervise/cluster/store_program.py")
# Third-party modules, and the modules that can import them.
THIRD_PARTY = {
    "torch": {"beacon.server", "beacon.rank", "addons.embed.launching", "addons.embed.request", "beacon.probes"},
    "yaml": {"settings.yamlfile"},
    "msgspec": {f"{name}.*" for name in ("model", "system", "capture", "stacks", "verdict", "report", "bundle")}
    | {f"{name}.*" for name in ("supervise", "cli", "addons")}
    | {"leases.format"},
    "pynvml": {"leases.inventory", "capture.gpu"},
    "rich": {"report.screen", "cli.*", "addons.*"},
    "tomli": {"settings.yamlfile", "settings.config"},
}


@dataclass(frozen=True)
class Import:
    """Import of ``module`` by ``by``."""

    by: str
    module: str
    ours: bool
    late: bool
    typing: bool = False


def modules() -> dict[str, Path]:
    """Returns paths by dotted name below safelaunch (``capture.proc``); the package itself is ``safelaunch``."""
    paths = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        inside = path.relative_to(PACKAGE)
        if not inside.as_posix().startswith(NOT_OURS):
            parts = [*inside.parts[:-1], *([] if inside.stem == "__init__" else [inside.stem])]
            paths[".".join(parts) or "safelaunch"] = path
    return paths


MODULES = modules()


def imports_of(name: str) -> Iterator[Import]:
    tree = ast.parse(MODULES[name].read_text("utf-8"))
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    inside = {id(node) for outer in ast.walk(tree) if isinstance(outer, functions) for node in ast.walk(outer)}
    for_types = {id(node) for outer in ast.walk(tree) if is_type_checking(outer) for node in ast.walk(outer)}
    for node in ast.walk(tree):
        when = (id(node) in inside | for_types, id(node) in for_types)
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield resolved(name, alias.name, *when)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = name.split(".") if MODULES[name].stem == "__init__" else name.split(".")[:-1]
                package = [part for part in package if part != "safelaunch"]
                above = package[: len(package) - (node.level - 1)]
                base = ".".join(["safelaunch", *above, *([base] if base else [])])
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                yield resolved(name, whole if whole.removeprefix("safelaunch.") in MODULES else base, *when)


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def resolved(by: str, module: str, late: bool, typing: bool) -> Import:
    if module == "safelaunch" or module.startswith("safelaunch."):
        return Import(by, module.removeprefix("safelaunch.") or "safelaunch", True, late, typing)
    return Import(by, module.partition(".")[0], False, late, typing)


@cache
def all_imports() -> list[Import]:
    return [imported for name in MODULES for imported in imports_of(name)]


def within(name: str, group: set[str]) -> bool:
    return name in group or any(
        name == item[:-2] or name.startswith(item[:-1]) for item in group if item.endswith(".*")
    )


def top(name: str) -> str:
    """Returns the package of a module; each add-on counts as one."""
    return ".".join(name.split(".")[: 2 if is_addon(name) else 1])


@cache
def probes() -> frozenset[str]:
    """Returns modules of add-ons that ranks load: each ``probe``, and the modules of its add-on that it uses."""
    names: set[str] = set()
    new = {name for name in MODULES if name.startswith("addons.") and name.endswith(".probe")}
    while new:
        names |= new
        new = {i.module for i in all_imports() if i.by in new and i.module.startswith("addons.")} - names
    return frozenset(names)


def in_ranks() -> set[str]:
    return {"beacon.*", *probes()}


def layer(name: str) -> int:
    return ORDER.get(top(name), -1)


def test_import_parser_finds_known_imports() -> None:
    """Otherwise the tests below could pass without finding anything."""
    pairs = {(imported.by, imported.module) for imported in all_imports()}
    assert {
        ("supervise.watch.stall", "dataclasses"),
        ("capture.pages", "beacon.layout"),
        ("cli.run", "job.plan"),
    } <= pairs
    assert {
        ("beacon.rank", "beacon.marks"),
        ("settings.yamlfile", "yaml"),
        ("supervise.watch.progress", "supervise.watch.stall"),
    } <= pairs
    assert Import("supervise.run", "supervise.loop", ours=True, late=True) in all_imports()
    assert len(MODULES) > 50


def test_every_package_has_layer() -> None:
    assert {top(name) for name in MODULES} == ORDER.keys()


def is_addon(name: str) -> bool:
    return name.startswith("addons.") and name != "addons.protocols"


def is_typing(imported: Import) -> bool:
    """Returns whether only a type checker reads it: for the protocols, and for the names of the public package."""
    return imported.typing and imported.by in ("addons.protocols", "addons", "safelaunch")


def test_imports_point_to_lower_layers() -> None:
    upward = {(i.by, i.module) for i in all_imports() if i.ours and layer(i.module) > layer(i.by) and not is_typing(i)}
    assert not upward


def test_core_imports_no_addon() -> None:
    assert not [i for i in all_imports() if is_addon(i.module) and not is_addon(i.by) and not is_typing(i)]


def test_core_names_no_addon_module() -> None:
    names = "|".join(name.removeprefix("addons.") for name in ORDER if is_addon(name)) or "(?!)"
    path = re.compile(rf"\baddons[./](?:{names})\b")
    naming = {
        name
        for name in MODULES
        if not is_addon(name) and name != "addons"
        for node in ast.walk(ast.parse(MODULES[name].read_text("utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and path.search(node.value)
    }
    assert not naming - {"addons.protocols"}, "the last names a protocol within an add-on"


def test_addons_import_each_other_only_as_declared() -> None:
    pairs = {(top(i.by), top(i.module)) for i in all_imports() if is_addon(i.by) and is_addon(i.module)}
    present = {top(name) for name in MODULES}
    assert {pair for pair in pairs if pair[0] != pair[1]} == {
        p for p in ADDONS_THAT_USE_OTHERS if present.issuperset(p)
    }


def test_core_tests_import_no_addon() -> None:
    """The tests also pass without the add-ons (``scripts/build/without_addons.py``)."""
    here, importing = Path(__file__).parent, re.compile(r"^\s*(?:from|import) safelaunch\.addons\.(?!protocols)", re.M)
    tests = [*here.glob("*.py"), *here.parent.glob("support/*.py")]
    assert not [path.name for path in tests if importing.search(path.read_text("utf-8"))]


def test_command_line_is_imported_by_no_other_package() -> None:
    users = {i.by for i in all_imports() if i.ours and within(i.module, {"cli.*"}) and not within(i.by, {"cli.*"})}
    core = {name for name in users if not name.startswith("addons.")}
    assert core == {"__main__", "safelaunch"}, "the latter names the API, as above"


def test_package_part_does_not_import_its_package() -> None:
    def part(name: str) -> str:
        return ".".join(name.split(".")[:2])

    inner = {(i.by, i.module) for i in all_imports() if part(i.by) in PARTS and top(i.module) == top(i.by)}
    assert not [(by, module) for by, module in inner if part(module) not in PARTS[: PARTS.index(part(by)) + 1]]


def test_rank_code_imports_only_itself_and_standard_library() -> None:
    """The code runs in interpreters without safelaunch, and uses torch only if the script has loaded it."""
    assert (
        probes()
        == {f"addons.consistency.{name}" for name in ("probe", "replicas", "fingerprints", "layout")} & MODULES.keys()
    )
    for imported in all_imports():
        if not within(imported.by, in_ranks()):
            continue
        if imported.ours:
            assert within(imported.module, in_ranks()), imported
        elif imported.module == "torch":
            assert imported.late, imported
        else:
            assert imported.module in sys.stdlib_module_names or imported.module == "sitecustomize", imported


def test_probe_uses_relative_imports() -> None:
    """A rank loads it under another name (see ``beacon.addon_probes``)."""
    absolute = [
        node
        for name in probes()
        for node in ast.walk(ast.parse(MODULES[name].read_text("utf-8")))
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").startswith("safelaunch")
    ]
    assert absolute == []


def test_sitecustomize_imports_nothing_before_role_is_known() -> None:
    early = {i.module for i in all_imports() if i.by == "beacon.inject.sitecustomize" and not i.late}
    assert early == {"os", "sys", "sitecustomize"}, "os and sys are there already"


def test_public_package_imports_no_other_module() -> None:
    """``import safelaunch`` is cheap in a training script."""
    public = [i for i in all_imports() if i.by == "safelaunch" and not i.late]
    assert not [i for i in public if i.ours or i.module not in sys.stdlib_module_names]


def test_third_party_modules_are_imported_only_where_allowed() -> None:
    used = {(i.by, i.module) for i in all_imports() if not i.ours and i.module in THIRD_PARTY}
    assert not {(by, module) for by, module in used if not within(by, THIRD_PARTY[module])}


def test_third_party_modules_are_all_declared() -> None:
    foreign = {(i.by, i.module) for i in all_imports() if not i.ours and i.module not in sys.stdlib_module_names}
    declared = {*THIRD_PARTY, "sitecustomize", "typing_extensions", "tomllib", "_safelaunch_beacon"}
    assert not {(by, module) for by, module in foreign if module not in declared}


def rebound_globals(name: str) -> Iterator[str]:
    """Yields rebound globals: own ones (``global``), or attributes of names imported from safelaunch."""
    tree = ast.parse(MODULES[name].read_text("utf-8"))
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if node.level or (node.module or "").startswith("safelaunch")
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield f"{name}:{node.lineno} global {', '.join(node.names)}"
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) in imported:
            yield f"{name}:{node.lineno} {ast.unparse(node)}"


def test_modules_outside_beacon_rebind_no_global() -> None:
    assert len([*rebound_globals("beacon.marks"), *rebound_globals("beacon.rank")]) == 6, "it sees both kinds"
    assert not [rebound for name in MODULES if not within(name, in_ranks()) for rebound in rebound_globals(name)]


def test_supervisor_never_imports_torch() -> None:
    beside = {
        "beacon.*",
        "addons.embed.launching",
        "addons.embed.request",
    }  # in the ranks, and in the process that starts them
    assert {i.by for i in all_imports() if i.module == "torch"} <= {n for n in MODULES if within(n, beside)}
    assert {i.by for i in all_imports() if i.module == "addons.embed.launching"} == {"safelaunch"}, "for type checkers"


def test_pure_modules_import_nothing_impure() -> None:
    pure = {name for name in MODULES if within(name, PURE)} - READS_THE_CLOCK
    assert len(pure) > 60
    assert not {(i.by, i.module) for i in all_imports() if i.by in pure and i.module in IMPURE}


# --- modules that mention an add-on -----------------------------------------------------------------------------------

# Outside their add-on: the options, what the verdict says of their findings, the exit code, the names in documents, and
# the public ``safelaunch.probes``, in which ``check_consistent`` compares tensors at the user's request.
MENTION_THE_CHECKS = {"beacon.probes", "cli.help", "model.evidence", "settings.options", "verdict.causes"}
OTHER_MEANINGS = (
    r"\(\?:inconsistent \)\?collective",  # torch's message about calls that don't match
    r"are consistent with calls",
    r"CHECK_EVERY_CALL",  # torch's own checks
)


def test_core_modules_that_mention_consistency_checks_are_declared() -> None:
    words = re.compile(r"consisten|check[-_ ]every|on[-_]inconsistent", re.IGNORECASE)
    meant = {name: re.sub("|".join(OTHER_MEANINGS), "", path.read_text("utf-8")) for name, path in MODULES.items()}
    users = {name for name, text in meant.items() if words.search(text)} - {"addons"}  # whose table names it
    others = {name for name in users if not name.startswith("addons.consistency")}
    assert others == MENTION_THE_CHECKS, "use another word, or add the phrase to OTHER_MEANINGS"


# --- imports before the job starts ------------------------------------------------------------------------------------

HEAVY = {
    "torch",
    "yaml",
    "msgspec",
    "rich",
    "pynvml",
    "numpy",
    "subprocess",
    "argparse",
}
REPORT = """
import atexit, os, sys
def report():
    with open(os.environ["SEEN"], "w") as file:
        file.write("\\n".join(sys.modules))
{when}
"""
AT_EXIT = "atexit.register(report)"
AT_START = """
def start(*args, **kwargs):
    report()
    os._exit(0)
os.execve = start
"""


def seen_by(tmp_path: Path, when: str, *words: str) -> set[str]:
    """Returns the modules that ``safelaunch WORDS`` had imported at its end, or when it starts its job."""
    (tmp_path / "watching.py").write_text(REPORT.format(when=when))
    (tmp_path / "script.py").write_text("")
    code = "import sys, watching; sys.argv[0] = 'safelaunch'; from safelaunch.cli import main; sys.exit(main())"
    environ = {key: value for key, value in os.environ.items() if not key.startswith("SAFELAUNCH_")}
    environ |= {"SEEN": os.fspath(tmp_path / "seen"), "PYTHONPATH": os.fspath(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    pairs = {line.partition(".")[0] for line in (tmp_path / "seen").read_text().splitlines()}
    assert "safelaunch" in pairs
    return pairs


def test_dry_run_without_presets_imports_nothing_heavy(tmp_path: Path) -> None:
    assert not seen_by(tmp_path, AT_EXIT, "--dry-run", "--nproc-per-node", "2", "script.py") & HEAVY


@pytest.mark.parametrize(
    "words", [["--help"], ["help"], ["--nproc-per-node=2", "-h"], ["completion", "bash"], ["explain", "busy-loop"]]
)
def test_help_imports_nothing_heavy(tmp_path: Path, words: list[str]) -> None:
    allowed = {"completion": {"argparse"}, "explain": {"argparse", "msgspec"}}.get(words[0], set())
    assert not seen_by(tmp_path, AT_EXIT, *words) & (HEAVY - allowed)


@pytest.mark.parametrize(
    "own", [[], ["--no-watch"], ["--stall-timeout", "60"]], ids=["watched", "unwatched", "options"]
)
def test_run_imports_nothing_heavy_before_job_start(tmp_path: Path, own: list[str]) -> None:
    assert not seen_by(tmp_path, AT_START, *own, "script.py") & HEAVY


def test_unit_test_files_are_named_after_packages() -> None:
    here = Path(__file__).parent
    names = [path.stem.split("_")[1] for path in here.glob("test_*.py")]
    assert set(names) - {"layers", "scripts"} <= ORDER.keys()
    of_addons = {(path.parent.name, path.stem.split("_")[1]) for path in here.glob("addons/*/test_*.py")}
    assert all(folder == name and f"addons.{name}" in ORDER for folder, name in of_addons)
