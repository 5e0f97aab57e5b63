"""Imports inside the package point downwards only (docs/how-it-works.md draws the layers)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "paceline"

# From the top down. A module may import from its own part and from lines below its own.
LAYERS = (
    {"cli", "integrations"},
    {"report"},
    {"elastic", "ps"},
    {"ddp", "dp", "nn"},
    {"hooks", "shards"},
    {"buckets"},
    {"transport"},
    {"shm"},
    {"liveness"},
    {"launch"},
    {"observe"},
    {"memory"},
    {"native"},
    {
        "config",
        "containers",
        "cores",
        "errors",
        "forks",
        "freed_memory",
        "gloo_threads",
        "on_use",
        "exit_reason",
        "printable",
        "processes",
        "thread_state",
        "torch_private",
        "types",
        "version",
    },
)
HEIGHT = {part: len(LAYERS) - level for level, parts in enumerate(LAYERS) for part in parts}
BOTTOM = LAYERS[-1]

# Beside the layers: what users' tests import may not depend on what it tests.
TESTING_MAY_IMPORT = {"errors", "exit_reason", "launch"}
# Entry points, which only hand on.
FREE = {"__init__", "__main__", "autoload"}


# Inside of a package, from the top down: rooms, and files by their names. Those of one line do not
# know each other. What is not listed (ps/__init__.py, ddp/wrapper.py) is above all rooms: they know
# its type at most. Where there is a line of OTHERS, it is there, and knows its like.
OTHERS = "*"
ROOMS = {
    "ps": (
        {"launch", "modules"},
        {"server", "client"},
        {"storage"},
        {"state"},
        {"protocol"},
    ),
    "shm": ({"backend"}, {"collectives"}, {"attach"}, {"diagnose"}, {"core"}),
    "ddp": ({"features"}, {"reduce"}, {"agree"}, {"autograd"}),
    "observe": ({"live", "launched"}, {"stall"}, {"recording"}, {"metrics"}, {OTHERS}),
    "report": ({"page"}, {"compare", "figures", "trace", "wording"}, {"analysis"}, {OTHERS}),
    "launch": ({"job"}, {"local_ranks", "server_process"}, {OTHERS}),
    "cli": ({"demo"}, {"demo_training"}, {"bench"}, {OTHERS}),
    "cli/bench": ({"elastic", "hybrid"}, {"harness"}),
}
# A trainer imports nothing of a server, and the other way round.
STRANGERS = {"client": {"state", "storage", "server"}, "modules": {"state", "storage", "server"}}


def part_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_modules(tree: ast.AST, package: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*up, base]).rstrip(".")
            # `from paceline import ddp` names a module only here.
            yield from (f"{base}.{alias.name}" for alias in node.names)


def imported_parts(path: Path) -> set[str]:
    package = ".".join(["paceline", *path.relative_to(SOURCE).parent.parts])
    tree = ast.parse(path.read_text(), str(path))
    names = (name.split(".") for name in imported_modules(tree, package))
    return {name[1] for name in names if name[0] == "paceline" and len(name) > 1}


def is_allowed(part: str, target: str) -> bool:
    if part == target or part in FREE:
        return True
    if target not in HEIGHT:  # a public name (`from paceline import X`), or testing
        return part == "cli"
    if part == "testing":
        return target in TESTING_MAY_IMPORT
    return HEIGHT[target] < HEIGHT[part] or {part, target} <= BOTTOM


FILES = sorted(SOURCE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_point_downwards(path: Path) -> None:
    part = part_of(path)
    assert part in {*HEIGHT, *FREE, "testing"}, f"put {part} into LAYERS"
    wrong = sorted(target for target in imported_parts(path) if not is_allowed(part, target))
    assert not wrong, f"{part} must not import {', '.join(wrong)}"


def without_types(tree: ast.Module) -> ast.Module:
    """Drop what only a type checker imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            node.body = []
    return tree


def room_names(part: str) -> set[str]:
    return {name for names in ROOMS[part] for name in names}


def room_in(part: str, name: str) -> str:
    """The room of a folder or file of a package; empty for what is above all rooms."""
    names = room_names(part)
    return name if name in names else OTHERS if OTHERS in names and name != "__init__" else ""


def imported_rooms(part: str, path: Path) -> set[str]:
    """Rooms of a package that a module of it imports, as far as it does when it runs."""
    package = ".".join(["paceline", *path.relative_to(SOURCE).parent.parts])
    tree = without_types(ast.parse(path.read_text(), str(path)))
    start = f"paceline.{part.replace('/', '.')}."
    names = [name for name in imported_modules(tree, package) if name.startswith(start)]
    inside = [name.removeprefix(start).split(".") for name in names]
    # The last name may be one that the package's __init__ exports.
    return {room_in(part, each[0]) or each[0] for each in inside if len(each) > 1}


def is_below(part: str, room: str, target: str) -> bool:
    height = {name: -level for level, names in enumerate(ROOMS[part]) for name in names}
    is_strange = target in STRANGERS.get(room, ())
    return room == target or (height.get(target, 1) < height[room] and not is_strange)


IN_ROOMS = [
    (part, room, path)
    for part in ROOMS
    for path in FILES
    if path.is_relative_to(SOURCE / part)
    and (room := room_in(part, path.relative_to(SOURCE / part).parts[0].removesuffix(".py")))
]


@pytest.mark.parametrize("part", ROOMS)
def test_rooms_know_only_those_below(part: str) -> None:
    wrong = {
        str(path.relative_to(SOURCE)): found
        for its_part, room, path in IN_ROOMS
        if its_part == part
        and (found := {to for to in imported_rooms(part, path) if not is_below(part, room, to)})
    }
    assert not wrong


@pytest.mark.parametrize("part", ROOMS)
def test_every_room_is_there(part: str) -> None:
    found = {room for its_part, room, _ in IN_ROOMS if its_part == part}
    assert found == room_names(part)


@pytest.mark.parametrize(
    ("part", "room", "target", "allowed"),
    [
        ("observe", "stall", OTHERS, True),
        ("observe", OTHERS, "stall", False),
        ("observe", OTHERS, "metrics", False),
        ("observe", OTHERS, OTHERS, True),
        ("cli/bench", "harness", "hybrid", False),
        ("cli/bench", "hybrid", "elastic", False),
        ("ps", "client", "server", False),
        ("ddp", "reduce", "wrapper", False),
    ],
)
def test_the_rule_of_rooms(part: str, room: str, target: str, allowed: bool) -> None:
    assert is_below(part, room, target) is allowed


@pytest.mark.parametrize(
    ("part", "target", "allowed"),
    [
        ("ddp", "buckets", True),
        ("buckets", "ddp", False),
        ("ddp", "dp", False),
        ("cli", "testing", True),
        ("testing", "ddp", False),
        ("testing", "errors", True),
        ("ddp", "testing", False),
        ("ddp", "DistributedDataParallel", False),
    ],
)
def test_the_rule(part: str, target: str, allowed: bool) -> None:
    assert is_allowed(part, target) is allowed


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("import paceline.ddp.wrapper", "paceline.ddp.wrapper"),
        ("from paceline import ddp", "paceline.ddp"),
        ("from ..ddp import wrapper", "paceline.ddp.wrapper"),
        ("from . import plan", "paceline.buckets.plan"),
    ],
)
def test_every_form_of_import_is_seen(line: str, found: str) -> None:
    assert list(imported_modules(ast.parse(line), "paceline.buckets")) == [found]
