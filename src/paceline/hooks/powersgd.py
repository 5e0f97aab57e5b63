"""PowerSGD: gradients as products of thin matrices (Vogels et al., arXiv:1905.13727).

For each gradient matrix M (n x m) that is worth it, ranks exchange r columns instead of m:

1. P = M Q, summed over the ranks, with what is not worth compressing in the same message;
2. columns of P orthonormal, Q = M^T P, averaged over the ranks; the gradient is P Q^T.

Names, arguments and numbers are torch's. What differs: it is right with any number of buckets in
flight on any backend (torch's starts collectives from callbacks, see [Note: order of rounds] in
round_scheduler.py), batched PowerSGD works, columns of zeros do not become NaN, compression may
start with the first step if that is asked for, and there is ``state_dict()``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from paceline.errors import ConfigurationError
from paceline.hooks import lowrank
from paceline.hooks.factors import Factors, plan_matrices, plan_square
from paceline.hooks.interface import HookBucket, TensorFuture, comm_hook, start_all_reduce
from paceline.hooks.layout import BucketView
from paceline.hooks.round_scheduler import Rounds
from paceline.hooks.state import HookState

logger = logging.getLogger(__name__)

ERROR = "error"


class PowerSGDState(HookState):
    """Settings and memory of :func:`powerSGD_hook` and :func:`batched_powerSGD_hook`.

    Args:
        process_group: What to reduce over; None is the default group.
        matrix_approximation_rank: r, how many columns stand for a matrix.
        start_powerSGD_iter: Steps before this one use a plain all-reduce. Early gradients are the
            hardest to compress; 10 % of all steps is a good start.
        min_compression_rate: A matrix is compressed if that makes it this much smaller.
        use_error_feedback: Add to the next step what compression left out of this one.
        warm_start: Begin with the Q of the step before instead of a random one.
        orthogonalization_epsilon: Added to the length of columns when they are normalised.
        random_seed: Of the random Q, the same on all ranks.
        compression_stats_logging_frequency: In steps.
        batch_tensors_with_same_shape: Multiply matrices of one shape at once. Worth it for many
            small ones.
        compresses_first_steps: Allow ``start_powerSGD_iter`` to be 0 or 1 with error feedback or a
            warm start, which torch refuses because it cuts its buckets anew after the first step.
            Here what is remembered moves with the parameters.

    Raises:
        ConfigurationError: A setting is wrong.
    """

    ROUNDS = 2
    NAME = "powerSGD_hook"

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 1_000,
        min_compression_rate: float = 2,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        orthogonalization_epsilon: float = 0,
        random_seed: int = 0,
        compression_stats_logging_frequency: int = 10_000,
        batch_tensors_with_same_shape: bool = False,
        *,
        compresses_first_steps: bool = False,
    ) -> None:
        # As torch does; its stream of seeds is part of the numbers.
        import numpy as np

        super().__init__(process_group)
        if type(matrix_approximation_rank) is not int or matrix_approximation_rank < 1:
            raise ConfigurationError(
                f"matrix_approximation_rank is an int above 0, not {matrix_approximation_rank!r}"
            )
        remembers = use_error_feedback or warm_start
        if remembers and start_powerSGD_iter <= 1 and not compresses_first_steps:
            raise ConfigurationError(
                "Expect `start_powerSGD_iter` > 1 if `use_error_feedback` or `warm_start` is "
                f"enabled, but it is {start_powerSGD_iter!r}. Early gradients compress badly; if "
                "you want it anyway, say compresses_first_steps=True."
            )
        self.matrix_approximation_rank = matrix_approximation_rank
        self.start_powerSGD_iter = start_powerSGD_iter
        self.min_compression_rate = min_compression_rate
        self.use_error_feedback = use_error_feedback
        self.warm_start = warm_start
        self.orthogonalization_epsilon = orthogonalization_epsilon
        self.batch_tensors_with_same_shape = batch_tensors_with_same_shape
        self.compression_stats_logging_frequency = max(1, compression_stats_logging_frequency)
        self.rng: Any = np.random.RandomState(random_seed)
        self.total_numel_before_compression = 0
        self.total_numel_after_compression = 0
        self.next_stats_report = 0
        self._is_batched = False
        self._factors: dict[int, Factors] = {}
        self._loose_qs: dict[int, torch.Tensor] = {}  # by parameter number, between two cuts
        self._rng_at_mark: Any = None  # as long as nothing was drawn since: to read it is slow

    # --- what torch's class shows --------------------------------------------------------------

    @property
    def iter(self) -> int:
        """How many steps have been reduced."""
        return self.step

    @property
    def error_dict(self) -> dict[int, torch.Tensor]:
        """By bucket: what compression has left out."""
        return self.memory.flats(ERROR)

    @property
    def p_memory_dict(self) -> dict[int, torch.Tensor]:
        """By bucket: all P, flat."""
        return {index: factors.p_flat for index, factors in self._factors.items()}

    @property
    def q_memory_dict(self) -> dict[int, torch.Tensor]:
        """By bucket: all Q, flat."""
        return {index: factors.q_flat for index, factors in self._factors.items()}

    def compression_stats(self) -> tuple[float, int, int]:
        """Return how many times smaller, the number of values before, and the number sent."""
        before, after = self.total_numel_before_compression, self.total_numel_after_compression
        return (before / after if after > 0 else 0), before, after

    # --- rounds --------------------------------------------------------------------------------

    @property
    def first_step(self) -> int:
        """See ``start_powerSGD_iter``."""
        return self.start_powerSGD_iter

    def run_batched(self, bucket: HookBucket) -> TensorFuture:
        """Reduce a bucket as one square matrix."""
        self._is_batched = True
        return self.run(bucket)

    def rounds(self, view: BucketView, step: int) -> Rounds:
        """See the module's docstring."""
        factors, source = self._prepare(view, step)
        batches = factors.cut(source, self.group.size())
        self._make_ps(factors, batches)
        first = factors.message.to(view.values.dtype)
        yield lambda group: start_all_reduce(first, group)
        factors.message.copy_(first)
        for batch, p, q in zip(batches, factors.ps, factors.qs, strict=True):
            lowrank.orthogonalize(p, self.orthogonalization_epsilon)
            lowrank.project_back(batch, p, q)
        second = factors.q_flat.to(view.values.dtype)
        yield lambda group: start_all_reduce(second, group)
        torch.div(second, self.group.size(), out=factors.q_flat)
        self._finish(view, factors, source)
        return view.values

    def _prepare(self, view: BucketView, step: int) -> tuple[Factors, torch.Tensor]:
        """Return the factors of a bucket and the values to compress, errors included."""
        factors = self._factors_of(view)
        self._count(factors, view, step)
        keep, numel = self.use_error_feedback, factors.numel
        source = self.memory.get(view, ERROR, padded_numel=numel, keep=keep)
        source[: view.numel].add_(view.values)
        return factors, source

    def _make_ps(self, factors: Factors, batches: list[torch.Tensor]) -> None:
        for batch, p, q in zip(batches, factors.ps, factors.qs, strict=True):
            lowrank.orthogonalize(q, self.orthogonalization_epsilon)
            lowrank.project(batch, q, p)

    def _finish(self, view: BucketView, factors: Factors, source: torch.Tensor) -> None:
        """Write the gradients, and leave in ``source`` what they do not have."""
        direct = view.values.dtype == source.dtype and factors.numel == view.numel
        result = view.values if direct else torch.empty_like(source)
        factors.write(result)
        if not direct:
            view.values.copy_(result[: view.numel])
        if self.use_error_feedback:
            factors.keep_error(source, result)
            source[view.numel :].zero_()
        if not self.warm_start:
            del self._factors[view.index]
        elif not torch.isfinite(factors.q_flat).all():
            del self._factors[view.index]  # a Q that is NaN would stay so for ever

    def _count(self, factors: Factors, view: BucketView, step: int) -> None:
        self.total_numel_before_compression += view.numel
        self.total_numel_after_compression += factors.sent_numel
        if view.is_last and step >= self.next_stats_report:
            rate, before, after = self.compression_stats()
            logger.info("step %d: %d values sent as %d, %.1f x less", step, before, after, rate)
            self.next_stats_report = step + self.compression_stats_logging_frequency

    # --- factors -------------------------------------------------------------------------------

    def _factors_of(self, view: BucketView) -> Factors:
        factors = self._factors.get(view.index)
        if factors is not None and factors.numbers == view.numbers:
            self.memory.undo.before(factors.q_flat)
            return factors
        if factors is not None:  # see [Note: buckets change from one on]
            for index in [index for index in self._factors if index >= view.index]:
                self._loose_qs |= self._factors.pop(index).q_by_number()
        factors = self._plan(view)
        self._factors[view.index] = factors
        if not factors.take_qs(self._loose_qs):
            seed = self.rng.randint(1_000_000_000)
            self._rng_at_mark = None
            factors.randomise_qs(torch.Generator().manual_seed(int(seed)))
        return factors

    def _plan(self, view: BucketView) -> Factors:
        if self._is_batched:
            return plan_square(view, self.matrix_approximation_rank)
        return plan_matrices(
            view,
            self.matrix_approximation_rank,
            self.min_compression_rate,
            batched=self.batch_tensors_with_same_shape,
        )

    # --- going back -----------------------------------------------------------------------------

    def _extra_mark(self) -> Any:
        if self._rng_at_mark is None:
            self._rng_at_mark = self.rng.get_state()
        return self._rng_at_mark, dict(self._factors), dict(self._loose_qs), self._stats()

    def _set_extra_mark(self, extra: Any) -> None:
        rng, factors, loose_qs, stats = extra
        if rng is not self._rng_at_mark:
            self.rng.set_state(rng)
            self._rng_at_mark = rng
        self._factors, self._loose_qs = dict(factors), dict(loose_qs)
        self._set_stats(stats)

    def _shared_extra(self) -> dict[str, Any]:
        return self._extra_state()

    def _load_shared_extra(self, extra: Mapping[str, Any]) -> None:
        self._load_extra_state(extra)

    # --- checkpoints ---------------------------------------------------------------------------

    def _stats(self) -> list[int]:
        return [
            self.total_numel_before_compression,
            self.total_numel_after_compression,
            self.next_stats_report,
        ]

    def _set_stats(self, stats: list[int]) -> None:
        self.total_numel_before_compression, self.total_numel_after_compression = stats[:2]
        self.next_stats_report = stats[2]

    def _extra_state(self) -> dict[str, Any]:
        kind, keys, *position = self.rng.get_state()
        qs = {n: q for f in self._factors.values() for n, q in f.q_by_number()}
        return {
            "qs": {n: q.clone() for n, q in (self._loose_qs | qs).items()},
            "rng": [kind, keys.tolist(), *position],
            "is_batched": self._is_batched,
            "stats": self._stats(),
        }

    def _load_extra_state(self, extra: Mapping[str, Any]) -> None:
        import numpy as np

        kind, keys, *position = extra["rng"]
        self.rng.set_state((kind, np.array(keys, dtype=np.uint32), *position))
        self._factors = {}
        self._loose_qs = {int(number): q.clone() for number, q in extra["qs"].items()}
        self._is_batched = bool(extra["is_batched"])
        self._rng_at_mark = None
        self._set_stats(extra["stats"])


@comm_hook
def powerSGD_hook(state: PowerSGDState, bucket: HookBucket) -> TensorFuture:
    """Reduce a bucket by PowerSGD, parameter by parameter."""
    return state.run(bucket)


@comm_hook
def batched_powerSGD_hook(state: PowerSGDState, bucket: HookBucket) -> TensorFuture:
    """Reduce a bucket by PowerSGD as one square matrix: faster, and less accurate."""
    return state.run_batched(bucket)
