"""Prints how large the product is, next to the figures recorded in weight.json.

Code lines are lines without docstrings (also the strings under fields), comments and blank lines. A name has several
meanings if more than one module defines a class or a type alias with it; a leading underscore makes no difference.

python -m scripts.build.weight             # the table
python -m scripts.build.weight --names     # the names with several meanings, and the modules that define them
python -m scripts.build.weight --check     # exit code 1 if a figure has grown by more than 3 % since it was recorded
python -m scripts.build.weight --record    # write weight.json
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from scripts.build.python_source import PythonSource

ROOT = Path(__file__).resolve().parents[2]
RECORD = Path(__file__).with_suffix(".json")
PRODUCT = "safelaunch"
GROWTH = 1.03
LONG_FUNCTION = 40
DEMOS = "safelaunch.cli.demos"  # training scripts, whose names such as Model belong to the example
_CAMEL_CASE = re.compile(r"_*[A-Z][A-Za-z0-9]*[a-z][A-Za-z0-9]*")


@dataclass(frozen=True)
class Module:
    name: str
    source: PythonSource
    imports: frozenset[str] = frozenset()
    """dotted names of the product's modules that it imports"""

    @property
    def package(self) -> str:
        return self.name.split(".")[1] if "." in self.name else self.name

    @property
    def lines(self) -> int:
        return len(self.source.code_lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail if a figure has grown by more than 3 %%")
    parser.add_argument("--record", action="store_true", help="write weight.json")
    parser.add_argument("--names", action="store_true", help="list the names with several meanings")
    arguments = parser.parse_args()
    if arguments.names:
        for name, modules in sorted(shared_names(read_modules(ROOT / PRODUCT)).items()):
            print(f"{name:<20} {' '.join(modules)}")
        return 0
    figures = measure(ROOT)
    before = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    for name, value in figures.items():
        print(f"{name:<44} {value:>8g}   {before.get(name, '-'):>8}")
    if arguments.record:
        RECORD.write_text(json.dumps(figures, indent=2) + "\n")
    grown = [name for name, value in figures.items() if value > GROWTH * before.get(name, value)]
    for name in grown if arguments.check else ():
        print(
            f"weight: {name} has grown from {before[name]:g} to {figures[name]:g}: make it smaller, or record it "
            "with python -m scripts.build.weight --record and say why",
            file=sys.stderr,
        )
    return 1 if arguments.check and grown else 0


def measure(root: Path) -> dict[str, float]:
    modules = read_modules(root / PRODUCT)
    functions = [one.source.length(function) for one in modules for function in one.source.functions]
    packages = {one.package for one in modules if one.name.count(".") > 1}
    addons = sum(one.lines for one in modules if one.package == "addons")
    return {
        "code lines of the core": sum(one.lines for one in modules) - addons,
        "code lines of the add-ons": addons,
        "code lines of tests": sum(
            len(PythonSource(path.read_text()).code_lines) for path in (root / "tests").rglob("*.py")
        ),
        "modules": len(modules),
        "packages": len(packages),
        "import edges between packages": len({edge for edge in _edges(modules) if packages.issuperset(edge)}),
        "names with several meanings": len(shared_names(modules)),
        "record types": len(record_types(modules)),
        "median function": median(functions),
        "functions over 40 lines, %": round(100 * sum(size > LONG_FUNCTION for size in functions) / len(functions), 1),
        "words of comments and docstrings": sum(one.source.words for one in modules),
        "docstrings on short private functions": sum(
            len(list(one.source.short_private_docstrings())) for one in modules
        ),
        "words of documentation": sum(
            len(path.read_text().split()) for path in (root / "README.md", *(root / "docs").rglob("*.md"))
        ),
        "options": _options(root),
    }


def read_modules(package: Path) -> list[Module]:
    modules = []
    for path in sorted(package.rglob("*.py")):
        name = ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")
        modules.append(Module(name, PythonSource(path.read_text(), str(path))))
    names = {module.name for module in modules}
    return [Module(one.name, one.source, frozenset(_imports(one.source.tree, names))) for one in modules]


def shared_names(modules: Iterable[Module]) -> Mapping[str, list[str]]:
    """Returns the names of classes and type aliases that several modules define, with these modules."""
    definitions: dict[str, list[str]] = {}
    for module in modules:
        if not module.name.startswith(DEMOS):
            for name in {name.lstrip("_") for name in _type_names(module.source.tree)}:
                definitions.setdefault(name, []).append(module.name)
    return {name: places for name, places in definitions.items() if len(places) > 1}


def record_types(modules: Iterable[Module]) -> set[tuple[str, str]]:
    """Returns module and name of each dataclass, NamedTuple, TypedDict and msgspec Struct."""
    classes = [
        (module.name, node)
        for module in modules
        for node in ast.walk(module.source.tree)
        if isinstance(node, ast.ClassDef)
    ]
    bases = {"NamedTuple", "TypedDict", "Struct"}
    while more := {node.name for _, node in classes if bases.intersection(map(_last_name, node.bases))} - bases:
        bases |= more
    return {
        (module, node.name)
        for module, node in classes
        if node.name in bases or "dataclass" in map(_last_name, node.decorator_list)
    }


def _type_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name
    for node in tree.body:
        value = node.value if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(value, (ast.Subscript, ast.BinOp)) or _is_new_type(value):
            yield from (one.id for one in targets if isinstance(one, ast.Name) and _CAMEL_CASE.fullmatch(one.id))


def _is_new_type(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Call) and _last_name(value) == "NewType"


def _last_name(node: ast.expr) -> str:
    node = node.func if isinstance(node, ast.Call) else node
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _imports(tree: ast.Module, names: set[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in names)
        elif isinstance(node, ast.ImportFrom) and node.module in names:
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in names else node.module for name in inner)


def _edges(modules: list[Module]) -> Iterator[tuple[str, str]]:
    for one in modules:
        for name in one.imports:
            other = name.split(".")[1] if "." in name else name
            if other != one.package:
                yield one.package, other


def _options(root: Path) -> int:
    sys.path.insert(0, str(root))
    from safelaunch.settings import options

    return len(options.OWN_OPTIONS)


if __name__ == "__main__":
    sys.exit(main())
