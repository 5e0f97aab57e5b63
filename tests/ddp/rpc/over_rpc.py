"""What the tests over RPC share: ranks with an RPC agent, and gradients out of a context.

Rank r is called ``rank{r}``. Runs in the ranks.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable

import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from torch import Tensor, nn
from torch.distributed import rpc

from tests.ddp.compare import TorchDDP


def with_rpc(check: Callable[[], None]) -> None:
    """Run ``check`` on every rank with RPC over loopback."""
    # RPC builds on parts of torch that are deprecated.
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", "You are using a Backend")
    rank, world = dist.get_rank(), dist.get_world_size()
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=os.environ["PACELINE_TEST_INIT_METHOD"] + "_rpc",
        _transports=["uv"],
        _channels=["basic"],
    )
    os.environ["TP_SOCKET_IFNAME"] = "lo"
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=world, rpc_backend_options=options)
    try:
        check()
        dist.barrier()
    finally:
        rpc.shutdown()


def named(module: nn.Module, context: int) -> dict[str, Tensor]:
    """Copy a context's gradients, by the names of the plain module; sparse ones are made dense."""
    module = module.module if isinstance(module, TorchDDP) else module
    names = {parameter: name for name, parameter in module.named_parameters()}
    found = dist_autograd.get_gradients(context)
    return {names[p]: g.to_dense().clone() for p, g in found.items() if p in names}


def in_context(module: nn.Module, *losses: Callable[[], Tensor]) -> dict[str, Tensor]:
    """Run one backward for each loss in one context; return its gradients by name."""
    with dist_autograd.context() as context:
        for loss in losses:
            dist_autograd.backward(context, [loss()])
        return named(module, context)
