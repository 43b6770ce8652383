"""Makes or diagnoses a corpus inside one checkout of the product. ``compare_verdicts.py`` runs this script.

    python verdict_corpus.py make FOLDER COUNT SEED [PYTEST ARGUMENT ...]
    python verdict_corpus.py diagnose FOLDER FILE

``PYTHONPATH`` selects the checkout. Evidence is stored as msgpack of plain data, so that each version reads it into its
own records, wherever they are defined. As a pytest plugin, this module saves what the unit tests diagnose: each test's
evidence, and each folder of dumps that it writes.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
import os
import pkgutil
import random
import runpy
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

import safelaunch

ROOT = Path(safelaunch.__file__).resolve().parents[1]  # the checkout's, not this script's
UNIT = ROOT / "tests" / "unit"
sys.path[:0] = [
    str(ROOT),
    str(UNIT),
]  # the helpers are in tests.support, or in tests/unit
FOLDER = "SAFELAUNCH_VERDICT_CORPUS"
KINDS = ("stop", "skip", "extra", "swap", "shape", "op", "group")
VARIANTS = ("plain", "no stacks", "sends", "window", "sends, no stacks", "window, no stacks", "polled", "nccl2")
TRIES = 50


class Case(msgspec.Struct, omit_defaults=True):
    """One job. ``sources`` are the source files that its verdict can read."""

    name: str
    evidence: Any
    sources: dict[str, str | None] = {}


def main() -> int:
    verb, *words = sys.argv[1:]
    if verb == "make":
        return make(Path(words[0]), int(words[1]), int(words[2]), words[3:])
    return diagnose_all(Path(words[0]), Path(words[1]))


# --- the corpus -------------------------------------------------------------------------------------------------------


def make(folder: Path, count: int, seed: int, pytest_arguments: Sequence[str]) -> int:
    """Makes ``synthetic/`` (generated jobs), ``unit-tests/`` and ``dumps/`` (the input of the tests that it runs)."""
    for name, _, evidence in synthetic_jobs(count, seed):
        write(folder / "synthetic", Case(name, evidence))
    if not pytest_arguments:
        return 0
    import pytest

    os.environ[FOLDER] = str(folder)
    os.chdir(ROOT)
    return int(pytest.main(["-q", "-p", "no:cacheprovider", "-p", "verdict_corpus", *pytest_arguments]))


def synthetic_jobs(count: int, seed: int) -> Iterator[tuple[str, frozenset[int], Any]]:
    """Generates jobs, as name, ranks at fault and evidence. The name begins with the kind of fault.

    Each layout of up to 512 ranks equally often, with a random fault, call and variant.
    """
    synthetic = helper("synthetic")

    more = ("MORE_KINDS", "SIDE_KINDS")  # an older checkout has none
    kinds = [*KINDS, *(kind for name in more for kind in getattr(synthetic, name, ()))]
    given = VARIANTS if len(kinds) > len(KINDS) else VARIANTS[:6]
    dice = random.Random(seed)
    sizes = itertools.product((1, 2, 3, 4, 8, 16), (1, 2, 3, 4, 8), (1, 2, 3, 4))
    layouts = [synthetic.Layout(*size) for size in sizes if size != (1, 1, 1)]
    queue: list[Any] = []
    for number in range(count):
        if not queue:
            queue = dice.sample(layouts, len(layouts))
        layout = queue.pop()
        variants = given if layout.pipeline > 1 else [name for name in given if "sends" not in name]
        kind, variant = kinds[number % len(kinds)], dice.choice(variants)
        found = hanging(layout, kind, variant, dice)
        if found is not None:
            size = f"{layout.data}x{layout.tensor}x{layout.pipeline}"
            yield f"{kind}, {size}, {variant}: {number:04d}", *found


def hanging(layout: Any, kind: str, variant: str, dice: random.Random) -> tuple[frozenset[int], Any] | None:
    """Returns the ranks at fault, and a job that a fault of this kind hangs.

    None if there is none (a group with one call, for example).
    """
    synthetic = helper("synthetic")
    schedule, inject, play = synthetic.schedule, synthetic.inject, synthetic.play
    Fault, evidence_of = synthetic.Fault, synthetic.evidence_of

    if kind in getattr(synthetic, "SIDE_KINDS", ()):
        return synthetic.threaded(layout, kind, dice)  # type: ignore[no-any-return]
    for _ in range(TRIES):
        programs = schedule(layout, dice.randint(4, 12), dice.randint(1, 3), sends="sends" in variant)
        rank = dice.randrange(layout.world)
        fault = Fault(kind, rank, dice.randrange(len(programs[rank]) - 1))
        if kind not in KINDS:
            planted = synthetic.plant(layout, programs, fault, dice)
        else:
            one = inject(programs, fault)
            planted = (one, frozenset([rank])) if one is not None else None
        rest = planted and play(layout, planted[0])
        if not planted or not rest or not any(waits for _, waits in rest.values()):
            continue
        window = windows(dice) if "window" in variant else lambda rank: 2000
        other = {"polled": {"polled": True}, "nccl2": {"backend": "nccl2"}}.get(variant, {})
        seen = "no stacks" not in variant
        return planted[1], evidence_of(layout, planted[0], rest, window=window, stacks=seen, **other)
    return None


def windows(dice: random.Random) -> Callable[[int], int]:
    """Returns a function from rank to ring size, so that each rank's ring wraps at a different point."""
    shortest, spread = dice.randint(2, 30), dice.randint(0, 8)
    return lambda rank: shortest + (rank * 7919) % (spread + 1)


def write(folder: Path, case: Case) -> None:
    """Writes one file per case. Skips evidence that it has written before."""
    folder.mkdir(parents=True, exist_ok=True)
    data = msgspec.msgpack.encode(case, enc_hook=tuple)  # one of the product's own sequence types
    content = msgspec.msgpack.encode([case.evidence, case.sources], enc_hook=tuple)
    digest = hashlib.sha256(content).hexdigest()[:16]
    if not any(folder.glob(f"*-{digest}.msgpack")):
        (folder / f"{len(list(folder.iterdir())):06d}-{digest}.msgpack").write_bytes(data)


def pytest_configure() -> None:
    """Makes ``diagnose`` and the writer of dumps save their input. Runs before any test module is imported."""
    folder = Path(os.environ[FOLDER])
    package = first_of("verdict.diagnose", "diagnose")
    package.diagnose = kept_evidence(package.diagnose, folder)  # type: ignore[attr-defined]
    formats = helper("nccl_formats")
    formats.write = kept_folder(formats.write, folder / "dumps")  # type: ignore[attr-defined]


def kept_evidence(diagnose: Callable[..., Any], folder: Path) -> Callable[..., Any]:
    def keep(evidence: Any, read_source: Any = None) -> Any:
        sources: dict[str, str | None] = {}

        def read(path: str) -> str | None:
            sources[path] = read_source(path)
            return sources[path]

        verdict = diagnose(evidence, read if read_source is not None else None)
        name = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
        write(folder / "unit-tests", Case(name, evidence, sources))
        return verdict

    return keep


def kept_folder(write_dumps: Callable[..., Path], folder: Path) -> Callable[..., Path]:
    numbers = itertools.count()

    def keep(*arguments: Any, **keywords: Any) -> Path:
        made = write_dumps(*arguments, **keywords)
        shutil.copytree(made, folder / f"{next(numbers):06d}")
        return made

    return keep


# --- verdicts ---------------------------------------------------------------------------------------------------------


def diagnose_all(folder: Path, results: Path) -> int:
    """Writes a line of JSON for each case and each path in ``paths.json``: its verdict or exception."""
    diagnose, evidence_type = find("diagnose", "verdict", "diagnose"), find("Evidence", "model")
    for name in ("cli.diagnose", "bundle.reading.locate", "postmortem.locate", "bundle.report", "session.sources"):
        with suppress(ImportError):  # imported here so that the forks need not
            importlib.import_module(f"safelaunch.{name}")
    with results.open("w") as file:

        def tell(corpus: str, name: str, outcome: dict[str, Any]) -> None:
            file.write(json.dumps({"corpus": corpus, "name": name, **outcome}) + "\n")

        tell("", "checkout", {"root": str(ROOT)})
        for path in sorted(folder.glob("*/*.msgpack")):
            case = msgspec.msgpack.decode(path.read_bytes(), type=Case)
            tell(path.parent.name, case.name, verdict_on(case, diagnose, evidence_type))
        for corpus, paths in json.loads((folder / "paths.json").read_text()).items():
            for name in paths:
                tell(corpus, name, verdict_on_path(name))
    return 0


def helper(name: str) -> Any:
    """Imports a module of helpers for tests."""
    try:
        return importlib.import_module(f"tests.support.{name}")
    except ModuleNotFoundError:
        return importlib.import_module(name)


def first_of(*modules: str) -> Any:
    """The first of these modules below safelaunch that this version has."""
    for name in modules:
        with suppress(ModuleNotFoundError):
            return importlib.import_module(f"safelaunch.{name}")
    raise SystemExit(f"{ROOT} has none of {', '.join(modules)}")


def find(name: str, *packages: str) -> Any:
    """Finds ``name`` in the first of ``packages`` that this version has, or in any module below it."""
    top = first_of(*packages)
    below = pkgutil.walk_packages(getattr(top, "__path__", ()), f"{top.__name__}.")
    for module in itertools.chain([top], (importlib.import_module(one.name) for one in below)):
        if callable(found := getattr(module, name, None)):
            return found
    raise SystemExit(f"{top.__name__} of {ROOT} has no {name}")


@cache
def names_of_sentences() -> dict[str, str]:
    """Returns the names of this version's doubts and advice, by their sentences, which other versions can reword."""
    names: dict[str, str] = {}
    causes: dict[str, Any] = {}
    package = first_of("verdict", "diagnose")
    for module in pkgutil.iter_modules(getattr(package, "__path__", ()), f"{package.__name__}."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if type(value).__name__ == "Advice":
                names.setdefault(value.shown, name)
            elif name == "Doubt":
                names |= {doubt.why: doubt.name for doubt in value}
            elif name == "CAUSES":
                causes = value
    for cause, entry in causes.items():
        # Advice that is only in the table is numbered by itself: a version that adds named advice shifts no number.
        unnamed = [piece.shown for piece in entry.advice if piece.shown not in names]
        names |= {text: f"{cause} {number}" for number, text in enumerate(unnamed)}
    return names


def with_names(verdict: dict[str, Any]) -> dict[str, Any]:
    """Adds the names of the verdict's doubts and suggestions. A sentence that belongs to no name stands for itself."""
    names = names_of_sentences()
    return verdict | {f"names of {key}": [names.get(text, text) for text in verdict[key]]
                      for key in ("doubts", "suggestions") if key in verdict}  # fmt: skip


def verdict_on(case: Case, diagnose: Callable[..., Any], evidence_type: type) -> dict[str, Any]:
    try:
        evidence = with_tuples(msgspec.convert(case.evidence, evidence_type, strict=True))
        read = case.sources.get if case.sources else None
        outcome = {"verdict": with_names(msgspec.to_builtins(diagnose(evidence, read)))}
    except Exception as error:  # noqa: BLE001 - that it raised is the outcome
        return {"raised": f"{type(error).__name__}: {error}"}
    if plain(evidence) != plain(case.evidence):
        outcome["lost"] = True  # this version does not have the field
    return outcome


def plain(value: Any) -> Any:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value))


def with_tuples(evidence: Any) -> Any:
    """Converts entries to tuples, as capture produces them. A list would make a record unhashable."""
    replace = msgspec.structs.replace
    ranks = []
    for rank in evidence.ranks:
        record = rank.flight_record
        if record is not None and isinstance(record.entries, list):
            rank = replace(rank, flight_record=replace(record, entries=tuple(record.entries)))
        ranks.append(rank)
    return replace(evidence, ranks=tuple(ranks))


def verdict_on_path(path: str) -> dict[str, Any]:
    """Returns what ``safelaunch diagnose PATH --json`` prints. A fork saves half a second over a new interpreter."""
    with tempfile.TemporaryFile() as out:
        child = os.fork()
        if child == 0:
            try:
                os.dup2(out.fileno(), 1)
                sys.argv = ["safelaunch", "diagnose", path, "--json"]
                runpy.run_module("safelaunch", run_name="__main__", alter_sys=True)
            except SystemExit as error:
                sys.stdout.flush()
                os._exit(error.code if isinstance(error.code, int) else 1)
            finally:
                os._exit(70)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        out.seek(0)
        data = out.read()
    if code not in (0, 1) or not data:
        return {"raised": f"exit code {code}"}
    return {"verdict": with_names(json.loads(data)), "exit": code}


if __name__ == "__main__":
    sys.exit(main())
