"""Train a small GPT with Transformers' Trainer; only the import of Trainer is Paceline's.

    torchrun --nproc-per-node 2 examples/transformers_trainer.py

It also runs alone. The text is made here, nothing is loaded.
"""

from __future__ import annotations

import tempfile

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel

from paceline.integrations.transformers import Trainer, TrainingArguments

LENGTH, VOCABULARY = 32, 40


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """Sequences that count upwards by a step of their own, which the model has to find out."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        start = torch.randint(VOCABULARY, (count, 1), generator=generator)
        stride = torch.randint(1, 4, (count, 1), generator=generator)
        self.tokens = (start + stride * torch.arange(LENGTH)) % VOCABULARY

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def main() -> None:
    """Train, and print the mean loss."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, use_cpu=True, per_device_train_batch_size=16, num_train_epochs=6,
            learning_rate=5e-3, logging_steps=12, save_strategy="no", report_to=[], seed=0,
            disable_tqdm=True, dataloader_pin_memory=False, ddp_find_unused_parameters=False,
        )  # fmt: skip
        config = GPT2Config(
            vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4,
            bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=Sentences(768))
        trainer.train()
        last = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry][-1]
        if trainer.is_world_process_zero():
            print(f"loss {float(last):.4f}")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
