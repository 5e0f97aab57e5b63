"""Find torch's DDP tests by reading their source, so that none can be forgotten.

A test belongs here when it, or a helper it calls, names `DistributedDataParallel`. That is decided
on the syntax tree of the installed file: nothing is imported, because importing torch's tests
changes global torch state that the pytest process should keep.

The file's other test classes (`TestBucketCapacityConfig…`) never name the class: they check a
private torch dataclass with no DDP in it, and so are not collected.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

SOURCE = (
    Path(torch.__file__).parent / "testing" / "_internal" / "distributed" / "distributed_test.py"
)
TEST_CLASS = "_DistTestBase"
WANTED = "DistributedDataParallel"
DEFAULT_WORLD_SIZE = 2
# Decorators whose argument is the number of ranks that a test cannot do without.
SIZE_DECORATORS = {"skip_if_lt_x_gpu", "require_world_size", "require_exact_world_size"}


@dataclass(frozen=True)
class TorchTest:
    """One test method of torch's file, and the number of ranks to run it with."""

    name: str
    world_size: int


@cache
def collect() -> dict[str, TorchTest]:
    """Return torch's DDP tests by name, in the order of the file."""
    methods = _methods(ast.parse(SOURCE.read_text()))
    names = {name: _names_used(node) for name, node in methods.items()}
    return {
        name: TorchTest(name, _world_size(node))
        for name, node in methods.items()
        if name.startswith("test_") and WANTED in _reachable(name, names)
    }


def _methods(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    classes = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    test_class = next(node for node in classes if node.name == TEST_CLASS)
    return {node.name: node for node in test_class.body if isinstance(node, ast.FunctionDef)}


def _names_used(node: ast.FunctionDef) -> set[str]:
    """Return every bare name and attribute in a method, `self._helper` and the class among them."""
    bare = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    return bare | {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)}


def _reachable(start: str, names: dict[str, set[str]]) -> set[str]:
    """Return the names used by a method and by all helpers it leads to."""
    reached: set[str] = set()
    pending = [start]
    while pending:
        new = names.get(pending.pop(), set()) - reached
        reached |= new
        pending.extend(new)
    return reached


def _world_size(node: ast.FunctionDef) -> int:
    return max(DEFAULT_WORLD_SIZE, *_sizes_asked(node), 0)


def _sizes_asked(node: ast.FunctionDef) -> Iterator[int]:
    for decorator in node.decorator_list:
        match decorator:
            case ast.Call(func=ast.Name(id=name), args=[ast.Constant(value=int(size))]) if (
                name in SIZE_DECORATORS
            ):
                yield size
