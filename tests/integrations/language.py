"""Tiny language models, and sequences that they learn, for Transformers' Trainer."""

from __future__ import annotations

from typing import Any

import torch

VOCABULARY = 64


class Sequences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Counting sequences: something a tiny language model learns within some steps."""

    def __init__(self, samples: int = 48, *, is_ragged: bool = False) -> None:
        generator = torch.Generator().manual_seed(5)
        starts = torch.randint(VOCABULARY, (samples, 1), generator=generator)
        self.tokens = (starts + torch.arange(12)) % VOCABULARY
        self.labels = self.tokens.clone()
        if is_ragged:  # the loss leaves out what is -100
            lengths = torch.randint(2, 12, (samples, 1), generator=generator)
            self.labels[torch.arange(12) >= lengths] = -100

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}


def gpt() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config)
