"""Features of a framework, each run with its own DDP and with ours, on the same two ranks.

A feature is a function of a side (theirs or ours) that trains and returns a :class:`Curve`. The
ranks run all features of a file one after the other: to import a framework takes longer than most
features. Then they run our side once more on a group of our backend, which is what our line makes
where there is none yet. The tests look at one feature each: all curves must be the same, bit for
bit.
"""

from __future__ import annotations

import gc
import math
import os
import socket
import tempfile
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.config import BACKEND_NAME
from paceline.testing import run_ranks
from paceline.torch_private.modules import TorchDDP

RANKS = 2
OUR_GROUP = "on our group"

DEADLINE_S = 580
"""For all features of a file; it only ends a hang, and pytest's own is a little later."""
TABLE_MARKS = [
    pytest.mark.slow,
    pytest.mark.timeout(DEADLINE_S + 20),
    pytest.mark.filterwarnings("default"),
]


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
    """The features of one framework.

    Args:
        on_gloo_only: Features that take too long to run them once more, on our backend.
    """

    def __init__(self, *, on_gloo_only: Collection[str] = ()) -> None:
        self.features: dict[str, Feature] = {}
        self.on_gloo_only = on_gloo_only

    def __call__(self, feature: Feature) -> Feature:
        self.features[feature.__name__] = feature
        return feature

    def run(self, **env: str) -> dict[str, list[Any]]:
        """Return what each rank tells of each feature: two or three digests, or a traceback."""
        with tempfile.TemporaryDirectory(prefix="paceline-table-") as folder:
            told = run_ranks(
                RANKS,
                run_all,
                list(self.features.values()),
                [name for name in self.features if name not in self.on_gloo_only],
                folder,
                timeout_s=DEADLINE_S,
                env={**torchrun_variables(), **env},
            )
        return {name: [rank[name] for rank in told] for name in self.features}


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


def run_all(features: list[Feature], again: list[str], folder: str) -> dict[str, Any]:
    """In a rank: run every feature with both wrappers, whatever became of those before."""
    os.environ["LOCAL_WORLD_SIZE"] = str(RANKS)
    told: dict[str, Any] = {feature.__name__: [] for feature in features}
    for feature in features:
        for is_ours in (False, True):
            told[feature.__name__].append(outcome(feature, is_ours, folder))
    gc.collect()  # wrappers of the group that ends
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group(BACKEND_NAME, init_method="env://")
    for feature in features:
        if feature.__name__ in again:
            told[feature.__name__].append(outcome(feature, True, os.path.join(folder, OUR_GROUP)))
    return told


def outcome(feature: Feature, is_ours: bool, folder: str) -> Any:
    """A digest, or a traceback."""
    try:
        return run_side(feature, is_ours, folder)
    except Exception:
        return traceback.format_exc()


def run_side(feature: Feature, is_ours: bool, folder: str) -> dict[str, Any]:
    own = os.path.join(folder, f"{feature.__name__}-{is_ours}")
    os.makedirs(own, exist_ok=True)
    torch.manual_seed(1)
    try:
        return {**feature(Side(is_ours, own)).digest(), "backend": dist.get_backend()}
    finally:
        dist.barrier()


def check(told: list[Any]) -> None:
    """Both sides have trained, each with its own wrapper, and every number is the same."""
    for rank, (theirs, *ours) in enumerate(told):
        for digest in (theirs, *ours):
            assert not isinstance(digest, str), f"rank {rank}:\n{digest}"
        assert (theirs["class"], theirs["backend"]) == ("torch", "gloo")
        losses = [float.fromhex(loss.strip("[]'")) for loss in theirs["losses"]]
        assert len(set(losses)) > 1, f"nothing was trained: {losses}"
        assert all(map(math.isfinite, losses))
        for digest in ours:
            assert digest["class"] == "paceline"
            for part in ("losses", "more", "weights"):
                assert digest[part] == theirs[part], f"{part} on {digest['backend']}"
    assert told[0][1]["weights"] == told[1][1]["weights"], "ranks differ"


def check_backends(table: Table, told: dict[str, list[Any]]) -> None:
    """Our side was compared on gloo and, but for what takes too long, on our own backend."""
    for name, ranks in told.items():
        wanted = ["gloo", "gloo", *([] if name in table.on_gloo_only else [BACKEND_NAME])]
        for digests in ranks:
            assert not any(isinstance(digest, str) for digest in digests), name
            assert [digest["backend"] for digest in digests] == wanted, name
