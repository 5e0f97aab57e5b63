"""A character-level GPT in the manner of nanoGPT, without a framework.

    torchrun --nproc-per-node 2 examples/nanogpt.py

It also runs alone. The text is the source of this program, so nothing is loaded.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from paceline import DistributedDataParallel as DDP

LENGTH, WIDTH, HEADS, LAYERS = 48, 64, 4, 2
STEPS, BATCH, ACCUMULATED = 100, 12, 2


class Block(nn.Module):
    """Attention and a small network, each on a normalised input and added to it."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.project(self.norms[0](x)).chunk(3, dim=-1)
        query, key, value = (p.unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        more: torch.Tensor = self.mlp(self.norms[1](x))
        return x + more


class GPT(nn.Module):
    """Logits of the next character at every place."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(characters, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, characters))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = self.place(torch.arange(tokens.shape[1]))
        logits: torch.Tensor = self.head(self.blocks(self.token(tokens) + places))
        return logits


def draw(text: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random pieces of the text, and the same one character later."""
    starts = torch.randint(len(text) - LENGTH - 1, (BATCH,), generator=generator)
    pieces = text[starts[:, None] + torch.arange(LENGTH + 1)]
    return pieces[:, :-1], pieces[:, 1:]


def main() -> None:
    """Train, and print the loss now and then."""
    alone: dict[str, Any] = {"rank": 0, "world_size": 1, "store": dist.HashStore()}  # type: ignore[attr-defined]
    dist.init_process_group("paceline", **({} if "RANK" in os.environ else alone))
    torch.manual_seed(0)
    source = Path(__file__).read_text()
    characters = sorted(set(source))
    text = torch.tensor([characters.index(c) for c in source])
    model = DDP(GPT(len(characters)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(STEPS):
        for part in range(ACCUMULATED):
            # Gradients are averaged over the ranks once a step, in its last part.
            model.require_backward_grad_sync = part == ACCUMULATED - 1
            x, y = draw(text, generator)
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            (loss / ACCUMULATED).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and (step + 1) % 20 == 0:
            print(f"step {step + 1:3}  loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
