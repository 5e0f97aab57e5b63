"""Ray Train with our TorchConfig, beside its own on gloo.

One job for each side: its training function runs all features on two workers, one after the
other, and leaves what they gave in files. Then the files are compared as in the other tables.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.integrations import ray_replicas
from tests.integrations.ray_features import prepared, step, table
from tests.integrations.table import RANKS, Side, bits, check
from tests.integrations.workload import make
from tests.required import needs

pytestmark = [needs("ray"), pytest.mark.slow, pytest.mark.timeout(1500)]
ROOT = Path(__file__).parents[2]
DEADLINE_S = 1400


def on_worker(config: dict[str, Any]) -> None:
    """Run every feature, and write what it gave."""
    told: dict[str, Any] = {"backend": dist.get_backend()}
    for name, feature in table.features.items():
        folder = os.path.join(config["folder"], name)
        os.makedirs(folder, exist_ok=True)
        torch.manual_seed(1)
        try:
            curve = feature(Side(config["is_ours"], folder))
            told[name] = {**curve.digest(), "backend": dist.get_backend()}
        except Exception:
            told[name] = traceback.format_exc()
        dist.barrier()
    path = os.path.join(config["folder"], f"rank{dist.get_rank()}.json")
    Path(path).write_text(json.dumps(told))
    report()


def report() -> None:
    """Give Ray a checkpoint from rank 0, as training functions do."""
    import ray.train

    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if dist.get_rank() == 0:
            Path(folder, "model.txt").write_text("weights")
            checkpoint = ray.train.Checkpoint.from_directory(folder)
        ray.train.report({"features": len(table.features)}, checkpoint=checkpoint)


KILLED_AFTER, STEPS = 2, 5


def dies_once(config: dict[str, Any]) -> None:
    """Rank 1 is killed after two steps; Ray starts both workers again, from the checkpoint."""
    import ray.train

    model, optimizer, loader = prepared(make().eval())
    batches = list(loader)[:STEPS]
    saved = ray.train.get_checkpoint()
    first = resume(saved, model, optimizer) if saved is not None else 0
    for number in range(first, STEPS):
        step(model, optimizer, *batches[number])
        save(number + 1, model, optimizer)
        if number + 1 == KILLED_AFTER and saved is None:
            ray.train.get_all_reported_checkpoints()  # waits until Ray has this one
            if dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
    undisturbed, its_optimizer, _ = prepared(make().eval())
    for batch in batches:
        step(undisturbed, its_optimizer, *batch)
    told = {
        "first": first,
        "backend": dist.get_backend(),
        "resumed": [bits(p) for p in model.parameters()],
        "undisturbed": [bits(p) for p in undisturbed.parameters()],
    }
    Path(config["folder"], f"died{dist.get_rank()}.json").write_text(json.dumps(told))


def save(number: int, model: Any, optimizer: Any) -> None:
    import ray.train

    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if dist.get_rank() == 0:
            state = {"model": model.module.state_dict(), "optim": optimizer.state_dict()}
            torch.save({**state, "step": number}, Path(folder, "state.pt"))
            checkpoint = ray.train.Checkpoint.from_directory(folder)
        ray.train.report({"step": number}, checkpoint=checkpoint)


def resume(saved: Any, model: Any, optimizer: Any) -> int:
    with saved.as_directory() as folder:
        state = torch.load(Path(folder, "state.pt"), weights_only=True)
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optim"])
    return int(state["step"])


def counting_callback(folder: str) -> Any:
    """What Ray's controller calls when workers report."""
    from ray.train import UserCallback

    class Counts(UserCallback):  # type: ignore[misc]
        def after_report(self, run_context: Any, metrics: list[Any], checkpoint: Any) -> None:
            (Path(folder) / "reports").open("a").write(f"{[m['features'] for m in metrics]}")

    return Counts()


def run_jobs(folder: str) -> None:
    """In a process of its own: Ray's threads and sockets end with it."""
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig as Theirs
    from ray.train.torch import TorchTrainer

    from paceline.integrations.ray import TorchConfig as Ours

    ray.init(num_cpus=RANKS, include_dashboard=False, log_to_driver=False)
    for is_ours, config in ((False, Theirs()), (True, Ours())):
        own = os.path.join(folder, "ours" if is_ours else "theirs")
        os.makedirs(own)
        result = TorchTrainer(
            on_worker,
            train_loop_config={"folder": own, "is_ours": is_ours},
            torch_config=config,
            scaling_config=ScalingConfig(num_workers=RANKS, use_gpu=False),
            run_config=RunConfig(
                storage_path=folder, name=f"job-{is_ours}", callbacks=[counting_callback(own)]
            ),
        ).fit()
        with result.checkpoint.as_directory() as found:
            assert Path(found, "model.txt").read_text() == "weights"
    run_dying_job(folder)
    ray_replicas.run_job(folder)
    ray.shutdown()


def run_dying_job(folder: str) -> None:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from paceline.integrations.ray import TorchConfig as Ours

    TorchTrainer(
        dies_once,
        train_loop_config={"folder": folder},
        torch_config=Ours(),
        scaling_config=ScalingConfig(num_workers=RANKS, use_gpu=False),
        run_config=RunConfig(
            storage_path=folder, name="dies", failure_config=FailureConfig(max_failures=1)
        ),
    ).fit()


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    folder = tmp_path_factory.mktemp("ray")
    code = f"from tests.integrations.test_ray import run_jobs; run_jobs({str(folder)!r})"
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    env |= {"RAY_TRAIN_V2_ENABLED": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    env |= {"RAY_worker_niceness": "0"}  # 15 by default: on a busy machine nothing would happen
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert result.returncode == 0, result.stderr[-5000:]
    sides = [
        [json.loads((folder / side / f"rank{rank}.json").read_text()) for rank in range(RANKS)]
        for side in ("theirs", "ours")
    ]
    found: dict[str, list[Any]] = {"backend": [side[0]["backend"] for side in sides]}
    found["reports"] = [(folder / side / "reports").read_text() for side in ("theirs", "ours")]
    found["folder"] = [folder]
    found["died"] = [json.loads((folder / f"died{rank}.json").read_text()) for rank in range(RANKS)]
    for name in table.features:
        found[name] = [[side[rank][name] for side in sides] for rank in range(RANKS)]
    return found


@pytest.mark.parametrize("name", table.features)
def test_feature(name: str, told: dict[str, list[Any]]) -> None:
    check(told[name])


def test_the_group_is_ours(told: dict[str, list[Any]]) -> None:
    assert told["backend"] == ["gloo", "paceline"]


def test_callbacks_hear_of_both_workers(told: dict[str, list[Any]]) -> None:
    theirs, ours = told["reports"]
    assert theirs == ours == f"{[len(table.features)] * RANKS}"


def test_a_killed_worker_is_replaced(told: dict[str, list[Any]]) -> None:
    """Both start again, on a new group of ours, from the checkpoint."""
    for rank in told["died"]:
        assert (rank["first"], rank["backend"]) == (KILLED_AFTER, "paceline")
        assert rank["resumed"] == rank["undisturbed"]


def test_the_others_outlive_a_killed_worker(told: dict[str, list[Any]]) -> None:
    """Replica groups: rank 1 keeps its process, and the bits are those of no death at all."""
    ray_replicas.check(told["folder"][0])
