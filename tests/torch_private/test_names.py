"""Private names of torch: all are listed, this torch has them, and one that is gone is named."""

from __future__ import annotations

import ast
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
LATER = {"debug.py"}


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
