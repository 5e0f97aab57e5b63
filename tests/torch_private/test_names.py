"""Private names of torch: all are listed, this torch has them, and one that is gone is named."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.errors import TorchNameError
from paceline.torch_private import names

FOLDER = Path(names.__file__).parent
# Attributes of our own objects, of what torch's functions return, and of Python.
NOT_TORCHS = {"_getframe", "_context_id", "_devices", "_timeout", "_threads", "_reduce", "_device"}
# torch's, but set by a constructor: no class has them.
OF_OBJECTS = {"_per_optimizer_states"}
# torch's debug server: a file of its own, which is imported when it is used.
# And what tensor parallelism needs.
LATER = {"debug.py", "tensor_parallel.py"}

SOURCE = FOLDER.parent
# Used where they are: calls that a substitute would only slow down, and what the wrapper has to
# have as a subclass of torch's.
ANYWHERE = {"_foreach_add_", "_foreach_copy_", "_foreach_mul_", "_active_ddp_module"}


def private_names_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            found.update(alias.name for alias in node.names)
    return {name for name in found if name.startswith("_") and not name.startswith("__")}


def test_all_are_listed() -> None:
    listed = {part for path in (*names.FUNCTIONS, *names.METHODS) for part in path.split(".")}
    for path in FOLDER.glob("*.py"):
        if path.name not in LATER | {"names.py"}:
            assert private_names_of(path) <= listed | NOT_TORCHS | OF_OBJECTS, path.name


def private_parts(path: str) -> list[str]:
    return [part for part in path.split(".") if part.startswith("_") and not part.startswith("__")]


def functions_of(path: Path) -> set[str]:
    nodes = ast.walk(ast.parse(path.read_text()))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef)}


ELSEWHERE = [path for path in sorted(SOURCE.rglob("*.py")) if path.parent != FOLDER]


@functools.cache
def of_torchs_objects() -> set[str]:
    """Without those that classes of ours have, too."""
    methods = {path.rpartition(".")[2] for path in names.METHODS}
    return methods.difference(*map(functions_of, ELSEWHERE))


def outermost(node: ast.Attribute) -> str:
    """What ``a.b.c`` begins with; empty for an attribute of something else than a name."""
    inner = node.value
    while isinstance(inner, ast.Attribute):
        inner = inner.value
    return inner.id if isinstance(inner, ast.Name) else ""


def torchs_private_names(tree: ast.Module) -> set[str]:
    """Private names that a module imports from torch, or takes from what it has imported."""
    torchs: set[str] = set()
    used: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            ours = [each for each in node.names if each.name.split(".")[0] == "torch"]
            torchs |= {each.asname or "torch" for each in ours}
            used += [each.name for each in ours]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            torchs |= {each.asname or each.name for each in node.names}
            used += [f"{node.module}.{each.name}" for each in node.names]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (
            outermost(node) in torchs or node.attr in of_torchs_objects()
        ):
            used.append(node.attr)
    return {part for path in used for part in private_parts(path)}


def test_none_is_used_elsewhere() -> None:
    found = {
        str(path.relative_to(SOURCE)): used
        for path in ELSEWHERE
        if (used := torchs_private_names(ast.parse(path.read_text())) - ANYWHERE)
    }
    assert not found, f"move what uses these into torch_private/: {found}"


@pytest.mark.parametrize(
    "line",
    [
        "group._register_backend()",
        "from torch._C._distributed_c10d import TCPStore",
        "from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform",
        "import torch._dynamo",
        "import torch.distributed as dist; dist.distributed_c10d._world.group_count = 0",
        "from torch import nn; nn.Module._replicate_for_data_parallel(module)",
        "mesh._get_root_mesh()",
    ],
)
def test_each_way_to_use_one_is_seen(line: str) -> None:
    assert torchs_private_names(ast.parse(line))


def test_this_torch_has_all_of_them() -> None:
    assert names.missing() == {}


@pytest.mark.parametrize("path", names.FUNCTIONS)
def test_one_that_is_gone_is_named_with_what_needs_it(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(names, "_look_up", lambda _: (None, False))
    absent = names.find(path)
    assert not names.is_there(absent)
    text = f"has no {path}, which Paceline needs for: {names.FUNCTIONS[path]}"
    for use in (lambda: absent(1, two=2), lambda: absent.attribute, lambda: isinstance(1, absent)):
        with pytest.raises(TorchNameError) as raised:
            use()
        assert text in str(raised.value)
        assert '"torch>=2.13,<2.16"' in str(raised.value)


STEP = """
import torch, torch.autograd, torch.distributed as dist, torch.distributed.utils
import torch.nn.parallel.distributed, torch._dynamo  # its import needs some of the names, too
for path in {paths!r}:
    module, _, name = path.rpartition(".")
    delattr(eval(module), name)
import paceline
from paceline.errors import TorchNameError
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
ddp = paceline.DistributedDataParallel(torch.nn.Linear(2, 1))
try:
    ddp(torch.ones(1, 2)).sum().backward()
    print("gradient", ddp.module.weight.grad.tolist())
    from paceline.torch_private.modules import move_inputs
    move_inputs((), {{}}, torch.device("cpu"), False)
except TorchNameError as error:
    print("error", error)
dist.destroy_process_group()
"""


def run_without(*paths: str) -> tuple[str, str]:
    program = STEP.format(paths=paths)
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "does not have private names that Paceline uses" in ran.stderr
    for path in paths:
        assert ran.stderr.count(f"{path} ({names.FUNCTIONS[path]})") == 1, ran.stderr
    return ran.stdout, ran.stderr


def test_what_does_not_need_it_goes_on() -> None:
    lost = ("torch.distributed.utils._to_kwargs", "torch.autograd._profiler_enabled")
    out, _ = run_without(*lost)
    assert "gradient [[1.0, 1.0]]" in out
    assert f"has no {lost[0]}, which Paceline needs for: device_ids" in out


def test_what_needs_it_says_so() -> None:
    out, _ = run_without("torch._C._will_engine_execute_node")
    assert "gradient" not in out
    assert "_will_engine_execute_node, which Paceline needs for: every backward" in out
