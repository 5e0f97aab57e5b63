"""Lets Lightning start ranks by fork and by spawn, which pickles our strategy."""

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch.demos.boring_classes import BoringModel


class Module(BoringModel):
    """Leaves a file for each rank: processes that were started cannot be asked."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def on_train_end(self) -> None:
        wrapper: Any = self.trainer.strategy.model
        found = f"{dist.get_backend()} {dist.get_world_size()} {type(wrapper).__module__}"
        (self.folder / f"rank{dist.get_rank()}").write_text(found)


def train(fabric: Any, folder: Path) -> None:
    """What Fabric's ``launch(function)`` calls in each process that it starts."""
    model = fabric.setup(torch.nn.Linear(2, 1))
    fabric.backward(model(torch.full((1, 2), 2.0 + 2.0 * fabric.global_rank)).sum())
    gradient = model.module.weight.grad.tolist()
    (folder / f"rank{fabric.global_rank}").write_text(f"{dist.get_backend()} {gradient}")


def main(folder: Path) -> None:
    for start in ("fork", "notebook", "spawn"):
        (folder / start).mkdir()
        trainer = L.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=f"paceline_{start}",
            max_steps=2,
            limit_val_batches=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Module(folder / start))
    (folder / "fabric").mkdir()
    fabric = Fabric(accelerator="cpu", devices=2, strategy="paceline_spawn")
    fabric.launch(train, folder / "fabric")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
