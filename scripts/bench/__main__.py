"""Runs one benchmark: ``python -m scripts.bench NAME``, or lists them."""

from __future__ import annotations

import ast
import runpy
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in ("__init__", "__main__", "lib"))


def main() -> int:
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in NAMES:
        for each in NAMES:
            summary = ast.get_docstring(ast.parse((FOLDER / f"{each}.py").read_text())) or ""
            print(f"{each:<16} {summary.splitlines()[0]}", file=sys.stderr if name else sys.stdout)
        return 2 if name.strip("-") not in ("", "h", "help", "list") else 0
    del sys.argv[1]
    runpy.run_module(f"scripts.bench.{name}", run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
