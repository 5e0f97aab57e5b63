"""What the tests of elastic jobs with shards train; ranks die, join and leave at given steps.

Run as an elastic job. ``argv[1]`` is a directory: each rank that ends well writes
``done-<member>`` there, with a hash of its whole state. ``argv[2]`` is JSON: how many steps, and
the faults; with ``changes``, the step whose update is another one than alone. Each fault fires once
in the job, at a point of a step, in the rank with that number.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))
from paceline import elastic
from tests.shards import alone
from tests.shards.drawn import Drawn
from tests.shards.trainings import run_shard

OUT = Path(sys.argv[1])
PLAN: dict[str, Any] = json.loads(sys.argv[2])
STEPS: int = PLAN["steps"]
MEMBER = os.environ.get("PACELINE_ELASTIC_MEMBER", "0")


def fault(point: str, step: int) -> None:
    """Fire what is planned for this moment, once in the whole job."""
    for number, (where, when, rank) in enumerate(PLAN.get("faults", ())):
        if point == where and step >= when and dist.get_rank() == rank:
            try:
                (OUT / f"fired-{number}").touch(exist_ok=False)
            except FileExistsError:
                continue
            os.kill(os.getpid(), signal.SIGKILL)


torch.set_num_threads(1)
dist.init_process_group("gloo")
if "drawn" in PLAN:
    drawn = Drawn(**PLAN["drawn"])
    training = alone.Training(drawn.case(), drawn.transport)
else:
    named = alone.ELASTIC[PLAN.get("case", "cnn with dropout")]
    training = alone.Training(named, PLAN.get("transport", "auto"))
ddp, loader, case = training.ddp, training.loader, training.case
state = elastic.State(
    model=ddp,
    loader=loader,
    step=0,
    epoch=0,
    **{f"optimizer{number}": each for number, each in enumerate(training.optimizers)},
    **{f"scheduler{number}": each for number, each in enumerate(training.schedulers)},
)


def train_round(batch: Any) -> None:
    """One round; ranks may die before their first shard or their last."""
    owned = ddp.shard_shares.owned
    following = iter(owned)

    def train_shard(micro: Any) -> None:
        shard = next(following)
        if shard == owned[0]:
            fault("shard", state.step)
        if shard == owned[-1]:
            fault("last shard", state.step)
        run_shard(case, ddp, shard, *micro)

    if case.in_turns:
        ddp.run_shards(batch, train_shard)
        return
    for micro in ddp.shards(batch):
        train_shard(micro)


def pause_s() -> float:
    return 0.0 if (OUT / "hurry").exists() else PLAN.get("pause_s", 0.0)


@elastic.run
def train(state: elastic.State) -> None:
    while state.step < STEPS:
        loader.set_epoch(state.epoch)
        for number, batch in enumerate(loader, 1):
            train_round(batch)
            if number % case.accumulate:
                continue
            fault("between", state.step)
            if state.step == PLAN.get("changes"):
                training.optimizers[0].param_groups[0]["weight_decay"] = 0.5
            training.update()
            state.step += 1
            if state.step % training.steps_in_epoch == 0:
                state.epoch += 1
            state.commit()
            time.sleep(pause_s())
            if state.step >= STEPS:
                return


train(state)
result = {
    "digest": training.digest(),
    "step": state.step,
    "round": ddp.shard_round,
    "world": dist.get_world_size(),
}
(OUT / f"done-{MEMBER}").write_text(json.dumps(result))
