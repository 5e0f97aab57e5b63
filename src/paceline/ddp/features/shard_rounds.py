"""The loop over a rank's shards: ``for micro in ddp.shards(batch): loss(ddp(micro)).backward()``.

A *round* is one forward and backward of every shard, each on one rank. All but the last shard of a
rank run without synchronisation and leave their gradients in :mod:`paceline.ddp.reduce.shard_sums`;
the last one's backward is the step that the reducer knows. Owned by the wrapper.

Where layers need all shards at once, those of a rank run in turns (:mod:`paceline.shards.turns`),
all without synchronisation. Then a backward of its own brings what the last one has left.

[Note: rounds that do not end]
An exception, or ``break``, leaves a round in the middle, while peers wait in its step. The next
round of this rank, or its ``optimizer.step()``, then only tells them, so that all ranks raise. The
generator of the loop may live as long as the exception's traceback; a round that is not the present
one touches nothing any more.

[Note: rounds that are left at their last shard]
Once the step of a round is good, it is so on all ranks, and the round counts, however a rank leaves
its loop: ``zip(owned, ddp.shards(batch))`` leaves the generator at its last ``yield``, and so does
``break`` there. What needs no other rank is done when the generator is closed. Buffers do need the
others, and nobody hears of an error in a generator that is closed: they follow at what comes next,
a forward, ``optimizer.step()`` or a round (:meth:`ShardRounds.settle`).
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from paceline.config import Shards
from paceline.ddp.agree.reports import FailureKind
from paceline.ddp.autograd.deliver import carrier_of
from paceline.ddp.autograd.optimizer_steps import observe_optimizers
from paceline.ddp.features.shard_accumulation import add_gradients, take_gradients
from paceline.ddp.features.shard_buffers import ShardBuffers
from paceline.ddp.features.shard_errors import (
    check_backwards,
    check_begin,
    check_cast,
    check_forwards,
    check_weight,
    hooks_in_turns,
    needs_run_shards,
    outside_of_loop,
    update_inside_of_loop,
)
from paceline.ddp.features.shard_meeting import ShardMeeting
from paceline.ddp.features.shard_parameters import ParameterWatch
from paceline.ddp.features.shard_places import ShardPlace, ShardPlaces
from paceline.ddp.features.shard_record import ShardRecord
from paceline.ddp.reduce.reducer import Reducer
from paceline.ddp.reduce.shard_sums import ShardSums
from paceline.errors import ConfigurationError
from paceline.shards.batches import cut_batch
from paceline.shards.streams import OwnStreams, seed_all, stream_seed
from paceline.shards.sums import Gradients
from paceline.shards.tree import Node, Shares
from paceline.shards.turns import Turns
from paceline.torch_private.autograd import have_gradient_hooks, see_accumulated
from paceline.torch_private.modules import TorchDDP

if TYPE_CHECKING:
    from paceline.ddp.wrapper import DistributedDataParallel

T = TypeVar("T")


class ShardRounds:
    """The rounds of one wrapper.

    Attributes:
        round: How many rounds are complete. Streams of random numbers begin with it, so that a
            training that goes on from a checkpoint must be told.
        parameters: Whose optimizers tell of their steps.
    """

    def __init__(
        self,
        sums: ShardSums,
        reducer: Reducer,
        buffers: ShardBuffers,
        record: ShardRecord,
        meeting: ShardMeeting,
        watch: ParameterWatch,
    ) -> None:
        self._watch = watch
        self._sums = sums
        self._record = record
        self._meeting = meeting
        self._reducer = reducer
        self._buffers = buffers
        self._policy: Shards = sums.policy
        self._token: object | None = None
        self._ddp: weakref.ref[TorchDDP] | None = None
        self._before: Gradients = []
        self._has_buffers, self._owes_buffers = True, False
        self._begun_at = -1
        self._position = 0
        self._forwards: Counter[int] = Counter()
        self._staying: Node | None = None
        self._has_sparse = sums.has_sparse = any(spec.sparse for spec in reducer.specs)
        self._weight: float | None = None
        self._own: OwnStreams | None = None
        self.round = 0
        self.parameters: Sequence[torch.Tensor] = reducer.parameters
        observe_optimizers(self)

    def regroup(self, rank: int, world: int) -> None:
        """Go on as another rank, among others; what was under way is forgotten."""
        self._sums.regroup(rank, world)
        self._token = self._own = None
        self._before, self._owes_buffers = [], False
        self._begun_at = -1
        self._buffers.forget()

    @property
    def shares(self) -> Shares:
        """Who owns which shards now."""
        return self._sums.shares

    def cast_to(self, dtype: torch.dtype) -> None:
        """Take all sums in a small dtype, from the next round on.

        Raises:
            ConfigurationError: If there are sparse gradients, or sums are cast already.
        """
        check_cast(self._sums.dtype, has_sparse=self._has_sparse)
        self._sums.dtype = dtype

    # --- the loop ------------------------------------------------------------------------------

    def run(self, ddp: TorchDDP, batch: Any) -> Iterator[Any]:
        """Yield a micro-batch for each shard of this rank."""
        if self._meeting.is_needed:
            raise needs_run_shards(self._reducer.rank)
        micros = self._begin(ddp, batch)
        token, policy = self._token, self._reducer.runner.context.policy
        owned = self.shares.owned
        try:
            for self._position, micro in enumerate(micros):
                shard = owned[self._position]
                seed_all(self._seed(shard))
                if self._staying is None:
                    node = self._sums.preset(shard, self._reducer.parameters, policy)
                else:
                    node = (self._staying[0], shard + 1)
                self._sums.last, self._sums.arrived = node, 0
                self._sums.shard = shard
                ddp.require_backward_grad_sync = shard == owned[-1]
                self._record.take_input(shard, micro)
                yield micro
                if self._token is not token:
                    return  # it has been ended from outside, by what comes after the loop
                self._end_shard(shard, node, is_last=shard == owned[-1])
            self.settle()
        finally:
            if self._token is token:
                self._leave()

    def _begin(self, ddp: TorchDDP, batch: Any) -> Sequence[Any]:
        """Begin a round; return its micro-batches."""
        rank, owned = self._reducer.rank, self.shares.owned
        syncs = ddp.require_backward_grad_sync or self._token is not None  # a loop is suspended
        check_begin(self._policy, rank, syncs=syncs)
        micros = cut_batch(batch, owned, self._policy.count, rank)
        self._open(ddp)
        views = self._reducer.runner.context.policy.views
        self._before = take_gradients(self.parameters, views)
        return micros

    def _seed(self, shard: int) -> int:
        return stream_seed(self._policy.seed, self.round, shard)

    # --- in turns ------------------------------------------------------------------------------

    def run_all(
        self, ddp: DistributedDataParallel, batch: Any, function: Callable[[Any], T]
    ) -> list[T]:
        """Run a function for each shard of this rank; in turns, if layers need all shards."""
        if not self._meeting.is_needed:
            return [function(micro) for micro in self.run(ddp, batch)]
        if have_gradient_hooks(self.parameters):
            raise hooks_in_turns(self._reducer.rank)
        micros = self._begin(ddp, batch)
        try:
            try:
                ddp.require_backward_grad_sync = False
                places, results = self._run_in_turns(micros, function)
                ended = zip(self.shares.owned, places.all, strict=True)
                found = [self._end_turns(shard, place) for shard, place in ended]
                self._meeting.end()
            except Exception:
                self._begun_at = -1  # nobody waits in a step
                self._meeting.fail()
                raise
            finally:
                self._meeting.close()
            self._has_buffers = False  # places have put them back
            self._deliver(ddp, found)
            self.settle()
        finally:
            if self._token is not None:
                self._leave()
        return results

    def _run_in_turns(
        self, micros: Sequence[Any], function: Callable[[Any], T]
    ) -> tuple[ShardPlaces, list[T]]:
        owned, meeting = self.shares.owned, self._meeting
        seeds = [self._seed(shard) for shard in owned]
        places = ShardPlaces(self._reducer, self._buffers, seeds, self._on_turn)
        turns = Turns(owned, places, meeting.combine)
        meeting.open(self._reducer.runner.context.transport, self.shares, turns)
        for shard, micro in zip(owned, micros, strict=True):
            self._record.take_input(shard, micro)
        return places, turns.run([functools.partial(function, micro) for micro in micros])

    def _on_turn(self, position: int) -> None:
        self._position = self._meeting.position = position
        self._sums.shard = self.shares.owned[position]

    def _end_turns(self, shard: int, place: ShardPlace) -> Gradients:
        """All shards have run: see what one has left."""
        if all(gradient is None for gradient in place.gradients):
            raise ConfigurationError(
                f"Rank {self._reducer.rank}, shard {shard}: it has brought no gradient at all. The "
                "function that run_shards calls runs a forward and its backward."
            )
        self._check_shard(shard)
        self._record.take_gradients(shard, self._reducer.parameters, place.gradients)
        self._buffers.add(place.changed)
        return place.gradients

    def _deliver(self, ddp: DistributedDataParallel, found: list[Gradients]) -> None:
        """Let the step be one whose backward brings what the last shard has brought before."""
        policy = self._reducer.runner.context.policy
        last = found.pop()
        for shard, gradients in zip(self.shares.owned, found, strict=False):
            with torch.no_grad():
                self._sums.push((shard, shard + 1), gradients, None, policy)
        shard = self.shares.owned[-1]
        self._sums.last = (shard, shard + 1)
        ddp.require_backward_grad_sync = True
        ddp._forward_pass.begin(ddp, self._reducer)
        carrier = self._reducer.expect_backward_of(carrier_of(self._reducer.parameters, last))
        carrier.backward()

    # --- begin and end -------------------------------------------------------------------------

    def _open(self, ddp: TorchDDP) -> None:
        self.settle()
        self._tell_of_broken_round()
        self._token = object()
        self._ddp = weakref.ref(ddp)
        self._reducer.end_shard()
        self._begun_at = self._reducer.counters.steps
        self._staying = None
        self._own = OwnStreams()
        turns = self._meeting.is_needed
        self._record.open(self.round, self._reducer.rank, () if turns else self._reducer.parameters)
        self._sums.has_hooks = see_accumulated(self.parameters)
        self._sums.open()
        self._forwards.clear()
        self._watch.open()
        self._buffers.open(self.shares, without=self._meeting.buffer_names if turns else ())
        self._has_buffers = True

    def settle(self) -> None:
        """End a round whose step is good: give all ranks its buffers. Collective, if it is owed.

        All ranks owe it, once, after the same step.
        """
        if self._token is not None:
            self._leave()
        if self._owes_buffers:
            self._owes_buffers = False
            self._buffers.close()
            self._record.close()

    def _leave(self) -> None:
        """The loop has been left: well, or in the middle ([Note: rounds that do not end])."""
        is_good = self._sums.is_reduced
        self._token, before, self._before = None, self._before, []
        self._reducer.end_shard()
        ddp = self._ddp() if self._ddp is not None else None
        if ddp is not None:
            ddp.require_backward_grad_sync = True
        if self._own is not None:
            self._own.put_back()
            self._own = None
        self._sums.close()
        self._record.leave()
        self._take_buffers()
        if is_good:
            add_gradients(self.parameters, before)
            self.round += 1
            self._owes_buffers = True
            return
        for parameter, old in zip(self._reducer.parameters, before, strict=False):
            parameter.grad = old

    def _take_buffers(self) -> None:
        if self._has_buffers:
            self._has_buffers = False
            self._buffers.take()

    def _tell_of_broken_round(self) -> None:
        """Tell the peers, who wait in the step of a round that this rank did not end."""
        if self._begun_at != self._reducer.counters.steps:
            return
        owned = self.shares.owned
        detail = f"its loop over shards {owned.start} to {owned.stop - 1} did not run to its end"
        self._sums.open()
        try:
            if self._reducer.runner.step_in_flight is not None:
                self._reducer.prepare_forward()  # its backward raised
            else:
                self._reducer.runner.refuse(FailureKind.BACKWARD_RAISED, detail)
        finally:
            self._sums.close()

    def _end_shard(self, shard: int, node: Node, *, is_last: bool) -> None:
        self._take_buffers()
        self._check_shard(shard, is_last=is_last)
        if is_last:
            return
        self._has_buffers = True
        self._reducer.end_shard()
        parameters, policy = self._reducer.parameters, self._reducer.runner.context.policy
        self._staying = None
        if not self._has_sparse and self._sums.stays(node, len(parameters), policy):
            self._staying = node
            return
        gradients: Gradients = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        with torch.no_grad():
            self._sums.push(node, gradients, self._weight, policy)

    def _check_shard(self, shard: int, *, is_last: bool = False) -> None:
        """See that a shard was one forward and one backward."""
        sums, policy = self._sums, self._reducer.runner.context.policy
        check_forwards(self._reducer.rank, shard, self._forwards[shard])
        local = sum(owner == shard for owner, _ in sums.backwards)
        found = local + (is_last and sums.is_reduced)
        # A shard may bring nothing at all where parameters may go unused.
        check_backwards(self._reducer.rank, shard, found, may_be_none=policy.tracks_unused)

    # --- optimizers ----------------------------------------------------------------------------

    def on_optimizer_begin(self) -> None:
        """An optimizer of these parameters is about to step: the round must be complete.

        Raises:
            ConfigurationError: In the middle of the loop.
            PeerFailedError: On all ranks, if this one has not run its loop to its end.
        """
        if self._token is not None and not self._sums.is_reduced:
            raise update_inside_of_loop(self._reducer.rank, self.shares.owned)
        self.settle()
        self._tell_of_broken_round()

    def on_optimizer_step(self) -> None:
        """See :class:`paceline.ddp.autograd.optimizer_steps.Observer`."""

    # --- forwards ------------------------------------------------------------------------------

    def on_forward(self, *, is_training: bool) -> None:
        """A forward begins; in training it has gradients."""
        rank = self._reducer.rank
        if self._token is None:
            self.settle()
        if not is_training:
            return
        if self._token is None:
            if not any(parameter.requires_grad for parameter in self.parameters):
                return  # all is frozen, as a GAN's discriminator while its generator learns
            raise outside_of_loop(rank, self._policy.count)
        shard = self.shares.owned[self._position]
        self._forwards[shard] += 1
        check_forwards(rank, shard, self._forwards[shard])
        weight = self._weight = self._reducer.runner.weight
        is_other = bool(self._position) and (weight is None) != (self._sums.weight is None)
        check_weight(rank, weight, is_other=is_other, in_turns=self._meeting.turns is not None)
        if weight is not None:
            self._sums.weight = (self._sums.weight or 0.0) + weight

    def on_output(self, output: Any) -> None:
        """A forward with gradients has ended."""
        if self._token is None:
            return
        shard = self.shares.owned[self._position]
        self._record.take_output(shard, output)
        if shard == self.shares.owned[-1]:
            self._watch.check(self._reducer.rank)
