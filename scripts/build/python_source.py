"""Reads the code lines, comments and docstrings of Python source."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

SHORT_LINES = 6  # code lines up to which a private function needs no docstring
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_PRAGMA = re.compile(r"#\s*(?:noqa|type: ?ignore|ruff:|fmt:|pragma:|!|english: ok).*")

Function = ast.FunctionDef | ast.AsyncFunctionDef
Owner = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Comment:
    """Comment lines that follow each other, without their number signs."""

    line: int
    text: str


@dataclass(frozen=True)
class Docstring:
    """Docstring of a module, class or function, or the string under a field."""

    line: int
    end_line: int
    text: str
    owner: Owner | None = None
    """definition that it belongs to; None for a field"""


class PythonSource:
    """Source of one module."""

    def __init__(self, text: str, file: str = "<string>") -> None:
        self.tree = ast.parse(text, file)
        self._tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))

    @cached_property
    def docstrings(self) -> tuple[Docstring, ...]:
        return tuple(self._docstrings())

    @cached_property
    def comments(self) -> tuple[Comment, ...]:
        return tuple(self._comments())

    @cached_property
    def code_lines(self) -> frozenset[int]:
        """Numbers of the lines that hold code."""
        prose = {line for docstring in self.docstrings for line in range(docstring.line, docstring.end_line + 1)}
        code = {
            line
            for token in self._tokens
            if token.type not in _NO_CODE
            for line in range(token.start[0], token.end[0] + 1)
        }
        return frozenset(code - prose)

    @property
    def words(self) -> int:
        """Words of all comments and docstrings."""
        return sum(len(text.text.split()) for text in (*self.docstrings, *self.comments))

    @cached_property
    def functions(self) -> tuple[Function, ...]:
        return tuple(node for node in ast.walk(self.tree) if isinstance(node, Function))

    def length(self, function: Function) -> int:
        """Returns the number of code lines of a function."""
        return sum(line in self.code_lines for line in range(function.lineno, (function.end_lineno or 0) + 1))

    def short_private_docstrings(self) -> Iterator[Docstring]:
        """Yields the docstrings of private functions that are short enough for a name to say it all."""
        for docstring in self.docstrings:
            owner = docstring.owner
            if isinstance(owner, Function) and is_private(owner.name) and self.length(owner) <= SHORT_LINES:
                yield docstring

    def _docstrings(self) -> Iterator[Docstring]:
        owners = {id(node.body[0]): node for node in ast.walk(self.tree) if isinstance(node, Owner) and node.body}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                text = node.value.value
                if isinstance(text, str):
                    yield Docstring(node.lineno, node.end_lineno or node.lineno, text, owners.get(id(node)))

    def _comments(self) -> Iterator[Comment]:
        block: list[str] = []
        last = 0
        for token in self._tokens:
            if token.type != tokenize.COMMENT or _PRAGMA.fullmatch(token.string):
                continue
            line, text = token.start[0], token.string.lstrip("#").strip()
            alone = not token.line[: token.start[1]].strip()
            if block and not (alone and line == last + 1):
                yield Comment(last - len(block) + 1, "\n".join(block))
                block = []
            block.append(text)
            last = line
        if block:
            yield Comment(last - len(block) + 1, "\n".join(block))


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))
