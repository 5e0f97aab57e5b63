"""What the parity tests share: inputs, gradients, and two ways to say 'equal'.

Runs in the ranks. Torch's DDP is the reference where it can do the case; the plain module, trained
on all ranks' data in one process, is the reference everywhere.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from paceline import DistributedDataParallel as DDP

Gradients = dict[str, Tensor | None]

# (relative, absolute): a gradient of order one, rounded once per rank.
TOLERANCES = {
    torch.float16: (4e-3, 4e-3),
    torch.bfloat16: (3e-2, 3e-2),
    torch.float32: (1e-5, 1e-6),
    torch.float64: (1e-12, 1e-12),
    torch.complex64: (1e-5, 1e-6),
    torch.complex128: (1e-12, 1e-12),
}


def batch(step: int = 0, rank: int | None = None, *, rows: int = 4, width: int = 4) -> Tensor:
    """Return the inputs of one rank (of this one, if none is named) in one step."""
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(1000 * step + rank + 1)
    return torch.randn(rows, width, generator=generator)


def whole_batch(step: int = 0, *, rows: int = 4, width: int = 4) -> Tensor:
    """Return the inputs of all ranks, concatenated."""
    world = dist.get_world_size()
    return torch.cat([batch(step, rank, rows=rows, width=width) for rank in range(world)])


def gradients(module: nn.Module) -> Gradients:
    """Copy all gradients, by the names of the plain module; sparse ones are made dense."""
    module = module.module if isinstance(module, TorchDDP) else module
    return {name: _copy(p.grad) for name, p in module.named_parameters()}


def _copy(gradient: Tensor | None) -> Tensor | None:
    if gradient is None:
        return None
    # Both: to_dense() alone returns the gradient itself if it is dense.
    return gradient.detach().to_dense().clone()


def assert_identical(found: Gradients, expected: Gradients, what: str = "") -> None:
    """Compare bit for bit."""
    assert found.keys() == expected.keys()
    for name, value in found.items():
        other = expected[name]
        if value is None or other is None:
            assert value is other, f"{what} {name}: {value} instead of {other}"
        else:
            same = value.dtype == other.dtype and _bits(value) == _bits(other)
            assert same, f"{what} {name}: {value} is not bit for bit {other}"


def _bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_close(found: Gradients, expected: Gradients, what: str = "") -> None:
    """Compare within what rounding in the gradient's dtype explains."""
    assert found.keys() == expected.keys()
    for name, value in found.items():
        other = expected[name]
        if value is None or other is None:
            assert value is other, f"{what} {name}: {value} instead of {other}"
        else:
            rtol, atol = TOLERANCES[other.dtype]
            torch.testing.assert_close(
                value, other, rtol=rtol, atol=atol, msg=lambda m, name=name: f"{what} {name}: {m}"
            )


def assert_same_on_all_ranks(values: Gradients) -> None:
    """Compare with the other ranks, bit for bit."""
    mine = {name: None if value is None else _bits(value) for name, value in values.items()}
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    for rank, theirs in enumerate(everybody):
        different = [name for name in mine if mine[name] != theirs[name]]
        assert not different, f"rank {rank} has other gradients of {different}"


def pair(model: nn.Module, **options: Any) -> tuple[DDP, TorchDDP]:
    """Wrap two copies of a model, in ours and in torch's, with the same arguments."""
    twin = copy.deepcopy(model)
    theirs = dict(options)
    if theirs.get("gradient_as_bucket_view", False) is None:
        del theirs["gradient_as_bucket_view"]
    return DDP(model, **options), TorchDDP(twin, **theirs)


def step_both(
    ours: DDP, theirs: TorchDDP, loss: Callable[[nn.Module], Tensor], *, zero: bool = True
) -> Gradients:
    """Run one backward on each, compare the gradients bit for bit, and return them."""
    for model in (ours, theirs):
        if zero:
            model.zero_grad()
        loss(model).backward()
    found = gradients(ours)
    assert_identical(found, gradients(theirs), "against torch's DDP:")
    return found


def train_both(ours: DDP, theirs: TorchDDP, steps: int = 3, *, zero: bool = True) -> None:
    """Run steps on the mean square of the output, each compared as by :func:`step_both`."""
    for step in range(steps):
        step_both(ours, theirs, lambda m, s=step: m(batch(s)).square().mean(), zero=zero)


def assert_sum_over_batches(ddp: DDP, steps: Sequence[int]) -> None:
    """Compare with the gradient of the sum over several batches, and with the other ranks."""

    def loss(model: nn.Module, rank: int) -> Tensor:
        return torch.stack([model(batch(step, rank)).square().mean() for step in steps]).sum()

    assert_close(gradients(ddp), reference_gradients(ddp, loss))
    assert_same_on_all_ranks(gradients(ddp))


def reference_gradients(
    model: nn.Module, loss_of_rank: Callable[[nn.Module, int], Tensor]
) -> Gradients:
    """Train a copy in this process on all ranks' data: the mean of their losses."""
    plain = copy.deepcopy(model.module if isinstance(model, TorchDDP) else model)
    plain.zero_grad()
    world = dist.get_world_size()
    losses = [loss_of_rank(plain, rank) for rank in range(world)]
    (torch.stack([loss for loss in losses if loss.requires_grad]).sum() / world).backward()
    return gradients(plain)
