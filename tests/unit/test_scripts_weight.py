"""Figures that the weight check counts."""

from __future__ import annotations

from pathlib import Path

from scripts.build.python_source import PythonSource  # type: ignore[import-not-found]
from scripts.build.weight import Module, read_modules, record_types, shared_names  # type: ignore[import-not-found]

MODULE = '''"""A module.

Of two paragraphs.
"""

# why
X = """text
of the program
"""


def f(
    one: int,  # a remark
) -> int:
    """What it does."""
    return one
'''


def test_code_lines_leave_out_docstrings_comments_and_blank_lines() -> None:
    assert PythonSource(MODULE).code_lines == {7, 8, 9, 12, 13, 14, 16}


def test_words_count_comments_and_docstrings() -> None:
    assert PythonSource(MODULE).words == 2 + 3 + 1 + 2 + 3


def test_docstring_counts_only_on_short_private_function() -> None:
    short = 'def _f():\n    """Short."""\n    x = 1\n'
    assert [docstring.text for docstring in PythonSource(short).short_private_docstrings()] == ["Short."]
    assert not list(PythonSource(short + "    x = 2\n" * 5).short_private_docstrings())
    assert not list(PythonSource(short.replace("_f", "f")).short_private_docstrings())
    assert not list(PythonSource(short.replace("_f", "__f__")).short_private_docstrings())


def test_name_is_shared_if_two_modules_define_it() -> None:
    modules = [
        Module("safelaunch.a", PythonSource("class _Line: ...\nclass Own: ...\nMarks = dict[str, int]\nLIMIT = a | b")),
        Module("safelaunch.b", PythonSource("class Line: ...\nMarks: TypeAlias = int | str\nLIMIT = a | b")),
        Module("safelaunch.c", PythonSource("Own = a.Own\nLine = None")),
        Module("safelaunch.cli.demos.d", PythonSource("class Own: ...")),
    ]
    assert shared_names(modules) == {
        "Line": ["safelaunch.a", "safelaunch.b"],
        "Marks": ["safelaunch.a", "safelaunch.b"],
    }


def test_record_types_are_dataclasses_tuples_dicts_and_structs() -> None:
    modules = [
        Module("a", PythonSource("@dataclass(frozen=True)\nclass A: ...\nclass B(NamedTuple): ...\nclass C(B2): ...")),
        Module("b", PythonSource("class B2(msgspec.Struct, frozen=True): ...\nclass D(Protocol): ...")),
        Module("c", PythonSource("@dataclasses.dataclass\nclass E: ...\nclass F(TypedDict): ...\nclass G(A): ...")),
    ]
    assert {name for _, name in record_types(modules)} == {"A", "B", "B2", "C", "E", "F"}


def test_imports_name_modules_of_the_package(tmp_path: Path) -> None:
    package = tmp_path / "product"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "a.py").write_text("import os\nfrom product import b\nfrom product.b import B")
    (package / "b.py").write_text("class B: ...")
    assert {module.name: set(module.imports) for module in read_modules(package)} == {
        "product": set(),
        "product.a": {"product.b"},
        "product.b": set(),
    }
