"""Find torch's DDP tests by reading their source, so that none can be forgotten.

Of `distributed_test`, a test belongs here when it, or a helper it calls, names
`DistributedDataParallel`; of `ddp_under_dist_autograd_test`, every test that is not for CUDA. That
is decided on the syntax tree of the installed file: nothing is imported, because importing torch's
tests changes global torch state that the pytest process should keep.

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

FOLDER = Path(torch.__file__).parent / "testing" / "_internal" / "distributed"
SOURCE = FOLDER / "distributed_test.py"
RPC_SOURCE = FOLDER / "ddp_under_dist_autograd_test.py"
TEST_CLASS = "_DistTestBase"
WANTED = "DistributedDataParallel"
DEFAULT_WORLD_SIZE = 2
# Decorators whose argument is the number of ranks that a test cannot do without.
SIZE_DECORATORS = {"skip_if_lt_x_gpu", "require_world_size", "require_exact_world_size"}


@dataclass(frozen=True)
class TorchTest:
    """One test method of torch's, and the number of ranks to run it with.

    Attributes:
        name: the method.
        world_size: how many ranks; the tests over RPC say it themselves, then it is 0.
        test_class: the class that has the method.
    """

    name: str
    world_size: int
    test_class: str = TEST_CLASS


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


@cache
def collect_rpc() -> dict[str, TorchTest]:
    """Return torch's tests of DDP under distributed autograd by name, those for CUDA left out."""
    tree = ast.parse(RPC_SOURCE.read_text())
    return {
        name: TorchTest(name, 0, test_class.name)
        for test_class in tree.body
        if isinstance(test_class, ast.ClassDef) and not test_class.name.startswith("Cuda")
        for name in _methods_of(test_class)
        if name.startswith("test_")
    }


def _methods(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    classes = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    return _methods_of(next(node for node in classes if node.name == TEST_CLASS))


def _methods_of(test_class: ast.ClassDef) -> dict[str, ast.FunctionDef]:
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
