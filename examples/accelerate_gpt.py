"""Train a small GPT with Accelerate, gradients accumulated; only the import is Paceline's.

    torchrun --nproc-per-node 2 examples/accelerate_gpt.py

It also runs alone. The text is made here, nothing is loaded.
"""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

from paceline.integrations.accelerate import Accelerator

LENGTH, VOCABULARY = 32, 40


def sentences(count: int) -> TensorDataset:
    """Sequences that count upwards by a step of their own, which the model has to find out."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randint(VOCABULARY, (count, 1), generator=generator)
    stride = torch.randint(1, 4, (count, 1), generator=generator)
    return TensorDataset((start + stride * torch.arange(LENGTH)) % VOCABULARY)


def main() -> None:
    """Train, and print the loss of every epoch."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(sentences(768), batch_size=16, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    for epoch in range(4):
        losses = []
        for (tokens,) in loader:
            with accelerator.accumulate(model):
                loss = model(input_ids=tokens, labels=tokens).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean())
        accelerator.print(f"epoch {epoch + 1}  loss {torch.stack(losses).mean():.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
