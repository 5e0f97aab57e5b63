"""What Lightning's own DDP strategy does not do, or not on CPUs, and ours does."""

from __future__ import annotations

import functools
import importlib
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from paceline.testing import run_ranks
from tests.integrations.table import RANKS, torchrun_variables
from tests.required import needs

pytestmark = [needs("lightning"), pytest.mark.slow, pytest.mark.filterwarnings("default")]
DEADLINE_S = 250
PACKAGE = "lightning.pytorch"


@functools.cache
def module_class(package: str) -> Any:
    class Module(importlib.import_module(package).LightningModule):  # type: ignore[misc]
        def __init__(self, *layers: nn.Module) -> None:
            super().__init__()
            self.net = nn.Sequential(*layers)
            self.kinds: set[str] = set()
            self.backend = ""

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            self.kinds = {f"{type(m).__module__}.{type(m).__name__}" for m in self.net}
            self.backend = dist.get_backend()
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Module


def new(package: str, *layers: nn.Module) -> Any:
    return module_class(package)(*layers)


def fit(
    module: Any, strategy: Any = "paceline", package: str = "lightning.pytorch", **options: Any
) -> Any:
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    trainer = importlib.import_module(package).Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=strategy,
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, DataLoader(torch.randn(16, 8), batch_size=2))
    return trainer


def on_ranks(fn: Any, *args: Any, init: bool = True, **env: str) -> list[Any]:
    env = {**torchrun_variables(), **env}
    found: list[Any] = run_ranks(RANKS, fn, *args, init=init, env=env, timeout_s=240)
    return found


CHECK = """
import torch
for name in ("lightning.fabric", "lightning.pytorch", "lightning_fabric", "pytorch_lightning"):
    module = __import__(name + ".strategies", fromlist=["x"])
    registry = getattr(module, "StrategyRegistry", None) or module.STRATEGY_REGISTRY
    strategy = registry.get("paceline")
    assert isinstance(strategy, module.DDPStrategy)
    assert len([n for n in registry if n.startswith("paceline")]) == 5
    print(type(strategy).__module__.rpartition(".")[2])
    assert module.__spec__.loader.get_source(name + ".strategies").startswith("#")
"""


def test_the_string_is_enough_in_every_lightning() -> None:
    command = [sys.executable, "-W", "ignore", "-c", CHECK]
    told = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert told.returncode == 0, told.stderr
    found = [line.split()[0] for line in told.stdout.splitlines()]
    assert found == ["fabric", "trainer", "standalone_fabric", "standalone_trainer"]


def classes() -> tuple[bool, bool, str]:
    from lightning.fabric.strategies import DDPStrategy as TheirFabric
    from lightning.pytorch.strategies import DDPStrategy as Theirs

    from paceline.integrations import lightning as ours

    try:
        _ = ours.nonsense
    except AttributeError as error:
        text = str(error)
    return (
        issubclass(ours.FabricDDPStrategy, TheirFabric),
        issubclass(ours.DDPStrategy, Theirs),
        text,
    )


def test_classes_can_be_imported() -> None:
    text = "module 'paceline.integrations.lightning' has no attribute 'nonsense'"
    assert run_ranks(1, classes, timeout_s=DEADLINE_S) == [(True, True, text)]


def synced_norms() -> tuple[set[str], str]:
    module = new(PACKAGE, nn.Linear(8, 4), nn.BatchNorm1d(4))
    fit(module, sync_batchnorm=True)
    assert not any(isinstance(m, nn.SyncBatchNorm) for m in module.modules())  # given back
    backend = module.backend
    dist.destroy_process_group()
    return module.kinds, backend


def test_synced_norms_on_cpu_and_the_backend_is_ours() -> None:
    for kinds, backend in on_ranks(synced_norms, init=False):
        assert "paceline.nn.sync_batchnorm.SyncBatchNorm" in kinds
        assert backend == "paceline"


BACKENDS = [
    ("cpu", None, "paceline"),
    ("cpu", "gloo", "gloo"),
    ("cpu", "another", "another"),
    ("cuda:0", None, "nccl"),
    ("cuda:0", "gloo", "gloo"),
]


def backends() -> list[list[str]]:
    """Whose group a strategy makes, for each device and what was asked for."""
    from paceline.integrations.lightning import DDPStrategy, FabricDDPStrategy

    return [
        [
            made(
                parallel_devices=[torch.device(device)], process_group_backend=asked
            )._get_process_group_backend()
            for device, asked, _ in BACKENDS
        ]
        for made in (DDPStrategy, FabricDDPStrategy)
    ]


def test_the_group_is_ours_on_cpus_unless_another_is_asked_for() -> None:
    (found,) = run_ranks(1, backends, timeout_s=DEADLINE_S)
    assert found == [[expected for _, _, expected in BACKENDS]] * 2


def counting_hook(state: list[int], bucket: Any) -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    state.append(bucket.index())
    return allreduce_hook(None, bucket)


def hooked() -> int:
    from paceline.integrations.lightning import DDPStrategy

    seen: list[int] = []
    fit(
        new(PACKAGE, nn.Linear(8, 1)), DDPStrategy(ddp_comm_hook=counting_hook, ddp_comm_state=seen)
    )
    return len(seen)


def test_hooks_run_on_cpu() -> None:
    assert on_ranks(hooked) == [2, 2]


def unused() -> str:
    module = new(PACKAGE, nn.Linear(8, 1))
    module.forgotten = nn.Linear(2, 2)
    try:
        fit(module)
    except RuntimeError as error:
        return str(error)
    return "nothing"


def test_unused_parameters_keep_their_names() -> None:
    for text in on_ranks(unused):
        assert "forgotten.weight" in text
        # What Lightning's own tests look for.
        assert "It looks like your LightningModule has parameters that were not used in" in text
        assert "paceline_find_unused_parameters_true" in text


def reported(package: str) -> tuple[list[str], list[float]]:
    """Train; return the callbacks that are ours, and the losses of the steps."""
    import paceline.observe

    steps: list[Any] = []
    with paceline.observe.on_step(steps.append):
        trainer = fit(new(package, nn.Linear(8, 1)), package=package)
    ours = [type(each).__name__ for each in trainer.callbacks if "paceline" in str(type(each))]
    assert all(isinstance(c, importlib.import_module(package).Callback) for c in trainer.callbacks)
    return ours, [step.loss for step in steps]


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_a_recorded_run_has_its_report(package: str, tmp_path: Path) -> None:
    """By Lightning's entry points for callbacks: the script says nothing."""
    for ours, losses in on_ranks(reported, package, PACELINE_RUN_DIR=str(tmp_path)):
        assert ours == ["ReportCallback"]
        assert len(losses) == 2
        assert not any(map(math.isnan, losses))
    page = (tmp_path / "report.html").read_text()
    assert "2 ranks" in page
    assert (tmp_path / "report.html").stat().st_mode & 0o077 == 0


def test_without_a_record_there_is_no_callback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_RUN_DIR", raising=False)
    from paceline.integrations.lightning import report

    assert report.callbacks() == report.standalone_callbacks() == []


def test_lightning_starts_ranks(tmp_path: Path) -> None:
    """By fork, as notebooks do, and by spawn."""
    script = Path(__file__).with_name("starts_ranks.py")
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(script), str(tmp_path)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, env=env)
    assert told.returncode == 0, told.stderr
    for start in ("fork", "notebook", "spawn"):
        for rank in range(RANKS):
            found = (tmp_path / start / f"rank{rank}").read_text()
            assert found == "paceline 2 paceline.ddp.wrapper", start
    gradients = [(tmp_path / "fabric" / f"rank{rank}").read_text() for rank in range(RANKS)]
    assert gradients == ["paceline [[3.0, 3.0]]"] * RANKS  # the mean of 2 and 4
