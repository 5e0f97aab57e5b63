"""What docs and comments name exists: files, links, headings, notes, classes, functions."""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import paceline.errors
from paceline import DistributedDataParallel
from paceline.torch_private.modules import TorchDDP
from tests.docs.hops import ROOT, SOURCE, Hop

# The log tells what was done under the names of its day.
PAGES = sorted(
    page
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"))
    if page.name != "performance-log.md"
)
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))

BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"[\w./-]*\w\.(?:py|c|h|md|svg|toml|txt)$")
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([\w-]+))?\)")
ERROR = re.compile(r"\b[A-Z]\w+(?:Error|Warning)\b")
NAME = re.compile(r"\b(paceline|ps|hooks|ddp)((?:\.[A-Za-z_]\w*)+)")
# Files of users, in examples of what an error looks like.
OTHERS_FILES = {"train.py"}
# What only instances have.
INSTANCE_NAMES = {"ddp.module", "ddp.reducer", "ddp.logger"}


def codes(page: Path) -> list[str]:
    return CODE.findall(BLOCK.sub("", page.read_text()))


@functools.cache
def file_names() -> frozenset[str]:
    folders = ("src", "docs", "tests", "benchmarks", "examples")
    return frozenset(path.name for folder in folders for path in (ROOT / folder).rglob("*.*"))


def exists(name: str, page: Path) -> bool:
    if "/" not in name:
        return name in file_names() or (ROOT / name).exists()
    return any((base / name).exists() for base in (page.parent, ROOT, SOURCE))


@every_page
def test_files(page: Path) -> None:
    named = {code for code in codes(page) if FILE.fullmatch(code)} - OTHERS_FILES
    assert not [name for name in sorted(named) if not exists(name, page)]


def anchors(page: Path) -> set[str]:
    """The headings of a page, as links spell them."""
    titles = re.findall(r"^#+ (.*)$", BLOCK.sub("", page.read_text()), re.MULTILINE)
    kept = [re.sub(r"[^\w\- ]", "", title.lower()) for title in titles]
    return {title.strip().replace(" ", "-") for title in kept}


@every_page
def test_links(page: Path) -> None:
    wrong = []
    for target, anchor in LINK.findall(BLOCK.sub("", page.read_text())):
        if "://" in target:
            continue
        path = (page.parent / target) if target else page
        is_wrong_anchor = anchor and path.suffix == ".md" and anchor not in anchors(path)
        if not path.exists() or is_wrong_anchor:
            wrong.append(f"{target}#{anchor}")
    assert not wrong


def is_error(name: str) -> bool:
    return hasattr(paceline.errors, name) or hasattr(builtins, name)


@every_page
def test_errors(page: Path) -> None:
    named = {name for code in codes(page) for name in ERROR.findall(code)}
    named -= {"RanksFailedError"}  # is in paceline.testing
    assert not [name for name in sorted(named) if not is_error(name)]


def resolve(root: str, parts: list[str]) -> object:
    """Import what a dotted name stands for; names of classes may follow those of modules."""
    if root == "ddp":
        return getattr(DistributedDataParallel, parts[0])
    found: object = importlib.import_module(
        "paceline" if root == "paceline" else f"paceline.{root}"
    )
    for part in parts:
        if not hasattr(found, part):
            found = importlib.import_module(f"{found.__name__}.{part}")  # type: ignore[attr-defined]
        else:
            found = getattr(found, part)
    return found


def names_of(page: Path) -> Iterator[tuple[str, list[str]]]:
    for code in codes(page):
        if "/" in code or FILE.fullmatch(code):
            continue
        for root, rest in NAME.findall(code):
            name = f"{root}{rest}"
            is_example = name.endswith((".png", ".json"))
            if name not in INSTANCE_NAMES and not name.startswith("ddp.module.") and not is_example:
                yield root, rest.removeprefix(".").split(".")


def exists_name(root: str, parts: list[str]) -> bool:
    if parts[0] == "integrations":
        return is_written(parts)
    try:
        resolve(root, parts)
    except (AttributeError, ImportError):
        return False
    return True


def is_written(parts: list[str]) -> bool:
    """Look a name up in the source, without an import.

    Frameworks may be missing; they take seconds to import, and Ray leaves variables behind.
    """
    for count in range(len(parts), 0, -1):
        folder = SOURCE.joinpath(*parts[:count])
        for file in (folder.with_suffix(".py"), folder / "__init__.py"):
            if file.exists():
                nodes = list(ast.walk(ast.parse(file.read_text())))
                return count == len(parts) or any(defines(node, parts[count]) for node in nodes)
    return False


def defines(node: ast.AST, name: str) -> bool:
    """Whether it is the definition or the import of that name."""
    return isinstance(node, ast.ClassDef | ast.FunctionDef | ast.alias) and node.name == name


@every_page
def test_names(page: Path) -> None:
    pytest.importorskip("zmq", reason="paceline.ps needs pyzmq")
    assert not [
        ".".join([root, *parts]) for root, parts in names_of(page) if not exists_name(root, parts)
    ]


@pytest.mark.parametrize(
    ("parts", "found"),
    [
        (["integrations", "ray"], True),
        (["integrations", "ray", "TorchConfig"], True),
        (["integrations", "ray", "NoSuchConfig"], False),
        (["integrations", "lightning", "DDPStrategy"], True),
        (["integrations", "lightning", "NoSuchStrategy"], False),
        (["integrations", "nothing"], False),
    ],
)
def test_names_are_found_without_an_import(parts: list[str], found: bool) -> None:
    assert is_written(parts) is found


@every_page
def test_python_blocks_compile(page: Path) -> None:
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        compile(block, str(page), "exec")


def test_every_page_is_in_the_table_of_contents() -> None:
    """That of its folder, if there is one; decisions are found by a pattern."""
    top = ROOT / "docs" / "index.md"
    missing = []
    for page in sorted({*(ROOT / "docs").rglob("*.md")} - {top}):
        own = page.parent / "index.md"
        index = own if own.exists() and page != own else top
        name = str(page.relative_to(index.parent).with_suffix(""))
        if page.parent.name != "decisions" and f"\n{name}\n" not in index.read_text():
            missing.append(name)
    assert not missing


def test_drawings_name_functions_that_exist() -> None:
    wrong = []
    for drawing in (ROOT / "docs").glob("life-of-*.svg"):
        for words in re.findall(r'class="file"[^>]*>([^<]+)<', drawing.read_text()):
            file, *function = words.split()
            hop = Hop(file, *function) if function else None
            is_there = hop.is_defined() if hop else (SOURCE / file).exists()
            if not is_there:
                wrong.append(f"{drawing.name}: {words}")
    assert not wrong


SOURCES = {
    path: path.read_text()
    for folder in (SOURCE, ROOT / "tests")
    for path in sorted(folder.rglob("*"))
    if path.suffix in {".py", ".c", ".h"}
}
NOTE = re.compile(r"\[Note: (\w[^\]]+)\]")
NOTE_HERE = re.compile(r"^[ \t*/#]*\[Note: (\w[^\]]+)\]", re.MULTILINE)
MODULE = re.compile(r":mod:`~?paceline\.([\w.]+)`")
PATH = re.compile(r"(?<![\w/.{}<>-])((?:[\w-]+/)+[\w-]+\.(?:py|c|h|md))\b")
# Ends of paths, which are compared with those of stacks.
ENDS_OF_PATHS = {"diagnose/wait_monitor.py"}


def test_notes_are_where_they_are_looked_for() -> None:
    """A note begins a line; everything else that has its name in brackets points to it."""
    texts = [*SOURCES.values(), *(page.read_text() for page in PAGES)]
    written = {name for text in SOURCES.values() for name in NOTE_HERE.findall(text)}
    named = {re.sub(r"\s+[*#/]*\s*", " ", name) for text in texts for name in NOTE.findall(text)}
    assert len(written) > 50
    assert sorted(named - written) == []


def test_files_that_the_source_names() -> None:
    wrong = []
    for path, text in SOURCES.items():
        if not path.is_relative_to(SOURCE):
            continue
        folders = (SOURCE, ROOT, path.parent, SOURCE / path.relative_to(SOURCE).parts[0])
        files = {name for name in PATH.findall(text) if name not in ENDS_OF_PATHS}
        wrong += [f"{path}: {n}" for n in files if not any((at / n).exists() for at in folders)]
        modules = {name.replace(".", "/") for name in MODULE.findall(text)}
        wrong += [
            f"{path}: {name}"
            for name in modules
            if not (SOURCE / f"{name}.py").exists() and not (SOURCE / name).is_dir()
        ]
    assert not wrong


# Nouns with two meanings, each of which says in parentheses what it belongs to.
TWO_MEANINGS = {
    "slot": "in a bucket, in an arena, of a member: a place, and never two of them in one file",
    "phase": "of the counting barrier in C, and of a step in a report",
    "stall": "a wait that is reported while it lasts, and its step in the report of the run",
    "comparison": "of contenders in a benchmark, and of two runs in a report",
    "round": "of shards, and of contenders in a benchmark",
    "turn": "of a shard, and of a contender in a benchmark",
    "supervisor": "of servers, and of elastic ranks; each starts its own processes again",
}


def test_each_noun_once() -> None:
    """And each with one file."""
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \| `[^`|]+` \|$", vocabulary(), re.MULTILINE)
    assert len(rows) == vocabulary().count("\n| ") - 2 * vocabulary().count("| noun |")
    assert len(rows) == len(set(rows))
    nouns = [noun for row in rows for noun in re.sub(r" \([^)]*\)", "", row).split(", ")]
    assert {noun for noun in nouns if nouns.count(noun) > 1} == set(TWO_MEANINGS)


def vocabulary() -> str:
    return (ROOT / "docs" / "vocabulary.md").read_text()


def test_nobody_is_told_to_install_what_is_not_published() -> None:
    pages = [*PAGES, *SOURCE.rglob("*.py"), *(ROOT / "examples").glob("*.py")]
    pages = [*pages, ROOT / "CHANGELOG.md"]
    assert not [str(page) for page in pages if UNPUBLISHED.search(page.read_text())]


UNPUBLISHED = re.compile(r"""pip install ["']?paceline\b|\bpaceline\[\w+\]""")


@pytest.mark.parametrize(
    ("text", "is_wrong"),
    [
        ("pip install paceline", True),
        ("pip install 'paceline[ps]'", True),
        ("| Lightning | `paceline[lightning]` |", True),
        ('pip install -c constraints.txt ".[lightning]"', False),
        ("`paceline.ps[0]`", False),
    ],
)
def test_what_counts_as_not_published(text: str, is_wrong: bool) -> None:
    assert bool(UNPUBLISHED.search(text)) is is_wrong


def test_errors_has_every_error() -> None:
    """The README promises it."""
    rows = re.findall(r"^\| (`.*?`) \|", (ROOT / "docs/errors.md").read_text(), re.MULTILINE)
    listed = {name for row in rows for name in ERROR.findall(row)}
    families = {"PacelineError", "StepError"}  # which the text below the table is about
    assert sorted(set(paceline.errors.__all__) - listed - families) == []
    assert sorted(listed - set(paceline.errors.__all__)) == []


def test_the_reference_has_what_our_wrapper_adds() -> None:
    text = (ROOT / "docs/api/ddp.md").read_text()
    members = re.search(r"DistributedDataParallel\n +:members: (.*)", text)
    assert members is not None
    added = {
        name for name in set(dir(DistributedDataParallel)) - set(dir(TorchDDP)) if name[0] != "_"
    }
    # Instances of torch's have them, or it is for torch.compile alone.
    added -= {"bucket_bytes_cap", "compiled_graph_bytes", "modules_buffers", "named_module_buffers"}
    assert sorted(added - set(members[1].split(", "))) == []


MOST_IN_LINE = 120


def too_long(text: str) -> list[str]:
    """Lines of prose; tables, code and the targets of links may be as long as they are."""
    lines = BLOCK.sub("", text).splitlines()
    prose = [line for line in lines if not line.startswith(("|", "#", "   :members:"))]
    return [line for line in prose if len(LINK.sub("]", line)) > MOST_IN_LINE]


@every_page
def test_lines_are_short(page: Path) -> None:
    assert too_long(page.read_text()) == []


def test_which_lines_are_too_long() -> None:
    long, link = "word " * 25, "word " * 23 + "[one](a-page-with-a-long-name.md)"
    assert too_long(long) == [long]
    assert too_long("\n".join([f"| {long} |", f"```\n{long}\n```", link])) == []
