from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch import nn

import paceline
from paceline.testing import run_ranks
from paceline.torch_private.modules import TorchDDP
from tests.script_job import run_script

NAMES = (
    "torch.nn.parallel.DistributedDataParallel",
    "torch.nn.parallel.distributed.DistributedDataParallel",
    "torch.nn.SyncBatchNorm",
    "torch.nn.modules.SyncBatchNorm",
    "torch.nn.modules.batchnorm.SyncBatchNorm",
)
# Other test modules of this session have bound torch's class.
pytestmark = pytest.mark.filterwarnings("ignore:patch_torch.. came after")
SCRIPT = Path(__file__).with_name("unedited.py")
DEADLINE_S = 250


@pytest.fixture(autouse=True)
def _unpatched() -> Iterator[None]:
    yield
    paceline.unpatch_torch()


def value_of(name: str) -> object:
    value: object = torch
    for part in name.split(".")[1:]:
        value = getattr(value, part)
    return value


def test_every_name_becomes_ours_and_comes_back() -> None:
    before = [value_of(name) for name in NAMES]
    patch = paceline.patch_torch()
    assert patch.changed == NAMES
    assert {value_of(name) for name in NAMES} == {
        paceline.DistributedDataParallel,
        paceline.nn.SyncBatchNorm,
    }
    assert str(patch).splitlines()[0] == f"{NAMES[0]} is Paceline's"
    assert paceline.unpatch_torch() == NAMES
    assert [value_of(name) for name in NAMES] == before
    assert paceline.unpatch_torch() == ()


def test_no_other_module_of_torch_has_the_name() -> None:
    """Or this list is too short. Modules of torch that bound it only ask with isinstance."""
    constructing = {
        f"{name}.{key}"
        for name, module in list(sys.modules.items())
        if name.startswith("torch.nn") and isinstance(module, ModuleType)
        for key, value in vars(module).items()
        if value in (TorchDDP, nn.SyncBatchNorm) and isinstance(value, type)
    }
    assert constructing == set(NAMES)


def test_a_second_call_changes_nothing() -> None:
    with paceline.patch_torch():
        with paceline.patch_torch() as again:
            assert again.changed == ()
        assert torch.nn.parallel.DistributedDataParallel is paceline.DistributedDataParallel
    assert torch.nn.parallel.DistributedDataParallel is TorchDDP


THEIRS = f"""
import warnings, torch, paceline
class Theirs(torch.nn.parallel.DistributedDataParallel):
    pass
torch.nn.parallel.DistributedDataParallel = Theirs
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    assert {NAMES[0]!r} not in paceline.patch_torch().changed
assert any("Theirs" in str(each.message) for each in said), said
paceline.unpatch_torch()
assert torch.nn.parallel.DistributedDataParallel is Theirs
"""


def test_what_somebody_else_patched_is_left_alone() -> None:
    """In a process of its own: a warning names the first few only, and tests bind many."""
    subprocess.run([sys.executable, "-c", THEIRS], check=True, timeout=DEADLINE_S)


def test_who_bound_a_name_early_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    early = ModuleType("early_bird")
    early.DDP = TorchDDP  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "early_bird", early)
    with pytest.warns(UserWarning, match=r"early_bird\.DDP.*PACELINE_PATCH=1"):
        patch = paceline.patch_torch()
    assert "early_bird.DDP" in patch.bound_early
    assert "early_bird.DDP is still torch's" in str(patch)


def test_nothing_is_said_when_nobody_did() -> None:
    code = "import paceline, torch; print(paceline.patch_torch().bound_early)"
    command = [sys.executable, "-W", "error", "-c", code]
    assert subprocess.check_output(command, text=True, timeout=DEADLINE_S).strip() == "()"


def replicated() -> tuple[str, list[float]]:
    """Train with torch's ``replicate``, which builds whatever the name means."""
    from torch.distributed._composable.replicate import replicate

    torch.manual_seed(0)
    model = replicate(nn.Linear(4, 2))
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        model(torch.randn(3, 4, generator=data)).square().sum().backward()
    wrapper = replicate.state(model)._ddp_weakref()
    grads = [float(p.grad.sum()) for p in model.parameters() if p.grad is not None]
    return type(wrapper).__module__, grads


def replicated_both_ways() -> tuple[tuple[str, list[float]], ...]:
    theirs = replicated()
    sys.modules.pop("torch.distributed._composable.replicate")
    with paceline.patch_torch():
        return theirs, replicated()


def test_torchs_replicate_builds_on_ours() -> None:
    for (their_class, theirs), (our_class, ours) in run_ranks(2, replicated_both_ways):
        assert (their_class, our_class) == (TorchDDP.__module__, "paceline.ddp.wrapper")
        assert theirs == ours


def run_patched(*words: str) -> str:
    """Under torchrun."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PACELINE_PATCH": "1"}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = subprocess.run(
        [sys.executable, *launcher, str(SCRIPT), *words],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env=env,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_a_script_that_knows_torch_only(tmp_path: Path) -> None:
    theirs, their_losses = told(run_script(SCRIPT, tmp_path))
    ours, our_losses = told(run_patched())
    assert (theirs, ours) == ("torch.nn.parallel.distributed", "paceline.ddp.wrapper")
    # Not bit for bit: under torchrun torch has other threads than in ranks of the fork server.
    assert our_losses == pytest.approx(their_losses, rel=1e-4)


def told(line: str) -> tuple[str, list[float]]:
    name, _, losses = line.strip().partition(" ")
    return name, [float.fromhex(loss) for loss in ast.literal_eval(losses)]


@pytest.mark.slow
def test_sync_batch_norm_runs_on_cpu() -> None:
    assert run_patched("sync").startswith("paceline.ddp.wrapper")
