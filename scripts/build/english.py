"""Finds phrases that a native technical writer would not use, and docstrings without form.

It reads comments, docstrings, test names and sentences in string literals of safelaunch/, tests/ and scripts/, and the
prose of README.md and docs/. The number of findings in each file can only fall: english.json holds what is left.

python -m scripts.build.english                # findings for each package and each pattern
python -m scripts.build.english PATH ...       # each finding in these files and folders
python -m scripts.build.english --check        # exit code 1 if a file has more findings than recorded
python -m scripts.build.english --record       # write english.json; refuses a larger sum
python -m scripts.build.english --record PATH ...   # the same, for these files and folders alone
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from scripts.build.python_source import Docstring, Function, PythonSource

ROOT = Path(__file__).resolve().parents[2]
RECORD = Path(__file__).with_suffix(".json")
CODE = ("safelaunch", "tests", "scripts")
PATTERN_FILES = {"scripts/build/english.py", "tests/unit/test_scripts_english.py"}  # they hold the patterns
FORM_RULES = ("D205",)  # ruff's rules that not all files satisfy yet; pyproject.toml ignores them
ALLOWED = "english: ok"

COMMENT, DOCSTRING, TEST_NAME, STRING, PAGE = "comment", "docstring", "test name", "string", "page"
EVERYWHERE = frozenset({COMMENT, DOCSTRING, TEST_NAME, STRING, PAGE})
CODE_PROSE = frozenset({COMMENT, DOCSTRING})


@dataclass(frozen=True, order=True)
class Finding:
    file: str
    line: int
    pattern: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.pattern}: {self.text}"


@dataclass(frozen=True)
class Passage:
    """Text to be checked, and where it begins."""

    kind: str
    line: int
    text: str
    literal: tuple[str, ...] = ()
    """source lines of a string literal, in which its own line breaks say nothing"""


@dataclass(frozen=True)
class Pattern:
    name: str
    regex: re.Pattern[str]
    kinds: frozenset[str] = EVERYWHERE


def _pattern(name: str, regex: str, kinds: frozenset[str] = EVERYWHERE) -> Pattern:
    return Pattern(name, re.compile(regex), kinds)


# Passages are matched in one line, in which only blank lines, list items and headings begin with a line break.
_CLAUSE = r"(?:^|[\n.;:(] ?)"
_PEOPLE = (
    "anyone",
    "engineer",
    "engineers",
    "people",
    "person",
    "reader",
    "readers",
    "someone",
    "user",
    "users",
    "user X,",
)
_NO_PERSON = "".join(f"(?<!\\b{noun} )" for noun in _PEOPLE)
_PLACES = (
    "call",
    "code",
    "container",
    "directory",
    "file",
    "folder",
    "host",
    "line",
    "log",
    "loop",
    "node",
    "page",
    "pod",
)
_NO_PLACE = "".join(f"(?<!\\b{noun})" for noun in _PLACES)
_INNER = r"(?<!, )(?<!\()(?<!None )(?<!mpty )(?<!to )\b"
_ADJECTIVES = (
    "alike|alive|alone|asked|asleep|called|dead|empty|equal|found|given|heard|held|kept|known|like|made|meant|newest|not|"
    "oldest|retired|said|seen|silent|stopped|told|unknown|unseen|used"
)
PATTERNS = (
    _pattern("who for a thing", rf"(?i){_NO_PERSON}\b(?:who|whom|whoever|somebody|nobody|everybody)\b"),
    _pattern("who for a thing", r"(?i)\b(?:no one|someone|everyone)\b(?! of)", EVERYWHERE - {PAGE}),
    _pattern("where for if", rf"{_NO_PLACE}[,;(–—] ?where\b"),
    _pattern("where for if", r"\b(?:None|[Ee]mpty|[Zz]ero|0|False|True) where\b"),
    _pattern("where for if", rf"{_CLAUSE}Where\b[^.?!\n:]*,"),
    _pattern(
        "where for if",
        rf"{_INNER}where (?:there (?:is|are|was|were)|it (?:can|could|cannot|has)\b)",
    ),
    _pattern("where for if", rf"{_INNER}where (?:possible|needed|necessary|none|nothing|no|nobody|one is)\b"),
    _pattern("may", r"\bmay\b(?= [a-z])", CODE_PROSE),
    _pattern("anew", r"(?i)\banew\b"),
    _pattern("beside", r"(?i)\bbeside\b"),
    _pattern(
        "behind",
        r"\bbehind\b(?= [\w`'])(?! (?:and|because|by|if|in|on|only|or|when|(?:its|their|the|most|all) (?:peer|other)))",
    ),
    _pattern("meanwhile", r"(?i)\bmeanwhile\b"),
    _pattern("for ever", r"(?i)\bfor ever\b"),
    _pattern("alike", r"(?i)\balike\b"),
    _pattern("of its own", r"(?i)\bof (?:its|their|our) own\b"),
    _pattern("that of", r"(?i)\bthat of\b"),
    _pattern("those of", r"(?i)\bthose of\b"),
    _pattern("of those", r"(?i)\bof those\b"),
    _pattern("is told", r"(?i)\b(?:is|are|was|were|be|been|being) (?:never |not |once )?told\b(?! (?:apart|to)\b)"),
    _pattern("tells of", r"(?i)\b(?:tells?|told|tell(?:ing)?) of\b"),
    _pattern("heard of", r"(?i)\b(?:heard|hears?) (?:of|from)\b"),
    _pattern("is none", r"\b(?:(?<!f there )(?:is|are|was|were) none\b(?! of)|[nN]one (?:has|was)\b|none is\b)"),
    _pattern("goes on", r"\b(?:goes|go|went|gone) on\b(?! (?:the|a|an|one|stderr|stdout|its|that|this|top)\b)"),
    _pattern("stands among", r"(?i)\b(?:stands?|stood) among\b"),
    _pattern("gets on", r"(?i)\b(?:gets?|got) on\b(?! (?:the|a|an|top)\b)"),
    _pattern("own doing", r"(?i)\bown (?:doing|account)\b"),
    _pattern("at the begin", r"(?i)\bat the begin\b"),
    _pattern("in turns", r"(?i)\bin turns\b"),
    _pattern("again and again", r"(?i)\bagain and again\b"),
    _pattern("parted", r"(?i)\b(?:parted|(?:ranks|they|histories|processes) part)\b"),
    _pattern("in sight", r"(?i)\bin sight\b"),
    _pattern("in one order", r"(?i)\bin one order\b"),
    _pattern("not over", r"(?i)\b(?:is|are|was|were) not over\b"),
    _pattern("call of c10d", r"(?i)\bcalls? of c10d\b"),
    _pattern("key of the store", r"(?i)\bkeys? (?:\S+ )?of the store\b"),
    _pattern("that is --option", r"\bthat is --\w"),
    _pattern("--option counts", r"--[\w-]+(?: \([^)]*\))? counts\b"),
    _pattern("the one of", r"(?i)\bthe one of\b"),
    _pattern("fronted of", rf"{_CLAUSE}Of (?!course\b)", frozenset({COMMENT, STRING, PAGE})),
    _pattern(
        "docstring start",
        r"(?i)^(?:of|by(?! default\b)|as|for|without|what|who|whom|whose|whoever|where|whether|which|why|those)\b",
        frozenset({DOCSTRING}),
    ),
    _pattern(
        "docstring adjective",
        rf"(?i)^(?:{_ADJECTIVES})\b(?! (?!(?:of|by|as|if|for|to|in|at|that|where|when|only)\b))",
        frozenset({DOCSTRING}),
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "paths", nargs="*", type=Path, metavar="PATH", help="list the findings in these files and folders"
    )
    parser.add_argument("--check", action="store_true", help="fail if a file has more findings than recorded")
    parser.add_argument("--record", action="store_true", help="write english.json")
    arguments = parser.parse_args()
    paths = checked_files(ROOT, [path.resolve() for path in arguments.paths])
    findings = find(ROOT, paths)
    if arguments.record:
        return record(ROOT, RECORD, paths, findings)
    if arguments.check:
        return check(RECORD, findings)
    if arguments.paths:
        print(*findings, f"{len(findings)} findings in {len(paths)} files", sep="\n")
    else:
        summarize(findings)
    return 0


def checked_files(root: Path, within: Sequence[Path] = ()) -> list[Path]:
    """Returns the files that are checked, or those of them that ``within`` names or holds."""
    pages = [root / "README.md", *(root / "docs").rglob("*.md")]
    code = chain.from_iterable((root / folder).rglob("*.py") for folder in CODE)
    files = (path for path in (*pages, *code) if path.relative_to(root).as_posix() not in PATTERN_FILES)
    return sorted(path for path in files if not within or any(path.is_relative_to(other) for other in within))


def find(root: Path, paths: Sequence[Path]) -> list[Finding]:
    """Returns the findings in these files, sorted."""
    findings = list(_form_findings(root, paths))
    for path in paths:
        findings += findings_in(path.relative_to(root).as_posix(), path.read_text())
    return sorted(findings)


def findings_in(file: str, text: str) -> Iterator[Finding]:
    """Yields the findings in the text of one file, without ruff's."""
    lines = text.splitlines()
    if file.endswith(".md"):
        found = _matches(file, [Passage(PAGE, 1, _without_code(text))])
    else:
        source = PythonSource(text, file)
        found = chain(_matches(file, _passages(file, source, lines)), _docstring_findings(file, source))
    yield from (finding for finding in found if ALLOWED not in lines[finding.line - 1])


def counts(findings: Iterable[Finding]) -> dict[str, int]:
    return dict(Counter(finding.file for finding in findings))


def check(recorded: Path, findings: Sequence[Finding]) -> int:
    before: dict[str, int] = json.loads(recorded.read_text())
    risen = {file: count for file, count in counts(findings).items() if count > before.get(file, 0)}
    for file, count in risen.items():
        print(f"english: {file} has {count} findings, {before.get(file, 0)} were recorded:", file=sys.stderr)
        print(*(f"  {finding}" for finding in findings if finding.file == file), sep="\n", file=sys.stderr)
    return 1 if risen else 0


def record(root: Path, recorded: Path, paths: Sequence[Path], findings: Sequence[Finding]) -> int:
    before: dict[str, int] = json.loads(recorded.read_text()) if recorded.exists() else {}
    read = {path.relative_to(root).as_posix() for path in paths}
    kept = {file: count for file, count in before.items() if file not in read and (root / file).exists()}
    now = kept | counts(findings)
    if before and sum(now.values()) > sum(before.values()):
        print(f"english: {sum(now.values())} findings, {sum(before.values())} were recorded", file=sys.stderr)
        return 1
    recorded.write_text(json.dumps(now, indent=0, sort_keys=True) + "\n")
    return 0


def summarize(findings: Sequence[Finding]) -> None:
    packages = Counter(_package(finding.file) for finding in findings)
    patterns = Counter(finding.pattern for finding in findings)
    for title, counted in (("package", packages), ("pattern", patterns)):
        print(f"{title:<28} findings")
        for name, count in counted.most_common():
            print(f"{name:<28} {count:>8}")
        print()
    words = sum(PythonSource(path.read_text()).words for path in (ROOT / "safelaunch").rglob("*.py"))
    print(f"{'all':<28} {len(findings):>8}")
    print(f"words of comments and docstrings in safelaunch/: {words}")


def _package(file: str) -> str:
    parts = file.split("/")[:-1]
    depth = 3 if parts[:2] == ["safelaunch", "addons"] else 2
    return "/".join(parts[:depth]) or file


def _passages(file: str, source: PythonSource, lines: Sequence[str]) -> Iterator[Passage]:
    for comment in source.comments:
        yield Passage(COMMENT, comment.line, _without_quotes(_without_code(comment.text)))
    for docstring in source.docstrings:
        yield Passage(DOCSTRING, docstring.line, _without_quotes(_without_code(docstring.text)))
    if file.startswith("tests/"):
        for function in source.functions:
            if function.name.startswith("test_"):
                yield Passage(TEST_NAME, function.lineno, function.name.removeprefix("test_").replace("_", " "))
    for node, text in _strings(source.tree):
        if _is_prose(text):
            literal = tuple(lines[node.lineno - 1 : node.end_lineno])
            yield Passage(STRING, node.lineno, _PLACEHOLDER.sub("X", _without_code(text)), literal)


def _strings(tree: ast.Module) -> Iterator[tuple[ast.expr, str]]:
    """Yields the string literals that aren't docstrings; an X stands for each value in an f-string."""
    statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.JoinedStr):
            yield node, "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
            waiting += [part for part in node.values if not isinstance(part, ast.Constant)]
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in statements:
            yield node, node.value
        waiting += ast.iter_child_nodes(node)


_PLACEHOLDER = re.compile(r"\{\w*\}")
_FOUR_WORDS = re.compile(r"(?:(?<![\w-])[A-Za-z][A-Za-z'’-]*[,;:.]? ){3}[A-Za-z]")
_REGEX_OR_CODE = re.compile(
    r"\\[bdswB]|\(\?[:=!<P]|\.\*|\[\^|^\s*(?:import|from \S+ import|def|class|@|try:|#!)\b.*$|^\s*\w+ = |Traceback",
    re.MULTILINE,
)


def _is_prose(text: str) -> bool:
    return _FOUR_WORDS.search(text) is not None and _REGEX_OR_CODE.search(text) is None


_FENCED = re.compile(r"(?ms)^[ \t]*(```|~~~).*?^[ \t]*\1[ \t]*$|<!--.*?-->")
_CODE_OR_URL = re.compile(r"(?::\w+:)?(`{1,2})[^`]+?\1|https?://\S+|(?<=\])\([^)\s]*\)")
_QUOTED = re.compile(r'"[^"\n]{1,120}"|“[^”]{1,120}”')


def _without_code(text: str) -> str:
    """Returns the text with an X for each piece of code, and as many lines."""
    text = _FENCED.sub(lambda match: "\n" * match[0].count("\n"), text)
    return _CODE_OR_URL.sub(lambda match: "X" + "\n" * match[0].count("\n"), text)


def _without_quotes(text: str) -> str:
    return _QUOTED.sub("X", text)


_ITEM = re.compile(r"(?:[-*#|>]|\d+\.) ")


def _joined(text: str) -> tuple[str, list[int]]:
    """Returns the text with a blank for most line breaks, and the offset of each of its lines."""
    joined, offsets = "", []
    for number, line in enumerate(text.split("\n")):
        content = line.strip()
        begins = not content or _ITEM.match(content)
        joined += ("\n" if begins else " ") if number else ""
        offsets.append(len(joined))
        joined += _ITEM.sub("", content, count=1)
    return joined, offsets


def _matches(file: str, passages: Iterable[Passage]) -> Iterator[Finding]:
    for passage in passages:
        joined, offsets = _joined(passage.text)
        for pattern in PATTERNS:
            if passage.kind not in pattern.kinds:
                continue
            for match in pattern.regex.finditer(joined):
                yield Finding(file, _line(passage, match, offsets), pattern.name, _excerpt(joined, match))


def _line(passage: Passage, match: re.Match[str], offsets: Sequence[int]) -> int:
    for number, line in enumerate(passage.literal):
        if match[0].strip(" \n.;:(") in line:
            return passage.line + number
    return passage.line if passage.literal else passage.line + bisect_right(offsets, match.end() - 1) - 1


def _excerpt(text: str, match: re.Match[str]) -> str:
    return " ".join(text[max(0, match.start() - 30) : match.end() + 40].split())


def _docstring_findings(file: str, source: PythonSource) -> Iterator[Finding]:
    for docstring in source.short_private_docstrings():
        yield Finding(file, docstring.line, "private docstring", " ".join(docstring.text.split())[:70])
    for docstring in source.docstrings:
        for match in _undocumented_arguments(docstring):
            line = docstring.line + docstring.text.count("\n", 0, match.start(1))
            yield Finding(file, line, "undocumented Args", " ".join(docstring.text[match.start(1) :].split())[:70])


def _undocumented_arguments(docstring: Docstring) -> Iterator[re.Match[str]]:
    """Yields each ``name``: that explains an argument or a field outside a list of them."""
    names = _names(docstring)
    for match in (
        re.finditer(r"(?:^|[.;)]\s+|\n\s*)(`{1,2})([\w.*]+)\1(?:\s[\w.]+)?:(?=\s)", docstring.text) if names else ()
    ):
        if match[2].strip("*") in names:
            yield match


def _names(docstring: Docstring) -> set[str]:
    owner = docstring.owner
    if isinstance(owner, Function):
        return _arguments(owner)
    if isinstance(owner, ast.ClassDef):
        fields = {
            node.target.id
            for node in owner.body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        }
        inits = (node for node in owner.body if isinstance(node, Function) and node.name == "__init__")
        return fields.union(*map(_arguments, inits))
    return set()


def _arguments(function: Function) -> set[str]:
    words = function.args
    every = (*words.posonlyargs, *words.args, *words.kwonlyargs, words.vararg, words.kwarg)
    return {argument.arg for argument in every if argument is not None}


def _form_findings(root: Path, paths: Sequence[Path]) -> Iterator[Finding]:
    """Yields what ruff finds by the rules that not all files satisfy yet."""
    code = [str(path) for path in paths if path.suffix == ".py"]
    if not code:
        return
    ruff = [str(Path(sys.executable).with_name("ruff")), "check", "--exit-zero", "--output-format=json"]
    run = subprocess.run(
        [*ruff, f"--select={','.join(FORM_RULES)}", *code], cwd=root, stdout=subprocess.PIPE, text=True, check=True
    )
    places: list[Mapping[str, object]] = json.loads(run.stdout)
    for place in places:
        file = Path(str(place["filename"])).relative_to(root).as_posix()
        row = place["location"]["row"]
        yield Finding(file, row, str(place["code"]), str(place["message"]))


if __name__ == "__main__":
    sys.exit(main())
