"""Lightning's Trainer with ``strategy="paceline"``, beside its own DDP on gloo."""

from __future__ import annotations

import functools
import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from tests.integrations.table import (
    TABLE_MARKS,
    Curve,
    Side,
    Table,
    check,
    check_backends,
)
from tests.integrations.workload import dataset, make
from tests.required import needs

pytestmark = [needs("lightning"), *TABLE_MARKS]

table = Table(on_gloo_only=["compiled"])


@functools.cache
def module_class() -> Any:
    """Make the class in a rank: pytest's process need not import Lightning."""
    import lightning.pytorch as L

    class Module(L.LightningModule):  # type: ignore[misc]
        """A LightningModule that records its losses, and the wrapper that it was trained in."""

        def __init__(self, net: torch.nn.Module | None = None) -> None:
            super().__init__()
            self.net = make() if net is None else net
            self.losses: list[Any] = []
            self.wrapper: list[torch.nn.Module] = []

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            x, y = batch
            loss = F.cross_entropy(self.net(x), y)
            self.record(loss)
            return loss

        def record(self, loss: torch.Tensor) -> None:
            self.losses.append(loss.detach().clone())
            self.wrapper[:] = [self.trainer.strategy.model]
            self.log("loss", loss, sync_dist=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.net.parameters(), lr=0.01)

        def curve(self, *more: Any) -> Curve:
            return Curve(self.wrapper[0], self.losses, list(more))

    return Module


def new(net: torch.nn.Module | None = None) -> Any:
    return module_class()(net)


def trainer(side: Side, suffix: str = "", *, strategy: Any = None, **options: Any) -> Any:
    import lightning.pytorch as L

    L.seed_everything(3, verbose=False)
    options = {
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": side.folder,
        **options,
    }
    name = side.choose("ddp", "paceline") + suffix
    return L.Trainer(accelerator="cpu", devices=2, strategy=strategy or name, **options)


def batches() -> DataLoader[Any]:
    return DataLoader(dataset(), batch_size=4, shuffle=True)


def fit(side: Side, module: Any = None, suffix: str = "", **options: Any) -> Curve:
    module = module or new()
    run = trainer(side, suffix, **options)
    run.fit(module, batches())
    return module.curve(run.callback_metrics["loss"])


def strategy_class(side: Side) -> Any:
    from lightning.pytorch.strategies import DDPStrategy

    from paceline.integrations.lightning import DDPStrategy as Ours

    return side.choose(DDPStrategy, Ours)


@table
def plain(side: Side) -> Curve:
    return fit(side)


@table
def accumulate(side: Side) -> Curve:
    return fit(side, accumulate_grad_batches=3)


@table
def clip_norm(side: Side) -> Curve:
    return fit(side, gradient_clip_val=0.1)


@table
def clip_value(side: Side) -> Curve:
    return fit(side, gradient_clip_val=0.01, gradient_clip_algorithm="value")


@table
def find_unused_parameters(side: Side) -> Curve:
    return fit(side, new(make(branch=True)), "_find_unused_parameters_true")


@table
def static_graph(side: Side) -> Curve:
    return fit(side, strategy=strategy_class(side)(static_graph=True))


@table
def gradient_checkpointing(side: Side) -> Curve:
    return fit(side, new(make(checkpointed=True)))


@table
def compiled(side: Side) -> Curve:
    torch._dynamo.reset()
    net = torch.compile(make(), backend="aot_eager")
    return fit(side, new(net), max_epochs=1)


@table
def bf16_mixed(side: Side) -> Curve:
    return fit(side, precision="bf16-mixed")


@table
def fp16_mixed(side: Side) -> Curve:
    """On CPUs Lightning makes bf16 of ``precision="16-mixed"``; its plugin does as it is told."""
    from lightning.pytorch.plugins import MixedPrecision

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=3)
    curve = fit(side, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    assert scaler.get_scale() < 2.0**20, "no step was left out"
    curve.more.append(scaler.get_scale())
    return curve


@table
def bf16_true(side: Side) -> Curve:
    return fit(side, precision="bf16-true")


@table
def manual_optimization(side: Side) -> Curve:
    class Manual(module_class()):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, number: int) -> None:
            x, y = batch
            loss = F.cross_entropy(self.net(x), y)
            self.record(loss)
            self.manual_backward(loss / 2)
            if number % 2:
                optimizer = self.optimizers()
                self.clip_gradients(optimizer, gradient_clip_val=0.5)
                optimizer.step()
                optimizer.zero_grad()

    return fit(side, Manual())


@table
def two_optimizers_toggled(side: Side) -> Curve:
    class Adversaries(module_class()):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.judge = torch.nn.Linear(3, 1)
            self.automatic_optimization = False

        def training_step(self, batch: Any, _: int) -> None:
            x, y = batch
            first, second = self.optimizers()
            for optimizer, sign in ((first, 1.0), (second, -1.0)):
                self.toggle_optimizer(optimizer)
                logits = self.net(x)
                loss = sign * self.judge(logits).mean() + F.cross_entropy(logits, y)
                self.record(loss)
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
                self.untoggle_optimizer(optimizer)

        def configure_optimizers(self) -> Any:
            return (
                torch.optim.SGD(self.net.parameters(), lr=0.05),
                torch.optim.SGD(self.judge.parameters(), lr=0.05),
            )

    return fit(side, Adversaries(), "_find_unused_parameters_true", max_epochs=1)


@table
def save_and_resume(side: Side) -> Curve:
    path = os.path.join(side.folder, "half.ckpt")
    first = new()
    run = trainer(side, max_epochs=1)
    run.fit(first, batches())
    run.save_checkpoint(path)
    second = new()
    trainer(side, max_epochs=2).fit(second, batches(), ckpt_path=path)
    assert next(iter(torch.load(path, weights_only=False)["state_dict"])) == "net.first.0.weight"
    return Curve(second.wrapper[0], first.losses + second.losses)


@table
def sharded_optimizer(side: Side) -> Curve:
    """ZeRO's state comes together for the checkpoint."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    class Sharded(module_class()):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            return ZeroRedundancyOptimizer(self.net.parameters(), torch.optim.AdamW, lr=0.01)

    path = os.path.join(side.folder, "sharded.ckpt")
    module = Sharded()
    run = trainer(side, max_epochs=1)
    run.fit(module, batches())
    run.save_checkpoint(path)
    saved = torch.load(path, weights_only=False)["optimizer_states"][0]["state"]
    assert len(saved) == len(list(module.net.parameters()))
    return module.curve(*(saved[index]["exp_avg"] for index in sorted(saved)))


@table
def ignored_buffer(side: Side) -> Curve:
    """Lightning hands on which names the wrapper leaves alone: each rank keeps its own mean."""
    name = "net.first.1.running_mean"
    module = new()
    module._ddp_params_and_buffers_to_ignore = [name]
    curve = fit(side, module)
    curve.more.append(dict(module.named_buffers())[name])
    return curve


@table
def callbacks(side: Side) -> Curve:
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

    class Validated(module_class()):  # type: ignore[misc]
        def validation_step(self, batch: Any, _: int) -> None:
            x, y = batch
            self.log("val", F.cross_entropy(self.net(x), y), sync_dist=True)

    module = Validated()
    best = ModelCheckpoint(dirpath=side.folder, monitor="val", save_last=True)
    stop = EarlyStopping(monitor="val", patience=2)
    run = trainer(side, callbacks=[best, stop], enable_checkpointing=True, max_epochs=4)
    run.fit(module, batches(), DataLoader(dataset(16), batch_size=4))
    scores = run.validate(module, DataLoader(dataset(16), batch_size=4), verbose=False)
    return module.curve(best.best_model_score, scores[0]["val"])


@table
def schedule(side: Side) -> Curve:
    """The rate falls with every batch; Lightning steps the scheduler, and a callback watches it."""
    from lightning.pytorch.callbacks import Callback

    class Scheduled(module_class()):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)
            return [optimizer], [{"scheduler": rates, "interval": "step"}]

    class Watches(Callback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.rates: list[float] = []

        def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
            self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    watch = Watches()
    curve = fit(side, Scheduled(), callbacks=[watch])
    assert len(set(watch.rates)) > 1
    curve.more += watch.rates
    return curve


@table
def weight_averaging_swa(side: Side) -> Curve:
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    swa = StochasticWeightAveraging(swa_lrs=0.005, swa_epoch_start=1, device=None)
    return fit(side, callbacks=[swa], max_epochs=4)


@table
def weight_averaging_ema(side: Side) -> Curve:
    from lightning.pytorch.callbacks import EMAWeightAveraging

    return fit(side, callbacks=[EMAWeightAveraging(decay=0.9)])


@table
def torchmetrics(side: Side) -> Curve:
    from torchmetrics.classification import MulticlassAccuracy

    class Measured(module_class()):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.accuracy = MulticlassAccuracy(num_classes=3)

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            x, y = batch
            logits = self.net(x)
            self.accuracy(logits, y)
            self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
            loss = F.cross_entropy(logits, y)
            self.record(loss)
            return loss

    module = Measured()
    run = trainer(side)
    run.fit(module, batches())
    return module.curve(run.callback_metrics["accuracy"])


@table
def gather_and_reduce(side: Side) -> Curve:
    class Gathers(module_class()):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.gathered: list[torch.Tensor] = []

        def on_train_epoch_end(self) -> None:
            last = self.losses[-1]
            self.gathered.append(self.all_gather(last))
            self.gathered.append(self.trainer.strategy.reduce(last.clone(), reduce_op="mean"))

    module = Gathers()
    trainer(side).fit(module, batches())
    assert [part.numel() for part in module.gathered] == [2, 1, 2, 1]
    return module.curve(*module.gathered)


@table
def lora(side: Side) -> Curve:
    from peft import LoraConfig, get_peft_model

    net = get_peft_model(make(), LoraConfig(r=2, target_modules=["last", "middle.0"]))
    return fit(side, new(net))


@table
def uneven_inputs(side: Side) -> Curve:
    """Lightning's sampler pads; 45 samples are 23 for each rank, 3 in the last batch."""
    module = new()
    run = trainer(side)
    run.fit(module, DataLoader(dataset(45), batch_size=4))
    return module.curve()


@pytest.fixture(scope="module")
def told() -> dict[str, list[Any]]:
    return table.run()


@pytest.mark.parametrize("name", table.features)
def test_feature(name: str, told: dict[str, list[Any]]) -> None:
    check(told[name])


def test_on_both_backends(told: dict[str, list[Any]]) -> None:
    check_backends(table, told)
