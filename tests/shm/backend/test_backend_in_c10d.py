"""What c10d and torch's tools ask of a group besides collectives: the same as of gloo's.

Each use runs on a gloo group and on a Paceline group, and returns the same.
"""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from paceline.native.extension import missing_reason
from paceline.testing import run_ranks
from paceline.torch_private.groups import group_timeout

pytestmark = pytest.mark.skipif(missing_reason() is not None, reason=str(missing_reason()))
CPU = torch.device("cpu")


def world() -> Any:
    return dist.group.WORLD


def has_a_cpu_backend(_: Path) -> Any:
    backend = world()._get_backend(CPU)
    return isinstance(backend, dist.ProcessGroupGloo), CPU in world()._device_types


def is_the_same_backend_twice(_: Path) -> Any:
    return type(world()._get_backend(CPU)) is type(world()._get_backend(CPU))


def says_what_it_supports(_: Path) -> Any:
    backend = world()._get_backend(CPU)
    return backend.supports_coalescing, backend.supports_splitting


def has_options(_: Path) -> Any:
    return type(world()._get_backend(CPU).options).__name__


def has_no_backend_for_other_devices(_: Path) -> Any:
    with pytest.raises(RuntimeError, match="No backend type associated with device type meta"):
        world()._get_backend(torch.device("meta"))


def chooses_the_cpu_for_objects(_: Path) -> Any:
    return distributed_c10d._get_object_coll_device()


def takes_another_timeout(_: Path) -> Any:
    before = group_timeout(world())
    distributed_c10d._set_pg_timeout(timedelta(seconds=77))
    changed = group_timeout(world())
    assert before is not None
    distributed_c10d._set_pg_timeout(before)
    return changed, group_timeout(world()) == before


def exchanges_in_a_batch(_: Path) -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    sent, received = torch.full((3,), float(rank)), torch.zeros(3)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, sent, (rank + 1) % size),
            dist.P2POp(dist.irecv, received, (rank - 1) % size),
        ]
    )
    for work in works:
        work.wait()
    return received.tolist()


def has_a_monitored_barrier(_: Path) -> Any:
    return dist.monitored_barrier(timeout=timedelta(seconds=100), wait_all_ranks=True)


def coalesces(_: Path) -> Any:
    tensors = [torch.ones(3) * dist.get_rank() for _ in range(3)]
    with distributed_c10d._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    return [tensor.tolist() for tensor in tensors]


def saves_a_checkpoint_in_the_background(folder: Path) -> Any:
    name = folder / dist.get_backend()
    dcp.async_save({"a": torch.arange(4.0), "n": 3}, checkpoint_id=name).result(100)
    loaded = {"a": torch.zeros(4), "n": 0}
    dcp.load(loaded, checkpoint_id=name)
    return loaded["a"], loaded["n"]  # type: ignore[attr-defined]


def shards_an_optimizer(_: Path) -> Any:
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    optimizer = ZeroRedundancyOptimizer(layer.parameters(), torch.optim.Adam, lr=0.1)
    layer(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return layer.weight.tolist()


def makes_a_mesh(_: Path) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("a", "b"))
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=mesh["a"].get_group())
    return tensor.tolist()


def compiles_a_collective(_: Path) -> Any:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def double_and_sum(tensor: torch.Tensor) -> torch.Tensor:
        return all_reduce(tensor * 2, "sum", world()) + 1

    return double_and_sum(torch.ones(3)).tolist()


def compiles_a_step_of_torchs_wrapper(_: Path) -> Any:
    torch.manual_seed(0)
    model = TorchDDP(nn.Linear(4, 4))

    @torch.compile(backend="aot_eager")
    def step(inputs: torch.Tensor) -> torch.Tensor:
        loss = model(inputs).pow(2).mean()
        loss.backward()
        return loss

    step(torch.ones(2, 4) * (1 + dist.get_rank()))
    return model.module.weight.grad.tolist()


USES: list[Callable[[Path], Any]] = [
    compiles_a_collective,
    compiles_a_step_of_torchs_wrapper,
    has_a_cpu_backend,
    is_the_same_backend_twice,
    says_what_it_supports,
    has_options,
    has_no_backend_for_other_devices,
    chooses_the_cpu_for_objects,
    takes_another_timeout,
    exchanges_in_a_batch,
    has_a_monitored_barrier,
    coalesces,
    saves_a_checkpoint_in_the_background,
    shards_an_optimizer,
    makes_a_mesh,
]


def run_uses(folder: Path) -> dict[str, str]:
    found = {}
    warnings.simplefilter("ignore")  # torch's own: of checkpoints, of compiled steps
    for use in USES:
        try:
            found[use.__name__] = str(use(folder))
        except Exception as error:
            found[use.__name__] = f"{type(error).__name__}: {error}"
    return found


@pytest.fixture(scope="module")
def of_both(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, str]]]:
    folder = tmp_path_factory.mktemp("uses")
    return {
        backend: run_ranks(2, run_uses, folder, backend=backend) for backend in ("gloo", "paceline")
    }


@pytest.mark.parametrize("name", [use.__name__ for use in USES])
def test_like_gloo(name: str, of_both: dict[str, list[dict[str, str]]]) -> None:
    for of_gloo, of_ours in zip(of_both["gloo"], of_both["paceline"], strict=True):
        assert "Error" not in of_gloo[name]
        assert of_ours[name] == of_gloo[name]


def torch_barrier_of_other_groups() -> None:
    dist.monitored_barrier(timeout=timedelta(seconds=100))
    group = dist.new_group(backend="gloo")
    dist.monitored_barrier(group, timeout=timedelta(seconds=100))


def test_monitored_barrier_leaves_other_groups_to_torch() -> None:
    run_ranks(2, torch_barrier_of_other_groups, backend="paceline")


class TestFlightRecorder:
    """``TORCH_FR_BUFFER_SIZE`` and ``torchfrtrace``."""

    def test_has_our_collectives(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "50")
        for found in run_ranks(2, record_some, backend="paceline"):
            dump = json.loads(found)
            names = [entry["profiling_name"] for entry in dump["entries"]]
            assert names == ["gloo:all_reduce", "gloo:all_gather", "gloo:barrier", "gloo:broadcast"]
            sizes = [entry["output_sizes"] for entry in dump["entries"]]
            assert sizes == [[[3]], [[3], [3]], [], [[5]]]
            assert {entry["state"] for entry in dump["entries"]} == {"completed"}
            assert {group["ranks"] for group in dump["pg_config"].values()} == {"[0, 1]"}

    def test_keeps_the_latest(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "2")
        dump = json.loads(run_ranks(2, record_some, backend="paceline")[0])
        names = [entry["profiling_name"] for entry in dump["entries"]]
        assert names == ["gloo:barrier", "gloo:broadcast"]

    def test_is_off_by_default(self) -> None:
        assert "entries" not in json.loads(run_ranks(2, record_some, backend="paceline")[0])

    def test_torchs_tool_names_the_rank_that_did_not_come(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "50")
        run_ranks(2, dump_while_rank_0_waits, tmp_path, backend="paceline")
        command = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace"]
        told = subprocess.run(
            [*command, str(tmp_path), "--prefix", "rank_"], capture_output=True, text=True
        )
        text = told.stdout + told.stderr
        assert "collective: gloo:all_reduce" in text
        assert "missing ranks: {1}" in text
        assert "dump_while_rank_0_waits" in text


def record_some() -> str:
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    dist.all_gather([torch.empty(3), torch.empty(3)], tensor)
    dist.barrier()
    dist.broadcast(torch.ones(5), 0, group=dist.new_group(backend="paceline"))
    text: bytes = torch._C._distributed_c10d._dump_fr_trace_json()
    return text.decode()


def dump_while_rank_0_waits(folder: Path) -> None:
    rank = dist.get_rank()
    dist.all_reduce(torch.ones(3))
    work = dist.all_reduce(torch.ones(7), async_op=True) if rank == 0 else None
    (folder / f"rank_{rank}").write_bytes(torch._C._distributed_c10d._dump_fr_trace())
    if work is None:
        dist.all_reduce(torch.ones(7))
    else:
        work.wait()
