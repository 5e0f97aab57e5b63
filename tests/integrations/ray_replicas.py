"""A training whose workers outlive each other: on Ray (test_ray.py), and without it, where each
process is started by test_ray_job.py and gets its place as a line of JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader

from paceline import DistributedDataParallel, elastic
from tests.integrations.table import RANKS, bits
from tests.integrations.workload import dataset, make

KILLED_AFTER, GLOBAL_BATCH, LR = 2, 8, 0.01


def outlives(config: dict[str, Any]) -> None:
    """On a worker of Ray's."""
    from ray.train.torch import prepare_model

    train_and_die(Path(config["folder"]), prepare_model(make().eval()))


def train_and_die(folder: Path, model: torch.nn.Module) -> None:
    """Rank 0 is killed after two steps, once; rank 1 keeps its process, and both end."""
    data = dataset()
    sampler = elastic.DistributedSampler(data, global_batch=GLOBAL_BATCH)
    loader = DataLoader(data, batch_sampler=sampler, generator=torch.Generator())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    state = elastic.State(model=model, optimizer=optimizer, sampler=sampler, step=0)
    (folder / f"began-{os.getpid()}").touch()

    @elastic.run
    def train(state: Any) -> None:
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            state.step += 1
            state.commit()
            if state.step == KILLED_AFTER and dist.get_rank() == 0 and is_first(folder):
                os.kill(os.getpid(), signal.SIGKILL)

    train(state)
    told = {
        "class": type(model).__module__.partition(".")[0],
        "backend": dist.get_backend(),
        "pid": os.getpid(),
        "worlds": [event.world for event in state.events],
        "steps": state.step,
        "weights": [bits(p) for p in model.parameters()],
        "undisturbed": [bits(p) for p in undisturbed()],
    }
    (folder / f"outlived{dist.get_rank()}.json").write_text(json.dumps(told))


def is_first(folder: Path) -> bool:
    try:
        (folder / "killed").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def undisturbed() -> list[Any]:
    """The same training without an elastic job around it."""
    data = dataset()
    sampler = elastic.DistributedSampler(data, global_batch=GLOBAL_BATCH)
    model = DistributedDataParallel(make().eval())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    for x, y in DataLoader(data, batch_sampler=sampler, generator=torch.Generator()):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return list(model.parameters())


def run_job(folder: str) -> None:
    """With Ray running."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from paceline.integrations.ray_elastic import ElasticTorchConfig

    TorchTrainer(
        outlives,
        train_loop_config={"folder": folder},
        torch_config=ElasticTorchConfig(hold_s=120),
        scaling_config=ScalingConfig(num_workers=RANKS, use_gpu=False),
        run_config=RunConfig(
            storage_path=folder, name="outlives", failure_config=FailureConfig(max_failures=1)
        ),
    ).fit()


def check(folder: Path) -> None:
    """One process is killed, one takes its place, and one goes on."""
    told = [json.loads((folder / f"outlived{rank}.json").read_text()) for rank in range(RANKS)]
    began = {int(path.name.split("-")[1]) for path in folder.glob("began-*")}
    assert len(began) == RANKS + 1
    assert {each["pid"] for each in told} < began
    assert [each["worlds"] for each in told] == [[RANKS], [RANKS, RANKS]]
    for each in told:
        assert (each["class"], each["backend"]) == ("paceline", "paceline")
        assert each["steps"] == len(dataset()) // GLOBAL_BATCH
        assert each["weights"] == each["undisturbed"] == told[0]["weights"]


def main() -> None:
    """Without Ray: the folder is the argument."""
    place = json.loads(sys.stdin.readline())
    os.environ |= place["environ"]
    dist.init_process_group(
        "paceline", init_method=f"file://{place['meeting']}", rank=0, world_size=1
    )
    train_and_die(Path(sys.argv[1]), DistributedDataParallel(make().eval()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
