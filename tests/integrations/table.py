"""Features of a framework, each run with its own DDP and with ours, on the same two ranks.

A feature is a function of a side (theirs or ours) that trains and returns a :class:`Curve`. The
ranks run all features of a file one after the other: to import a framework takes longer than most
features. The tests then look at one feature each: both curves must be the same, bit for bit.
"""

from __future__ import annotations

import gc
import importlib.util
import math
import os
import socket
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.config import BACKEND_NAME
from paceline.testing import run_ranks
from paceline.torch_private.modules import TorchDDP

RANKS = 2
OUR_GROUP = "the first feature on our group"


def needs(module: str) -> pytest.MarkDecorator:
    """Skip a file without a framework. Nothing is imported: ranks do that, if the test runs."""
    is_missing = importlib.util.find_spec(module) is None
    reason = f"{module} is not installed (make test-all installs it)"
    return pytest.mark.skipif(is_missing, reason=reason)


DEADLINE_S = 280


@dataclass
class Curve:
    """What a feature returns.

    Attributes:
        wrapper: The module that the framework has put around the model.
        losses: Of every step; floats or tensors of one number.
        more: Further numbers to compare: weights, metrics, what was gathered.
    """

    wrapper: torch.nn.Module
    losses: list[Any]
    more: list[Any] = field(default_factory=list)

    def digest(self) -> dict[str, Any]:
        wrapped = next(m for m in self.wrapper.modules() if isinstance(m, TorchDDP))
        return {
            "class": type(wrapped).__module__.partition(".")[0],
            "losses": [bits(loss) for loss in self.losses],
            "more": [bits(value) for value in self.more],
            "weights": [bits(p) for p in wrapped.module.parameters()],
        }


def bits(value: Any) -> str:
    """Return numbers as text that keeps every bit."""
    if isinstance(value, torch.Tensor):
        return str([number.hex() for number in value.detach().double().flatten().tolist()])
    return float(value).hex()


@dataclass(frozen=True)
class Side:
    """Whose wrapper a run of a feature uses. ``folder`` is empty, and the same for all ranks."""

    is_ours: bool
    folder: str

    def choose(self, theirs: Any, ours: Any) -> Any:
        return ours if self.is_ours else theirs


Feature = Callable[[Side], Curve]


class Table:
    """The features of one framework."""

    def __init__(self) -> None:
        self.features: dict[str, Feature] = {}

    def __call__(self, feature: Feature) -> Feature:
        self.features[feature.__name__] = feature
        return feature

    def run(self, **env: str) -> dict[str, list[Any]]:
        """Return what each rank tells of each feature: two digests, or a traceback."""
        with tempfile.TemporaryDirectory(prefix="paceline-table-") as folder:
            told = run_ranks(
                RANKS,
                run_all,
                list(self.features.values()),
                folder,
                timeout_s=DEADLINE_S,
                env={**torchrun_variables(), **env},
            )
        return {name: [rank[name] for rank in told] for name in (*self.features, OUR_GROUP)}


def torchrun_variables() -> dict[str, str]:
    """What torchrun sets besides ranks, so that frameworks take the ranks that are there."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "paceline-test",
        "GROUP_RANK": "0",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": "",
    }


def run_all(features: list[Feature], folder: str) -> dict[str, Any]:
    """In a rank: run every feature with both wrappers, whatever became of those before."""
    os.environ["LOCAL_WORLD_SIZE"] = str(RANKS)
    told: dict[str, Any] = {}
    for feature in features:
        try:
            told[feature.__name__] = [run_side(feature, s, folder) for s in (False, True)]
        except Exception:
            told[feature.__name__] = traceback.format_exc()
    try:
        told[OUR_GROUP] = run_on_our_group(features[0], folder)
    except Exception:
        told[OUR_GROUP] = traceback.format_exc()
    return told


def run_on_our_group(feature: Feature, folder: str) -> dict[str, Any]:
    """Run a feature with our wrapper once more, on a default group of our backend."""
    gc.collect()  # wrappers of the group that ends
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group(BACKEND_NAME, init_method="env://")
    again = os.path.join(folder, OUR_GROUP)
    return {**run_side(feature, True, again), "backend": dist.get_backend()}


def run_side(feature: Feature, is_ours: bool, folder: str) -> dict[str, Any]:
    own = os.path.join(folder, f"{feature.__name__}-{is_ours}")
    os.makedirs(own, exist_ok=True)
    torch.manual_seed(1)
    try:
        return feature(Side(is_ours, own)).digest()
    finally:
        dist.barrier()


def check(told: list[Any]) -> None:
    """Both sides have trained, each with its own wrapper, and every number is the same."""
    for rank, digests in enumerate(told):
        assert not isinstance(digests, str), f"rank {rank}:\n{digests}"
        theirs, ours = digests
        assert (theirs["class"], ours["class"]) == ("torch", "paceline")
        losses = [float.fromhex(loss.strip("[]'")) for loss in ours["losses"]]
        assert len(set(losses)) > 1, f"nothing was trained: {losses}"
        assert all(map(math.isfinite, losses))
        assert theirs["losses"] == ours["losses"]
        assert theirs["more"] == ours["more"]
        assert theirs["weights"] == ours["weights"]
    assert told[0][1]["weights"] == told[1][1]["weights"], "ranks differ"


def check_our_group(told: dict[str, list[Any]]) -> None:
    """On our backend the first feature has the bits that it has with their wrapper on gloo."""
    first = next(iter(told))
    for rank, (digests, again) in enumerate(zip(told[first], told[OUR_GROUP], strict=True)):
        assert not isinstance(again, str), f"rank {rank}:\n{again}"
        assert (again["class"], again["backend"]) == ("paceline", BACKEND_NAME)
        for part in ("losses", "more", "weights"):
            assert again[part] == digests[0][part], part
