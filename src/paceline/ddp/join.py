"""Uneven inputs: what a rank that has run out of them still does for the others.

Follows torch's ``Join`` protocol, so the wrapper composes with other Joinables. A joined rank
mirrors every collective that a forward and a backward of its peers start, with nothing to
contribute.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import JoinHook

from paceline.types import JoinMirror

if TYPE_CHECKING:
    from paceline.ddp.wrapper import DistributedDataParallel


class DDPJoinHook(JoinHook):
    """One wrapper in a join context."""

    def __init__(self, ddp: DistributedDataParallel, *, divide_by_initial_world_size: bool) -> None:
        self.ddp = ddp
        ddp._divide_by_initial_world_size = divide_by_initial_world_size
        ddp.logger.set("join_uneven_inputs", 1)
        self._mirrors = find_mirrors(ddp.module)
        super().__init__()

    def main_hook(self) -> None:
        """Mirror one forward and backward."""
        ddp = self.ddp
        ddp._mirror_buffer_sync()
        synced = agree_on_sync(ddp, False)
        ddp.require_forward_param_sync = bool(synced)
        with _beside([mirror.mirror_step for mirror in self._mirrors]):
            if synced and ddp.reducer is not None:
                ddp.reducer.mirror_step()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Everybody is here: take the model of a rank that trained to the end."""
        self.ddp._sync_final_model(is_last_joiner)
        for mirror in self._mirrors:
            mirror.leave()


@contextlib.contextmanager
def _beside(functions: Sequence[Callable[[], None]]) -> Iterator[None]:
    """Run functions on a thread while the body runs; what they raise is raised at the end."""
    if not functions:
        yield
        return
    errors: list[BaseException] = []

    def run() -> None:
        try:
            for function in functions:
                function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="paceline join mirror")
    thread.start()
    try:
        yield
    finally:
        thread.join()
    if errors:
        raise errors[0]


def find_mirrors(module: torch.nn.Module) -> list[JoinMirror]:
    """Ask each class of modules that talks to other ranks by itself, in the order of the model."""
    kinds = dict.fromkeys(type(part) for part in module.modules())
    return [kind.mirror_for_join(module) for kind in kinds if hasattr(kind, "mirror_for_join")]


def agree_on_sync(ddp: DistributedDataParallel, wants_sync: bool, *, wait: bool = True) -> bool:
    """Tell joined ranks whether this step will be synchronised; they are the ones who wait."""
    flag = torch.full((1,), float(wants_sync), device=ddp.device)
    work = dist.all_reduce(flag, group=ddp.process_group, async_op=True)
    if not wait:
        return wants_sync
    assert work is not None
    work.wait()
    return flag.item() != 0


def find_common_rank(ddp: DistributedDataParallel, is_candidate: bool) -> int:
    """Agree on one rank: the highest that is a candidate."""
    candidate = dist.get_rank(ddp.process_group) if is_candidate else -1
    rank = torch.tensor([candidate], device=ddp.device)
    dist.all_reduce(rank, op=dist.ReduceOp.MAX, group=ddp.process_group)
    common = int(rank.item())
    if common < 0:
        raise ValueError("no rank of the group can serve as the source; each says it has joined")
    return common


def active_ranks(work: Any) -> float:
    """Read how many ranks have not joined from the work that announced this rank."""
    work.wait()
    return float(work.get_future().value()[0].item())
