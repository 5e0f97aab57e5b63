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
import torch.nn.functional as F
from torch.utils.data import DataLoader

from tests.integrations import ray_replicas
from tests.integrations.table import RANKS, Curve, Side, Table, bits, check, needs
from tests.integrations.workload import Averages, dataset, make

pytestmark = [needs("ray"), pytest.mark.slow, pytest.mark.timeout(1500)]
ROOT = Path(__file__).parents[2]
DEADLINE_S = 1400

table = Table()


def prepared(module: torch.nn.Module, samples: int = 48, **options: Any) -> Any:
    from ray.train.torch import prepare_data_loader, prepare_model

    model = prepare_model(module, parallel_strategy_kwargs=options)
    loader = prepare_data_loader(DataLoader(dataset(samples), batch_size=4, shuffle=True))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01), loader


def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def train(module: torch.nn.Module, **options: Any) -> Curve:
    model, optimizer, loader = prepared(module, **options)
    return Curve(model, [step(model, optimizer, x, y) for x, y in loader])


@table
def plain(_: Side) -> Curve:
    return train(make())


@table
def accumulate(_: Side) -> Curve:
    model, optimizer, loader = prepared(make())
    losses = []
    for number, (x, y) in enumerate(loader):
        if number % 2 == 0:
            with model.no_sync():
                losses.append(F.cross_entropy(model(x), y))
                losses[-1].backward()
        else:
            losses.append(F.cross_entropy(model(x), y))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
    return Curve(model, losses)


@table
def clip_gradients(_: Side) -> Curve:
    model, optimizer, loader = prepared(make())
    losses, norms = [], []
    for x, y in loader:
        optimizer.zero_grad()
        losses.append(F.cross_entropy(model(x), y))
        losses[-1].backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
    return Curve(model, losses, norms)


@table
def uneven_inputs(_: Side) -> Curve:
    model, optimizer, _loader = prepared(make().eval())
    x, y = dataset().tensors
    losses = []
    with model.join():
        for number in range(3 + 2 * dist.get_rank()):
            part = slice(4 * number, 4 * number + 4)
            losses.append(step(model, optimizer, x[part], y[part]))
    return Curve(model, losses)


@table
def find_unused_parameters(_: Side) -> Curve:
    return train(make(branch=True), find_unused_parameters=True)


@table
def gradient_checkpointing(_: Side) -> Curve:
    return train(make(checkpointed=True))


@table
def bf16(_: Side) -> Curve:
    model, optimizer, loader = prepared(make())
    losses = []
    for x, y in loader:
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss)
    return Curve(model, losses)


@table
def save_and_resume(side: Side) -> Curve:
    model, optimizer, loader = prepared(make())
    losses = [step(model, optimizer, x, y) for x, y in loader]
    path = os.path.join(side.folder, "state.pt")
    if dist.get_rank() == 0:
        torch.save({"model": model.module.state_dict(), "optim": optimizer.state_dict()}, path)
    dist.barrier()
    state = torch.load(path, weights_only=True)
    module = make()
    module.load_state_dict(state["model"])
    model, optimizer, loader = prepared(module)
    optimizer.load_state_dict(state["optim"])
    return Curve(model, losses + [step(model, optimizer, x, y) for x, y in loader])


@table
def averages_ema_and_swa(_: Side) -> Curve:
    model, optimizer, loader = prepared(make())
    averages = Averages(model.module)
    losses = []
    for x, y in loader:
        losses.append(step(model, optimizer, x, y))
        averages.update()
    return Curve(model, losses, averages.parameters())


@table
def compiled(_: Side) -> Curve:
    torch._dynamo.reset()
    return train(torch.compile(make(), backend="aot_eager"))


@table
def torchmetrics(_: Side) -> Curve:
    from torchmetrics.classification import MulticlassAccuracy

    model, optimizer, loader = prepared(make())
    accuracy = MulticlassAccuracy(num_classes=3)
    losses = []
    for x, y in loader:
        accuracy.update(model(x), y)
        losses.append(step(model, optimizer, x, y))
    return Curve(model, losses, [accuracy.compute()])


@table
def gather_and_reduce(_: Side) -> Curve:
    """What Ray leaves to the script: collectives on its group."""
    curve = train(make())
    last = curve.losses[-1].detach()
    gathered = [torch.zeros_like(last) for _ in range(RANKS)]
    dist.all_gather(gathered, last)
    mean = last.clone()
    dist.all_reduce(mean)
    curve.more = [*gathered, mean]
    return curve


@table
def lora(_: Side) -> Curve:
    from peft import LoraConfig, get_peft_model

    return train(get_peft_model(make(), LoraConfig(r=2, target_modules=["last", "middle.0"])))


def on_worker(config: dict[str, Any]) -> None:
    """Run every feature, and write what it gave."""
    told = {"backend": dist.get_backend()}
    for name, feature in table.features.items():
        folder = os.path.join(config["folder"], name)
        os.makedirs(folder, exist_ok=True)
        torch.manual_seed(1)
        try:
            told[name] = feature(Side(config["is_ours"], folder)).digest()
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
        pairs = [[side[rank][name] for side in sides] for rank in range(RANKS)]
        found[name] = [next((d for d in pair if isinstance(d, str)), pair) for pair in pairs]
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
