"""A newcomer finds every room of the package in the tables, and each thing fits into a head."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.docs.hops import ROOT, SOURCE
from tests.test_layers import LAYERS

PARTS = sorted(path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists())
ROOMS = sorted(
    f"{path.relative_to(SOURCE)}/"
    for path in SOURCE.rglob("*")
    if path.is_dir() and any(path.glob("*.[pc]*")) and path.name != "__pycache__"
)
# Rooms without files of their own beside __init__.py: their rooms are listed instead.
ONLY_ROOMS = {"native/", "ps/", "shm/"}


@pytest.mark.parametrize("room", [room for room in ROOMS if room not in ONLY_ROOMS])
def test_contributing_lists_the_room(room: str) -> None:
    rows = re.findall(r"^\| (`.*?`) \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    assert room in listed, "add it to the table of rooms in CONTRIBUTING.md"


def drawn_layers() -> list[set[str]]:
    text = (ROOT / "docs" / "how-it-works.md").read_text()
    line = re.search(r"Imports point downwards only:(.*?)and the other single\s", text, re.DOTALL)
    assert line is not None
    return [set(re.findall(r"`(\w+)`", layer)) for layer in line[1].split("→")]


def test_how_it_works_lists_the_layers() -> None:
    *upper, _ = [{part for part in layer if part in PARTS} for layer in LAYERS]
    *drawn, lowest = drawn_layers()
    assert drawn == upper
    assert lowest <= LAYERS[-1]


@pytest.mark.parametrize("part", [part for part in PARTS if part != "testing"])
def test_which_file_to_open_leads_to(part: str) -> None:
    text = (ROOT / "docs" / "how-it-works.md").read_text()
    table = text.split("## Which file to open")[1].split("\n## ")[0]
    assert f"`{part}/" in table, "add a row to 'Which file to open' in docs/how-it-works.md"


# --- sizes ----------------------------------------------------------------------------------------

MOST_LINES = 400
MOST_STATEMENT_LINES = 60
MOST_METHODS = 25
MOST_FILES = 24
MOST_IN_TUPLE = 3

FILES = {
    str(path.relative_to(ROOT)): path.read_text()
    for room in ("src", "tests", "benchmarks", "examples")
    for path in sorted((ROOT / room).rglob("*"))
    if path.suffix in {".py", ".c", ".h"}
}
C = {name: text for name, text in FILES.items() if not name.endswith(".py")}
C_FUNCTION = re.compile(r"^\w.*\{\n(?:(?!\}).*\n)*\}", re.MULTILINE)
C_TUPLE = re.compile(r'Py_BuildValue\(\s*"\(?([^")]*)')


@functools.cache
def trees() -> dict[str, ast.Module]:
    return {name: ast.parse(text) for name, text in FILES.items() if name.endswith(".py")}


def long_functions(tree: ast.AST) -> Iterator[str]:
    """Only statements count: the arguments of torch's class and what they mean have to be said."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            statements = node.body[1:] if ast.get_docstring(node) is not None else node.body
            lines = (node.end_lineno or 0) - statements[0].lineno + 1 if statements else 0
            if lines > MOST_STATEMENT_LINES:
                yield f"{node.name} has {lines} lines"


def large_classes(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            methods = sum(isinstance(part, ast.FunctionDef) for part in node.body)
            if methods > MOST_METHODS:
                yield f"{node.name} has {methods} methods"


def long_tuples(tree: ast.AST) -> Iterator[str]:
    """Return types of public functions: more than three things have names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and node.returns:
            for part in ast.walk(node.returns):
                is_tuple = isinstance(part, ast.Subscript) and ast.unparse(part.value) == "tuple"
                parts = getattr(part.slice, "elts", []) if is_tuple else []
                if len(parts) > MOST_IN_TUPLE:
                    yield f"{node.name} returns {ast.unparse(part)}"


def test_files_are_small() -> None:
    lines = {name: len(text.splitlines()) for name, text in FILES.items()}
    assert not {name: count for name, count in lines.items() if count > MOST_LINES}


def test_folders_are_small() -> None:
    counts = Counter(name.rpartition("/")[0] for name in FILES)
    assert not {folder: count for folder, count in counts.items() if count > MOST_FILES}


def test_functions_are_small() -> None:
    assert not [
        f"{name}: {found}" for name, tree in trees().items() for found in long_functions(tree)
    ]


def test_classes_are_small() -> None:
    found = {name: list(large_classes(tree)) for name, tree in trees().items()}
    assert not {name: large for name, large in found.items() if large}


def test_tuples_are_small() -> None:
    ours = {name: tree for name, tree in trees().items() if name.startswith("src/")}
    found = {name: list(long_tuples(tree)) for name, tree in ours.items()}
    assert not {name: long for name, long in found.items() if long}


def test_functions_in_c_are_small() -> None:
    found = [(name, body) for name, text in C.items() for body in C_FUNCTION.findall(text)]
    assert len(found) > 100
    long = [(name, body) for name, body in found if body.count("\n") >= MOST_STATEMENT_LINES]
    assert not [f"{name}: {body.splitlines()[0]}" for name, body in long]


def test_tuples_from_c_are_small() -> None:
    """Struct sequences (native/group/records.c) or one packed layout instead."""
    found = [(name, form) for name, text in C.items() for form in C_TUPLE.findall(text)]
    assert found
    assert not [entry for entry in found if len(entry[1].replace("#", "")) > MOST_IN_TUPLE]


def test_what_is_too_large_is_seen() -> None:
    long = "def f():\n    'text'\n" + "    pass\n" * 61
    assert list(long_functions(ast.parse(long))) == ["f has 61 lines"]
    assert list(long_functions(ast.parse(long.removesuffix("    pass\n")))) == []
    methods = "".join(f"    def f{n}(self): ...\n" for n in range(26))
    assert list(large_classes(ast.parse("class A:\n" + methods))) == ["A has 26 methods"]
    tuples = "def f() -> list[tuple[int, int, int, str]]: ..."
    assert len(list(long_tuples(ast.parse(tuples)))) == 1
    body = "static int f(void) {\n" + "    g();\n" * 60 + "}\n"
    assert C_FUNCTION.findall(body)[0].count("\n") >= MOST_STATEMENT_LINES
    assert C_TUPLE.findall('Py_BuildValue("(NNy#N)", a)') == ["NNy#N"]
