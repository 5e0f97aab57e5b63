"""``DistributedDataParallel``: the module that users wrap their model in.

A shell: it checks arguments, owns the parts (reducer, buffers, precision, delayed parameters), and
runs its module's forward between two calls of :mod:`paceline.ddp.forward_pass`. Names that only
torch's own code and tests call are in :mod:`paceline.ddp.torch_surface`. Start reading here, then
:mod:`paceline.ddp.reduce.reducer`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable

from paceline.config import Shards
from paceline.ddp import arguments
from paceline.ddp.agree.attempts import tells_peers
from paceline.ddp.agree.peers import Peers
from paceline.ddp.agree.replicas import make_replica_check
from paceline.ddp.agree.weights import check_weight
from paceline.ddp.argument_types import check_types
from paceline.ddp.features.buffers import BufferSync, Moment
from paceline.ddp.features.delayed import DelayedReduction
from paceline.ddp.features.foreign import ForeignGuard
from paceline.ddp.features.join import (
    DDPJoinHook,
    check_mirrored,
    find_common_rank,
    shadow_announcement,
)
from paceline.ddp.features.nesting import (
    find_wrappers,
    weighted_reducers,
    with_weight,
    without_sync,
)
from paceline.ddp.features.optimizer_in_backward import OptimizersInBackward
from paceline.ddp.features.precision import PrecisionAccess, PrecisionSwap, reduce_dtype
from paceline.ddp.forward_pass import ForwardPass
from paceline.ddp.logging_data import LoggingData
from paceline.ddp.module_watch import ModuleWatch
from paceline.ddp.parameters import find_trainables
from paceline.ddp.recording import note_error, watch_reducer
from paceline.ddp.reduce.comm_hook import RegisteredHook, check_hook
from paceline.ddp.reduce.handover import StepEnds
from paceline.ddp.reduce.reducer import Reducer
from paceline.ddp.settings import choose_settings
from paceline.ddp.sharded import ShardedTraining, choose_shards
from paceline.ddp.torch_surface import TorchSurface, broadcast_state
from paceline.errors import HookAlreadyRegisteredError
from paceline.freed_memory import keep_freed_memory
from paceline.gloo_threads import wait_for_gloo_at_exit
from paceline.observe import DDPStats
from paceline.torch_private.compile import compiler_callback, not_compiled, not_compiled_itself
from paceline.torch_private.modules import JoinByMessages, MixedPrecisionConfig, TorchDDP
from paceline.torch_private.profiler import is_profiled
from paceline.transport import DeferredTransport


class DistributedDataParallel(ShardedTraining, TorchSurface):
    """Train one model on many ranks: every rank computes on its own data, gradients are averaged.

    Takes torch 2.15's arguments, in torch's order (see its documentation). What differs:

    Args:
        gradient_as_bucket_view: None (the default): gradients are views of the communication
            buckets, and one that you still hold from an earlier step never changes under you. True
            and False do what torch does.
        nonfinite: ``"ignore"``; ``"raise"``: a NaN or infinity in any rank's gradients raises
            NonFiniteGradientError on every rank, naming rank and parameter; ``"skip"``: such a
            step's gradients become zero on every rank, and ``skipped_steps`` counts it.
        transport: ``"auto"``: ranks of a host reduce in shared memory where that is possible;
            ``"shm"``: that, or an error; ``"c10d"``: the process group. ``stats()`` says which it
            is and why. ``PACELINE_TRANSPORT`` in the environment says what ``"auto"`` means.
        missing_gradients: ``"raise"``: a backward that leaves parameters without a gradient
            raises at its end, on every rank, with names. ``"wait"``: torch's timing, for code that
            runs several backward passes of which each brings some gradients.
        check_every: Every so many steps, compare the ranks' parameters and broadcast buffers; a
            difference is an error on every rank that names rank and parameter (``docs/drift.md``).
        shards: Train as so many logical shards, with the same bits at any number of ranks; see
            :meth:`shards` and ``docs/same-bits.md``. A number, or :class:`paceline.Shards`.

    Example::

        from paceline import DistributedDataParallel as DDP

        torch.distributed.init_process_group("gloo")
        model = DDP(model)
        for x, y in loader:
            optimizer.zero_grad()
            with model.weighted(len(x)):     # optional: the exact mean over unequal batches
                loss(model(x), y).backward()
            optimizer.step()
        print(model.stats())
    """

    @tells_peers
    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Sequence[Any] | None = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool | None = None,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, torch.nn.Parameter]] | None = None,
        param_to_hook_all_reduce: torch.nn.Parameter | None = None,
        mixed_precision: MixedPrecisionConfig | None = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        lazy_bucket_allocation: bool = False,
        *,
        nonfinite: str = "ignore",
        missing_gradients: str = "raise",
        transport: str = "auto",
        check_every: int | None = None,
        shards: int | Shards | None = None,
    ) -> None:
        given = dict(locals())
        check_types(given)
        # Not super().__init__(): torch's class would build its own reducer. We are a subclass so
        # that isinstance checks, in torch and elsewhere, hold (docs/decisions/0001).
        torch.nn.Module.__init__(self)
        Joinable.__init__(self)
        self.logger = LoggingData()
        arguments.check_delayed(given)
        self.process_group = arguments.choose_group(process_group, device_mesh)
        given["shards"] = choose_shards(shards, given)
        self.device_mesh = device_mesh
        arguments.warn_check_reduction(check_reduction)
        arguments.warn_unused_and_static(find_unused_parameters, static_graph)
        arguments.prepare_mesh(module, device_mesh)
        delayed = list(delay_all_reduce_named_params or [])
        self._find_parameters(module, {name for name, _ in delayed})
        late = [parameter for _, parameter in delayed]
        buffers = arguments.choose_buffers(broadcast_buffers, forward_sync_buffers, shards)
        self._settings = choose_settings(given, self._module_parameters or late, buffers)
        self.module = module
        self.dim = dim
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self._set_torch_attributes(self._settings)
        self._delayed = None
        self._build_parts()
        if init_sync:
            self._start_equal()
        if delayed and param_to_hook_all_reduce is not None:
            self._delayed = DelayedReduction(
                late,
                param_to_hook_all_reduce,
                self._transport,
                is_synced=lambda: self.require_backward_grad_sync,
            )

    def _find_parameters(self, module: torch.nn.Module, delayed: set[str]) -> None:
        ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self.parameters_to_ignore = ignored | delayed
        self._module_parameters = [
            p for n, p in module.named_parameters() if n not in self.parameters_to_ignore
        ]
        arguments.check_parameters(self._module_parameters, some_delayed=bool(delayed))
        arguments.check_norms(module)

    # --- parts ---------------------------------------------------------------------------------

    @torch.inference_mode(False)
    def _build_parts(self) -> None:
        """Build everything that is not pickled."""
        settings = self._settings
        precision = settings.mixed_precision
        specs, parameters = find_trainables(
            self.module,
            self.process_group,
            self.parameters_to_ignore,
            partial(reduce_dtype, precision),
        )
        if any(parameter.device.type == "cpu" for parameter in parameters):
            keep_freed_memory()
        wait_for_gloo_at_exit()
        self._transport = self._make_transport(self.process_group)
        self._peers = Peers(self.process_group, self._transport, self.device)
        self._buffer_sync = BufferSync(self.module, self.parameters_to_ignore, self._transport)
        self._comm_hooks: list[tuple[Any, Any]] = []
        self._inner = find_wrappers(self.module)
        swap = None if precision is None else PrecisionSwap(precision, self.module)
        optimizers = OptimizersInBackward()
        sums = self._make_shard_sums(settings.policy.shards)
        self.reducer: Reducer | None = None
        foreign = None
        if parameters:
            self.reducer = Reducer(
                parameters,
                specs,
                settings.policy,
                settings.caps,
                self._transport,
                self._peers,
                access=PrecisionAccess(swap, settings.policy.views) if swap else None,
                ends=StepEnds(optimizers, swap.leave if swap else None),
                on_error=partial(note_error, self.logger.set_error),
                replicas=make_replica_check(self),
                shards=sums,
            )
            watch_reducer(self.reducer, self._transport, self.module)
            foreign = ForeignGuard(self, self.reducer, ours=DistributedDataParallel)
            self.logger.set_construction(self, self.reducer)
        watch = ModuleWatch(self.module, self.parameters_to_ignore, parameters)
        self._make_shard_rounds(sums)
        self._forward_pass = ForwardPass(self.reducer, swap, watch, foreign, optimizers)

    def _make_transport(self, group: dist.ProcessGroup) -> DeferredTransport:
        """Prepare a transport for all gradients there may be, delayed ones included."""
        gradient_bytes = sum(p.nbytes for p in self.module.parameters() if p.requires_grad)
        return DeferredTransport(group, self._settings.transport, self.device, gradient_bytes)

    @torch.inference_mode(False)
    def _start_equal(self) -> None:
        """Verify that ranks hold the same model, then copy rank 0's state to all."""
        self._transport.resolve()
        if self.reducer is not None:
            self.reducer.check_model()
        broadcast_state(self, 0, with_buffers=self._settings.buffers.at_construction)

    # --- forward -------------------------------------------------------------------------------

    @not_compiled_itself
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; the gradients of its backward will be averaged over all ranks."""
        if compiler_callback() is None and not is_profiled():
            return self._run_unseen(inputs, kwargs)
        with torch.autograd.profiler.record_function("DistributedDataParallel.forward"):
            placed, placed_kwargs = self._pre_forward(*inputs, **kwargs)
            with self._inside_ddp_forward():
                try:
                    output = self.module(*placed, **placed_kwargs)
                except Exception:
                    self._abandon_forward(inputs, kwargs)
                    raise
            return self._post_forward(output)

    def _run_unseen(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do the same in fewer calls, while neither a compiler nor a profiler looks on."""
        placed, placed_kwargs = self._forward_pass.enter(self, inputs, kwargs)
        outer, TorchDDP._active_ddp_module = TorchDDP._active_ddp_module, self
        try:
            output = self.module(*placed, **placed_kwargs)
        except Exception:
            self._abandon_forward(inputs, kwargs)
            raise
        finally:
            TorchDDP._active_ddp_module = outer
        return self._forward_pass.leave(self, output)

    @not_compiled
    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self._forward_pass.enter(self, inputs, kwargs)

    @not_compiled
    def _post_forward(self, output: Any) -> Any:
        return self._forward_pass.leave(self, output)

    @not_compiled
    def _abandon_forward(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._forward_pass.abandon(self, inputs, kwargs)

    def _lazy_init(self) -> None:
        self._forward_pass.take_over_optimizers(self)

    def _will_sync(self) -> bool:
        return self.require_backward_grad_sync and torch.is_grad_enabled()

    def _syncs_buffers(self, moment: Moment) -> bool:
        return (
            self.require_forward_param_sync
            and self.forward_sync_buffers
            and self._buffer_sync.is_due(moment)
        )

    def _sync_buffers(self) -> None:
        source = find_common_rank(self, True) if self._join_config.enable else 0
        futures = self._buffer_sync.sync(source)
        if futures and self.reducer is not None:
            self.reducer.registered.futures.extend(futures)

    # --- what users call -----------------------------------------------------------------------

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally; the first backward of a forward outside reduces the sum.

        The forward must be inside the context too. Contexts may be nested. Wrappers inside of the
        module do the same.
        """
        self._refuse_with_shards("no_sync()")
        with without_sync([self, *self._inner]):
            yield

    @contextlib.contextmanager
    def weighted(self, n: float) -> Iterator[None]:
        """Average this step's gradients with the weight ``n`` of this rank.

        With ``n`` samples (or tokens) behind each rank's mean loss, the result is the mean over
        all samples, not the mean of the ranks' means. The weights travel inside the buckets. A
        rank with ``n = 0`` contributes nothing, even if its gradients are NaN. Gradients
        accumulated under :meth:`no_sync` are weighted together with the backward that reduces
        them.
        """
        weight = check_weight(n, self._transport.rank)
        with with_weight(weighted_reducers(self, DistributedDataParallel), weight):
            yield

    def stats(self) -> DDPStats:
        """Return a snapshot: steps, and the sizes and times of every bucket in the latest step."""
        return self._require_reducer("stats()").stats()

    @property
    def skipped_steps(self) -> int:
        """How many steps ``nonfinite="skip"`` has left out."""
        return self.reducer.counters.skipped_steps if self.reducer is not None else 0

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let ``hook(state, bucket) -> Future[Tensor]`` take the place of every bucket's reduction.

        Gradients in the bucket are not divided by the world size. Hooks from
        ``torch.distributed.algorithms.ddp_comm_hooks`` work unchanged.

        Raises:
            HookNotCallableError, HookSignatureError: If the hook cannot be called so.
            HookAlreadyRegisteredError: If there is one already.
        """
        if self._casts_shards(state, hook):
            return
        try:
            name = check_hook(hook)
            self._set_hook(RegisteredHook(hook, state, name, self.process_group))
        except (TypeError, ValueError, HookAlreadyRegisteredError) as error:
            self.logger.set_error(error)
            raise
        self._comm_hooks.append((hook, state))

    def _set_hook(self, hook: RegisteredHook) -> None:
        self._refuse_with_shards("A communication hook")
        self._require_reducer("register_comm_hook()").registered.register_hook(hook)
        self.logger.set("comm_hook", hook.name)

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Return a context for uneven inputs: ranks that run out early still take part.

        Args:
            divide_by_initial_world_size: Divide gradients by the world size throughout; otherwise
                by the number of ranks that still have inputs.
            enable: False turns the context off, for inputs known to be even.
            throw_on_early_termination: Raise on every rank as soon as one runs out of inputs.
        """
        self._refuse_with_shards("join()")
        if enable:
            check_mirrored(self)
        return JoinByMessages(
            [self],
            partial(shadow_announcement, self.process_group),
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> DDPJoinHook:
        """Return this wrapper's part in a join context."""
        self._peers.check_process()
        divide = kwargs.get("divide_by_initial_world_size", True)
        return DDPJoinHook(self, divide_by_initial_world_size=divide)
