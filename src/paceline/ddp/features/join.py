"""Uneven inputs: what a rank that has run out of them still does for the others.

Follows torch's ``Join`` protocol, so the wrapper composes with other Joinables. A joined rank
mirrors every collective that a forward and a backward of its peers start, with nothing to
contribute.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, JoinHook

from paceline.ddp.agree.reports import FailureKind
from paceline.ddp.features.buffers import Moment
from paceline.ddp.reduce.reducer import Reducer
from paceline.errors import ConfigurationError
from paceline.liveness import watch_of
from paceline.types import JoinMirror

if TYPE_CHECKING:
    from paceline.ddp.torch_surface import TorchSurface
    from paceline.ddp.wrapper import DistributedDataParallel


ANNOUNCEMENT = "a message to ranks that have joined"


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
        self._mirror_buffers(Moment.BEFORE_FORWARD)
        synced = agree_on_sync(ddp, False)
        self._mirror_buffers(Moment.AFTER_FORWARD)
        ddp.require_forward_param_sync = bool(synced)
        with _beside([mirror.mirror_step for mirror in self._mirrors]):
            if synced and ddp.reducer is not None:
                ddp.reducer.runner.mirror_step()

    def _mirror_buffers(self, moment: Moment) -> None:
        """Take part in the broadcast or the hook; the backward of others waits for its futures."""
        ddp = self.ddp
        if ddp._syncs_buffers(moment):
            for future in ddp._buffer_sync.run(find_common_rank(ddp, False)):
                future.wait()

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


_in_join: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


def check_mirrored(ddp: DistributedDataParallel) -> None:
    """Raise if a rank that has joined could not mirror all collectives of its peers.

    Raises:
        ConfigurationError: On every rank.
    """
    inner = ddp._inner
    if inner or ddp._delayed is not None:
        what = "a wrapper inside" if inner else "delayed parameters"
        remedy = "Wrap the whole model once" if inner else "Leave delay_all_reduce_named_params out"
        raise ConfigurationError(
            f"join(): this wrapper has {what}, whose reductions start at times that ranks which "
            f"have run out of inputs cannot know: all would wait for each other. {remedy}, or give "
            "every rank the same number of inputs."
        )


def check_alone(ddp: DistributedDataParallel, will_sync: bool) -> None:
    """Raise, on joined ranks too, if more than one wrapper's step is to come in one backward.

    Joined ranks mirror one wrapper after the other, while a backward mixes their reductions. At
    this moment they wait for the step of the wrapper that ran first: it is where they are told.

    Raises:
        DesynchronizedError: On every rank.
    """
    _in_join.add(ddp)
    for other in list(_in_join):
        reducer = other.reducer
        if reducer is None or not reducer.expects_backward or not other._join_config.enable:
            continue
        if other is not ddp:
            reducer.runner.refuse(FailureKind.JOIN, "a second wrapper ran before the backward pass")
        elif not will_sync and torch.is_grad_enabled():
            reducer.runner.refuse(
                FailureKind.JOIN, "a forward under no_sync ran before the backward pass"
            )


def enter_joined(ddp: DistributedDataParallel, reducer: Reducer) -> None:
    """A forward begins inside of a join context: tell ranks that have left their loops.

    They mirror one forward for each backward. A further forward before the same backward is this
    rank's own business, then.
    """
    will_sync = ddp._will_sync()
    check_mirrored(ddp)
    check_alone(ddp, will_sync)
    if reducer.expects_backward:
        return
    work = announce(ddp)
    if work is not None and not ddp._divide_by_initial_world_size:
        group = ddp.process_group
        reducer.divide_next_step_by(lambda: active_ranks(group, work))
    if ddp._syncs_buffers(Moment.BEFORE_FORWARD):
        ddp._sync_buffers()
    agree_on_sync(ddp, will_sync, wait=False)


def is_unmirrored(ddp: DistributedDataParallel, reducer: Reducer) -> bool:
    """Say whether a forward is a further one before the same backward, inside of a join context."""
    return bool(ddp._join_config.enable) and reducer.expects_backward


def announce(ddp: DistributedDataParallel) -> Any:
    """Tell ranks that have joined that this one has not; return torch's work, if there is one."""
    try:
        return Join.notify_join_context(ddp)
    except RuntimeError as error:
        if "gloo" not in str(error):  # torch's own: a rank has run out of inputs
            raise
        raise watch_of(ddp.process_group).error(ANNOUNCEMENT, error) from error


def shadow_announcement(group: dist.ProcessGroup, count: torch.Tensor) -> None:
    """The same for a rank that has joined: count those that have not."""
    watch_of(group).run(ANNOUNCEMENT, lambda: group.allreduce([count]))


def agree_on_sync(ddp: DistributedDataParallel, wants_sync: bool, *, wait: bool = True) -> bool:
    """Tell joined ranks whether this step will be synchronised; they are the ones who wait."""
    flag = torch.full((1,), float(wants_sync), device=ddp.device)
    work = dist.all_reduce(flag, group=ddp.process_group, async_op=True)
    if not wait:
        return wants_sync
    watch_of(ddp.process_group).wait(ANNOUNCEMENT, work)
    return flag.item() != 0


def find_common_rank(ddp: TorchSurface, is_candidate: bool) -> int:
    """Agree on one rank: the highest that is a candidate."""
    candidate = dist.get_rank(ddp.process_group) if is_candidate else -1
    rank = torch.tensor([candidate], device=ddp.device)
    ddp._transport.messages.maximum("agreement on a source", rank)
    common = int(rank.item())
    if common < 0:
        raise ValueError("no rank of the group can serve as the source; each says it has joined")
    return common


def active_ranks(group: dist.ProcessGroup, work: Any) -> float:
    """Read how many ranks have not joined from the work that announced this rank."""
    watch_of(group).wait(ANNOUNCEMENT, work)
    return float(work.get_future().value()[0].item())
