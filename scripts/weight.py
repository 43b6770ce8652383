"""Prints how large the product is, beside what weight.json says.

Code lines are without docstrings (those under a field, too), comments and blanks.

python scripts/weight.py             # the table
python scripts/weight.py --check     # exit code 1 if a figure has grown by more than 3 % since it was recorded
python scripts/weight.py --record    # write weight.json
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "weight.json"
PRODUCT = "safelaunch"
GROWTH = 1.03
LONG_FUNCTION, SMALL_MODULE = 40, 130
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


@dataclass(frozen=True)
class Module:
    """``lines``: the numbers of its code lines. ``imports``: modules of the product, in dotted names."""

    name: str
    tree: ast.Module
    lines: frozenset[int]
    imports: frozenset[str] = frozenset()

    @property
    def package(self) -> str:
        return self.name.split(".")[1] if "." in self.name else self.name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail if a figure has grown by more than 3 %%")
    parser.add_argument("--record", action="store_true", help="write weight.json")
    words = parser.parse_args()
    figures = measure(ROOT)
    before = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    for name, value in figures.items():
        print(f"{name:<44} {value:>8g}   {before.get(name, '-'):>8}")
    if words.record:
        RECORD.write_text(json.dumps(figures, indent=2) + "\n")
    grown = [name for name, value in figures.items() if value > GROWTH * before.get(name, value)]
    for name in grown if words.check else ():
        print(
            f"weight: {name} has grown from {before[name]:g} to {figures[name]:g}: make it smaller, or record it "
            "with scripts/weight.py --record and say why",
            file=sys.stderr,
        )
    return 1 if words.check and grown else 0


def measure(root: Path) -> dict[str, float]:
    modules = list(_modules(root / PRODUCT))
    functions = [size for one in modules for size in _functions(one)]
    importers = Counter(name for one in modules for name in one.imports)
    packages = {one.package for one in modules if one.name.count(".") > 1}
    return {
        "code lines": sum(len(one.lines) for one in modules),
        "code lines of tests": sum(len(code_lines(path.read_text())) for path in (root / "tests").rglob("*.py")),
        "modules": len(modules),
        "packages": len(packages),
        "import edges between packages": len({edge for edge in _edges(modules) if packages.issuperset(edge)}),
        "modules of one importer, below 130 lines": sum(
            importers[one.name] == 1 and len(one.lines) < SMALL_MODULE for one in modules
        ),
        "median function": median(functions),
        "functions over 40 lines, %": round(100 * sum(size > LONG_FUNCTION for size in functions) / len(functions), 1),
        "words of documentation": sum(
            len(path.read_text().split()) for path in (root / "README.md", *(root / "docs").rglob("*.md"))
        ),
        "options": _options(root),
    }


def code_lines(text: str) -> frozenset[int]:
    """The numbers of the lines that hold code."""
    tree = ast.parse(text)
    prose = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or 0) + 1)
    }
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    code = {line for one in tokens if one.type not in _NO_CODE for line in range(one.start[0], one.end[0] + 1)}
    return frozenset(code - prose)


def _modules(package: Path) -> Iterator[Module]:
    found = []
    for path in sorted(package.rglob("*.py")):
        name = ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")
        text = path.read_text()
        found.append(Module(name, ast.parse(text), code_lines(text)))
    names = {one.name for one in found}
    for one in found:
        yield Module(one.name, one.tree, one.lines, frozenset(_imports(one, names)))


def _imports(one: Module, names: set[str]) -> Iterator[str]:
    for node in ast.walk(one.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in names)
        elif isinstance(node, ast.ImportFrom) and node.module in names:
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in names else node.module for name in inner)


def _functions(one: Module) -> Iterator[int]:
    for node in ast.walk(one.tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield len(one.lines & set(range(node.lineno, (node.end_lineno or 0) + 1)))


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
