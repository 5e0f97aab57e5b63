"""Who calls a module, as its docstring says, does import it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.docs.hops import SOURCE
from tests.test_layers import imported_modules

FILES = sorted(SOURCE.rglob("*.py"))
# "Called by x.py and by y.py", up to the end of the sentence.
VERBS = "Called|Driven|Imported|Made|Opened|Owned|Owned and called|Read|Started|Used"
SENTENCE = re.compile(rf"(?:^|(?<=\. ))(?:{VERBS})\b[^.;:]*? by (.*?)(?:[.;:] |\.$|$)")
# There a clause begins about those who get it from the caller, or about what the caller does.
CLAUSE = re.compile(
    r", (?:which|with|always|used by|asked by|fed by|carried out|\w* ?read by|and by tests)\b"
    r"| through "
)
NAME = re.compile(r":(?:mod|class):`~?paceline\.([\w.]+)`|((?:[\w-]+/)*\w+)\.py\b")
# Called by way of something else.
INDIRECT = {
    "elastic/checkpoint/reader.py": "saved_state.py reads for state.py",
    "elastic/hosts/places.py": "membership.py asks roster.py",
    "elastic/stand_in.py": "started as a program",
    "elastic/supervised/supervisor.py": "started as a program",
    "elastic/unblock.py": "the client has a function of the session",
}


def callers_named(docstring: str) -> list[str]:
    """The modules that are named as callers, as they are written."""
    flat = " ".join(docstring.split())
    clauses = [CLAUSE.split(sentence)[0] for sentence in SENTENCE.findall(flat)]
    return ["".join(found) for clause in clauses for found in NAME.findall(clause)]


def find_module(name: str, folder: Path) -> Path | None:
    """The file or package that a docstring in a folder means; the class at the end is left out."""
    room = SOURCE.joinpath(*folder.relative_to(SOURCE).parts[:1])
    parts = name.replace(".", "/")
    for base in (folder, room, SOURCE):
        for path in (base / f"{parts}.py", base / parts):
            if path.exists():
                return path
    return find_module(name.rpartition(".")[0], folder) if "." in name else None


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def imports_of(path: Path) -> set[str]:
    package = module_name(path.parent / "__init__.py")
    return set(imported_modules(ast.parse(path.read_text()), package))


def uses(caller: Path, module: str) -> bool:
    """Whether a file imports a module, names it for a process, or imports what its package has."""
    imported = imports_of(caller)
    if any(name == module or name.startswith(f"{module}.") for name in imported):
        return True
    package, _, last = module.rpartition(".")
    init = SOURCE.parent.joinpath(*package.split("."), "__init__.py")
    again = imports_of(init) if init.exists() else set()
    exported = {name.rpartition(".")[2] for name in again if name.startswith(f"{module}.")}
    return f"from {module} import" in caller.read_text() or any(
        f"{package}.{name}" in imported for name in exported - {last}
    )


def wrong_callers(path: Path) -> list[str]:
    """The callers that a module names, and that do not know it."""
    wrong = []
    for name in callers_named(ast.get_docstring(ast.parse(path.read_text())) or ""):
        found = find_module(name, path.parent)
        callers = [] if found is None else [found] if found.is_file() else found.rglob("*.py")
        if not any(uses(caller, module_name(path)) for caller in callers):
            wrong.append(name)
    return wrong


def test_callers_import_what_they_call() -> None:
    found = {str(path.relative_to(SOURCE)): wrong_callers(path) for path in FILES}
    wrong = {path: names for path, names in found.items() if names}
    assert not {path: names for path, names in wrong.items() if path not in INDIRECT}


@pytest.mark.parametrize(
    ("docstring", "named"),
    [
        ("What.\n\nCalled by finish.py and\nhandover.py.", ["finish", "handover"]),
        ("What.\n\nMade by :mod:`paceline.ddp.wrapper`, used by loop.py.", ["ddp.wrapper"]),
        ("What. Called by ``ps/state/store.py``; both end in answer.c.", ["ps/state/store"]),
        ("What. It is called by nobody.py.", []),
    ],
)
def test_what_counts_as_a_caller(docstring: str, named: list[str]) -> None:
    assert callers_named(docstring) == named


def test_one_that_drifted_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "loop.py").write_text("from paceline import other\n")
    called = tmp_path / "called.py"
    called.write_text('"""What.\n\nCalled by loop.py.\n"""\n')
    monkeypatch.setattr(f"{__name__}.SOURCE", tmp_path)
    assert wrong_callers(called) == ["loop"]
    (tmp_path / "loop.py").write_text(f"from {tmp_path.name} import called\n")
    assert wrong_callers(called) == []
