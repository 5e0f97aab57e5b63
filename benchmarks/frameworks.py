"""Step time inside of frameworks, their own DDP beside ours, in one run.

Both live in the same two ranks, on the same gloo group, and take turns round by round ([Note:
interleaving] in interleave.py). A step is what the framework does for a batch: forward, backward,
clipping where it clips by default, optimizer. The ratio is theirs to ours: above 1, ours is faster.
It is taken round by round; its interval holds 95 % (bootstrap over rounds).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import random
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from paceline.cli.bench.harness.estimates import Blocks, p50, ratio
from paceline.cli.bench.harness.options import describe, one_of, positive
from paceline.cli.bench.harness.report import write_json
from paceline.testing import run_ranks

WIDTH, BATCH = 1024, 16
SKIPPED = 3  # buckets are rebuilt in the second step

Run = Callable[[int], list[float]]
"""Runs that many steps and returns what each took, in ms."""


def model() -> nn.Module:
    """An MLP with 17 MB of gradients."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)))


def repeat(step: Callable[[], object]) -> Run:
    """Time a step that can be called again and again."""

    def run(steps: int) -> list[float]:
        times = []
        for _ in range(steps):
            began = time.perf_counter()
            step()
            times.append(1000 * (time.perf_counter() - began))
        return times

    return run


def fabric(is_ours: bool) -> Run:
    """Lightning Fabric."""
    from lightning.fabric import Fabric

    strategy = "paceline" if is_ours else "ddp"
    runtime = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    runtime.launch()
    net = model()
    wrapped, optimizer = runtime.setup(net, torch.optim.SGD(net.parameters(), lr=1e-3))
    x = torch.randn(BATCH, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        runtime.backward(wrapped(x).square().mean())
        optimizer.step()

    return repeat(step)


def accelerate(is_ours: bool) -> Run:
    """Accelerate."""
    import accelerate as package

    from paceline.integrations.accelerate import Accelerator

    made = (Accelerator if is_ours else package.Accelerator)(cpu=True)
    net = model()
    wrapped, optimizer = made.prepare(net, torch.optim.SGD(net.parameters(), lr=1e-3))
    x = torch.randn(BATCH, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        made.backward(wrapped(x).square().mean())
        optimizer.step()

    return repeat(step)


def trainer(is_ours: bool) -> Run:
    """Lightning's Trainer; its progress bar, logger and checkpoints are off."""
    import lightning.pytorch as L

    class Module(L.LightningModule):
        """Times a batch from its start to its end."""

        def __init__(self) -> None:
            super().__init__()
            self.net = model()
            self.times: list[float] = []

        def training_step(self, batch: torch.Tensor, _: int) -> Any:
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

        def on_train_batch_start(self, *_: Any) -> None:
            self.began = time.perf_counter()

        def on_train_batch_end(self, *_: Any) -> None:
            self.times.append(1000 * (time.perf_counter() - self.began))

    def run(steps: int) -> list[float]:
        module = Module()
        data: Any = torch.randn(2 * BATCH * steps, WIDTH)
        runtime = L.Trainer(
            accelerator="cpu",
            devices=2,
            strategy="paceline" if is_ours else "ddp",
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        runtime.fit(module, torch.utils.data.DataLoader(data, batch_size=BATCH))
        return module.times

    return run


def transformers(is_ours: bool) -> Run:
    """Transformers' Trainer, which also clips gradients and computes their norm."""
    import transformers as package

    from paceline.integrations.transformers import Trainer

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model()

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": F.mse_loss(self.net(x), labels)}

    class Clock(package.TrainerCallback):
        def __init__(self) -> None:
            self.times: list[float] = []

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.times.append(1000 * (time.perf_counter() - self.began))

    def run(steps: int) -> list[float]:
        x = torch.randn(2 * BATCH * steps, WIDTH)
        clock = Clock()
        with tempfile.TemporaryDirectory() as folder:
            args = package.TrainingArguments(
                output_dir=folder,
                use_cpu=True,
                per_device_train_batch_size=BATCH,
                max_steps=steps,
                logging_strategy="no",
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                ddp_find_unused_parameters=False,
                optim="sgd",
                dataloader_pin_memory=False,
            )
            data = [{"x": row, "labels": row} for row in x]
            kind = Trainer if is_ours else package.Trainer
            kind(Net(), args, train_dataset=data, callbacks=[clock]).train()
        return clock.times

    return run


def ray_train(is_ours: bool) -> Run:
    """Ray Train, in a worker: it wraps, and leaves the step to the script."""
    from ray.train.torch import prepare_model

    from paceline.integrations.ray import WrapsInOurs

    with WrapsInOurs({}) if is_ours else contextlib.nullcontext():
        wrapped = prepare_model(model())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-3)
    x = torch.randn(BATCH, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        wrapped(x).square().mean().backward()
        optimizer.step()

    return repeat(step)


def measure_in_ray(rounds: int, steps: int) -> tuple[Blocks, Blocks]:
    """Run a job of two workers on gloo; return the times of the first, theirs and ours."""
    # Niceness is 15 by default: everything else would go first.
    quick = {"RAY_worker_niceness": "0", "RAY_TRAIN_V2_ENABLED": "1"}
    os.environ.update({**quick, "RAY_USAGE_STATS_ENABLED": "0"})
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    def on_worker(config: dict[str, str]) -> None:
        torch.set_num_threads(1)
        found = measure(ray_train, rounds, steps)
        if ray.train.get_context().get_world_rank() == 0:
            Path(config["times"]).write_text(json.dumps([found[False], found[True]]))

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        with tempfile.TemporaryDirectory() as folder:
            times = Path(folder) / "times.json"
            TorchTrainer(
                on_worker,
                train_loop_config={"times": str(times)},
                torch_config=TorchConfig(backend="gloo"),
                scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
                run_config=RunConfig(storage_path=folder, name="bench"),
            ).fit()
            theirs, ours = json.loads(times.read_text())
    finally:
        ray.shutdown()
    return theirs, ours


def measure_on_ranks(make: Callable[[bool], Run], rounds: int, steps: int) -> tuple[Blocks, Blocks]:
    """Start two ranks; return the times of the first, theirs and ours."""
    found = run_ranks(2, measure, make, rounds, steps, timeout_s=600, env=_variables())
    return found[0][False], found[0][True]


Measure = Callable[[int, int], tuple[Blocks, Blocks]]
"""Takes rounds and the steps of a round; returns the times of both, theirs first."""


@dataclass(frozen=True)
class Framework:
    """A line of the table."""

    title: str
    package: str
    measure: Measure


FRAMEWORKS = {
    "fabric": Framework("Lightning Fabric", "lightning", partial(measure_on_ranks, fabric)),
    "trainer": Framework("Lightning Trainer", "lightning", partial(measure_on_ranks, trainer)),
    "accelerate": Framework("Accelerate", "accelerate", partial(measure_on_ranks, accelerate)),
    "transformers": Framework(
        "Transformers Trainer", "transformers", partial(measure_on_ranks, transformers)
    ),
    "ray": Framework("Ray Train", "ray", measure_in_ray),
}


def measure(make: Callable[[bool], Run], rounds: int, steps: int) -> dict[bool, list[list[float]]]:
    """In a rank: let both run in turn; return their times by round."""
    runs = {is_ours: make(is_ours) for is_ours in (False, True)}
    times: dict[bool, list[list[float]]] = {False: [], True: []}
    for number in range(rounds):
        order = [False, True]
        random.Random(number).shuffle(order)
        for is_ours in order:
            times[is_ours].append(runs[is_ours](steps + SKIPPED)[SKIPPED:])
    return times


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    describe(parser, "python -m benchmarks frameworks --rounds 3 --only accelerate,ray")
    parser.add_argument("--rounds", type=positive, default=9, help="default: 9")
    parser.add_argument("--steps", type=positive, default=12, help="of a round; default: 12")
    parser.add_argument(
        "--only",
        type=one_of(list(FRAMEWORKS)),
        default=list(FRAMEWORKS),
        metavar="NAME,...",
        help=f"default: {','.join(FRAMEWORKS)}",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all numbers to FILE")


def run(args: argparse.Namespace) -> int:
    """Measure every framework that is installed."""
    print(f"{'':22}{'torch DDP':>12}{'Paceline':>12}  theirs / ours")
    results = {}
    for name in args.only:
        framework = FRAMEWORKS[name]
        if importlib.util.find_spec(framework.package) is None:
            print(f"{framework.title:22} {framework.package} is not installed")
            continue
        theirs, ours = framework.measure(args.rounds, args.steps)
        found = ratio(theirs, ours)
        times = f"{p50(theirs):9.1f} ms{p50(ours):9.1f} ms"
        print(f"{framework.title:22}{times}  {found}", flush=True)
        results[name] = {"theirs_ms": theirs, "ours_ms": ours, "ratio": asdict(found)}
    write_json(args.json, results)
    return 0


def _variables() -> dict[str, str]:
    """What torchrun sets, so that frameworks take the ranks that are there."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    values = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GROUP_RANK": "0"}
    quiet = {"PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": ""}
    return {**values, **quiet, "TORCHELASTIC_RUN_ID": f"bench-{os.getpid()}"}
