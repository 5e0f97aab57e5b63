"""The oldest Python that pyproject.toml names can read all of the package, and has what it imports.

Without that Python: its grammar is known to ``ast``, and names that came later are listed here.
What was really run with which Python is in docs/torch-versions.md.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("src", "tests", "examples", "benchmarks")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
OLDEST = (3, 10)

# Modules and names of the standard library that 3.10 does not have.
LATER_MODULES = {"tomllib", "annotationlib", "compression", "concurrent.interpreters"}
LATER_NAMES = {
    "asyncio": {"Barrier", "Runner", "TaskGroup", "timeout"},
    "contextlib": {"chdir"},
    "datetime": {"UTC"},
    "enum": {"EnumCheck", "EnumType", "FlagBoundary", "ReprEnum", "StrEnum", "member", "nonmember"},
    "hashlib": {"file_digest"},
    "inspect": {"BufferFlags", "getasyncgenstate", "markcoroutinefunction"},
    "itertools": {"batched"},
    "logging": {"getHandlerByName", "getLevelNamesMapping"},
    "math": {"cbrt", "exp2", "fma", "sumprod"},
    "operator": {"call", "is_none", "is_not_none"},
    "os": {"process_cpu_count", "unshare", "setns"},
    "sys": {"activate_stack_trampoline", "exception", "monitoring"},
    "threading": {"setprofile_all_threads", "settrace_all_threads"},
    "types": {"get_original_bases"},
    "typing": {
        "LiteralString", "Never", "NotRequired", "Required", "Self", "TypeAliasType",
        "TypeVarTuple", "Unpack", "assert_never", "assert_type", "dataclass_transform",
        "get_overloads", "override", "reveal_type",
    },
}  # fmt: skip
LATER_METHODS = {"add_note"}


def nodes_that_run(tree: ast.Module) -> Iterator[ast.AST]:
    """All but what only a type checker reads, or another Python runs."""
    left: list[ast.AST] = [tree]
    while left:
        node = left.pop()
        if isinstance(node, ast.If) and _is_guard(node.test):
            left += node.orelse
            continue
        yield node
        left += ast.iter_child_nodes(node)


def _is_guard(test: ast.expr) -> bool:
    return any(word in ast.unparse(test) for word in ("TYPE_CHECKING", "version_info", "hasattr"))


def later_names(path: Path) -> list[str]:
    found = []
    for node in nodes_that_run(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name in LATER_MODULES]
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module in LATER_MODULES:
                found.append(node.module)
            later = LATER_NAMES.get(node.module, set())
            found += [f"{node.module}.{alias.name}" for alias in node.names if alias.name in later]
        elif isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            if node.attr in LATER_NAMES.get(owner, set()) or node.attr in LATER_METHODS:
                found.append(f"{owner}.{node.attr}")
    return found


def test_it_is_the_oldest_that_is_promised() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert 'requires-python = ">=3.10"' in text
    assert 'target-version = "py310"' in text
    assert 'python_version = "3.10"' in text


def test_it_can_read_every_file() -> None:
    assert len(FILES) > 500
    for path in FILES:
        ast.parse(path.read_text(), str(path), feature_version=OLDEST)


def test_it_has_every_name_of_the_standard_library() -> None:
    found = {str(path.relative_to(ROOT)): later_names(path) for path in FILES}
    assert {name: later for name, later in found.items() if later} == {}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("from typing import Self", ["typing.Self"]),
        ("import enum\nclass A(enum.StrEnum): ...", ["enum.StrEnum"]),
        ("import tomllib", ["tomllib"]),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from typing import Self", []),
        ("import sys\nif sys.version_info >= (3, 11):\n    import tomllib", []),
        ("error.add_note('x')", ["error.add_note"]),
    ],
)
def test_a_later_name_would_be_found(text: str, expected: list[str], tmp_path: Path) -> None:
    (tmp_path / "file.py").write_text(text)
    assert later_names(tmp_path / "file.py") == expected


def test_later_grammar_would_be_found() -> None:
    for text in ("try: ...\nexcept* ValueError: ...", "type A = int", "def f[T](x: T) -> T: ..."):
        with pytest.raises(SyntaxError):
            ast.parse(text, feature_version=OLDEST)
