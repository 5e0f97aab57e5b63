"""Step time with communication hooks over links of real speed, beside torch's own hooks.

Two test hosts (:mod:`paceline.testing.hosts`), one rank on each, all variants in the same
processes: see [Note: interleaving]. Links are shaped after the warm-up, so that slow links do not
make it slow. Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from rich.table import Table
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from paceline import DistributedDataParallel as DDP
from paceline import hooks
from paceline.cli.bench.harness import malloc, report, workloads
from paceline.cli.bench.harness.interleave import take_turns
from paceline.cli.bench.harness.models import MODELS
from paceline.cli.bench.harness.options import add_outputs, describe, one_of, positive
from paceline.cli.bench.harness.progress import RoundBar
from paceline.testing.hosts import (
    hosts_unavailable_reason,
    run_on_hosts,
    shape_link,
    test_hosts,
)
from paceline.testing.namespaces import sent_bytes

Build = Callable[[nn.Module], nn.Module]
Samples = dict[str, list[tuple[float, int]]]
"""By variant and round: seconds of a step, and bytes that this host sent."""

WARM_UP = 3


def ours(name: str, **options: object) -> Build:
    """Paceline's DDP with one of our hooks."""

    def build(module: nn.Module) -> nn.Module:
        model = DDP(module)
        hooks.register(model, name, **options)
        return model

    return build


def torchs_power_sgd(module: nn.Module) -> nn.Module:
    """torch's DDP with torch's PowerSGD, in one bucket: with several it is wrong on gloo."""
    model = TorchDDP(module, bucket_cap_mb=1000)
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return model


def torchs(hook: Callable[..., object]) -> Build:
    """torch's DDP with one of torch's hooks."""

    def build(module: nn.Module) -> nn.Module:
        model = TorchDDP(module)
        model.register_comm_hook(None, hook)
        return model

    return build


VARIANTS: dict[str, Build] = {
    "no hook": DDP,
    "torch, no hook": TorchDDP,
    "int8": ours("int8"),
    "e4m3": ours("e4m3"),
    "sign": ours("sign"),
    "fp16": ours("fp16"),
    "torch's fp16": torchs(default_hooks.fp16_compress_hook),
    "allreduce": ours("allreduce"),
    "torch's allreduce": torchs(default_hooks.allreduce_hook),
    "powersgd": ours("powersgd", start_powerSGD_iter=2),
    "torch's powersgd": torchs_power_sgd,
    "topk": ours("topk"),
    "noop": ours("noop"),
}


def run_rank(
    workload: str, names: Sequence[str], rates: Sequence[str], rounds: int
) -> dict[str, Samples]:
    """Measure all variants at all rates. Called on every rank."""
    malloc.keep_memory()
    models = {name: VARIANTS[name](workloads.make(workload).module) for name in names}
    batch = workloads.batch(workloads.make(workload), seed=dist.get_rank())
    for model in models.values():
        for _ in range(WARM_UP):
            _step(model, batch)
    results = {}
    for rate in rates:
        shape_link(rate)
        bar = RoundBar(f"{workload} over {rate}", rounds, is_shown=dist.get_rank() == 0)
        results[rate] = take_turns(names, bar, lambda name: _measured_step(models[name], batch))
    return results


def _step(model: nn.Module, batch: torch.Tensor) -> None:
    model.zero_grad(set_to_none=True)
    model(batch).square().mean().backward()


def _measured_step(model: nn.Module, batch: torch.Tensor) -> tuple[float, int]:
    dist.barrier()
    before = sent_bytes("link0")
    start_s = time.perf_counter()
    _step(model, batch)
    return time.perf_counter() - start_s, sent_bytes("link0") - before


def measure(
    workload: str, names: Sequence[str], rates: Sequence[str], rounds: int, timeout_s: float
) -> dict[str, Samples]:
    """Run on two test hosts; seconds are those of the slower rank, bytes those of rank 0."""
    with test_hosts(2) as hosts:
        first, second = run_on_hosts(
            hosts, 1, run_rank, workload, names, rates, rounds, timeout_s=timeout_s
        )
    return {
        rate: {
            name: [
                (max(mine[0], other[0]), mine[1])
                for mine, other in zip(first[rate][name], second[rate][name], strict=True)
            ]
            for name in names
        }
        for rate in rates
    }


def speedups(samples: Samples, name: str, over: str) -> list[float]:
    """Return, round by round, how many times faster one variant is than another."""
    pairs = zip(samples[over], samples[name], strict=True)
    return [theirs[0] / mine[0] for theirs, mine in pairs]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    describe(parser, "python -m benchmarks hooks_link --rates 1gbit --rounds 9")
    add_outputs(parser, plot=False)
    parser.add_argument("--model", choices=sorted(MODELS), default="mlp")
    parser.add_argument("--rates", type=lambda t: t.split(","), default=["1gbit", "100mbit"])
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--hooks", type=one_of(list(VARIANTS)), default=list(VARIANTS))


def run(args: argparse.Namespace) -> int:
    """Measure and show."""
    reason = hosts_unavailable_reason()
    if reason is not None:
        print(reason, file=sys.stderr)
        return 2
    results = measure(args.model, args.hooks, args.rates, args.rounds, args.timeout)
    console = report.console()
    for rate, samples in results.items():
        console.print(_table(args.model, rate, samples))
    report.write_json(args.json, {"model": args.model, "results": results})
    return 0


def _table(model: str, rate: str, samples: Samples) -> Table:
    reference = next(iter(samples))
    table = Table(title=f"{model} over {rate}; times faster: median of rounds")
    for heading in ("variant", "step ms, best", "p50", f"x faster than {reference}", "MB sent"):
        table.add_column(heading, justify="left" if heading == "variant" else "right")
    for name, rounds in samples.items():
        seconds = [second for second, _ in rounds]
        table.add_row(
            name,
            f"{min(seconds) * 1e3:.0f}",
            f"{statistics.median(seconds) * 1e3:.0f}",
            f"{statistics.median(speedups(samples, name, reference)):.2f}",
            f"{statistics.median(sent for _, sent in rounds) / 1e6:.2f}",
        )
    return table
