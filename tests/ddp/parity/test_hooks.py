"""torch's communication hooks run unchanged on our buckets, with the results they have on torch's.

No postponed annotations in this file: torch's DDP refuses hooks whose annotations are strings.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    DDPCommHookType,
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    register_ddp_comm_hook,
)

from paceline import DistributedDataParallel as DDP
from paceline.testing import run_ranks
from tests.ddp.compare import (
    TorchDDP,
    assert_close,
    assert_identical,
    batch,
    gradients,
    pair,
    reference_gradients,
    step_both,
    train_both,
)
from tests.ddp.models import Bag, Branches, mlp, seeded

Register = Callable[[DDP | TorchDDP], Any]


def power_sgd(**options: Any) -> powerSGD_hook.PowerSGDState:
    settings: dict[str, Any] = {
        "matrix_approximation_rank": 1,
        "start_powerSGD_iter": 2,
        "min_compression_rate": 1,
    }
    return powerSGD_hook.PowerSGDState(None, **(settings | options))


def local_sgd() -> post_localSGD_hook.PostLocalSGDState:
    alone, _ = dist.new_subgroups(group_size=1)
    return post_localSGD_hook.PostLocalSGDState(
        process_group=None, subgroup=alone, start_localSGD_iter=3
    )


def renamed(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Torch knows bfloat16 hooks by their names, and refuses them without a GPU."""
    return lambda state, bucket: hook(state, bucket)


fp16_wrapper, bf16_wrapper = (
    default_hooks.fp16_compress_wrapper,
    default_hooks.bf16_compress_wrapper,
)
HOOKS: dict[str, Register] = {
    "allreduce": lambda m: m.register_comm_hook(None, default_hooks.allreduce_hook),
    "fp16": lambda m: m.register_comm_hook(None, default_hooks.fp16_compress_hook),
    "bf16": lambda m: m.register_comm_hook(None, renamed(default_hooks.bf16_compress_hook)),
    "noop": lambda m: m.register_comm_hook(None, debugging_hooks.noop_hook),
    "powerSGD": lambda m: m.register_comm_hook(power_sgd(), powerSGD_hook.powerSGD_hook),
    "powerSGD, rank 2, warm": lambda m: m.register_comm_hook(
        power_sgd(matrix_approximation_rank=2, warm_start=True), powerSGD_hook.powerSGD_hook
    ),
    "powerSGD, no feedback": lambda m: m.register_comm_hook(
        power_sgd(use_error_feedback=False, warm_start=False), powerSGD_hook.powerSGD_hook
    ),
    # Before its first compressed step: there torch 2.13's own orthogonalisation refuses its matrix.
    "batched powerSGD": lambda m: m.register_comm_hook(
        power_sgd(start_powerSGD_iter=99), powerSGD_hook.batched_powerSGD_hook
    ),
    "post-local SGD": lambda m: m.register_comm_hook(
        local_sgd(), post_localSGD_hook.post_localSGD_hook
    ),
    "fp16 around allreduce": lambda m: m.register_comm_hook(
        None, fp16_wrapper(default_hooks.allreduce_hook)
    ),
    "bf16 around allreduce": lambda m: m.register_comm_hook(
        None, renamed(bf16_wrapper(default_hooks.allreduce_hook))
    ),
    "fp16 around powerSGD": lambda m: m.register_comm_hook(
        power_sgd(), fp16_wrapper(powerSGD_hook.powerSGD_hook)
    ),
    "builtin allreduce": lambda m: m._register_builtin_comm_hook(
        dist.BuiltinCommHookType.ALLREDUCE
    ),
    "builtin fp16": lambda m: m._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS),
    "by type": lambda m: register_ddp_comm_hook(DDPCommHookType.FP16_COMPRESS, m, None),
    "powerSGD by type": lambda m: register_ddp_comm_hook(DDPCommHookType.POWER_SGD, m, None),
    "noop by type": lambda m: register_ddp_comm_hook(DDPCommHookType.NOOP, m, None),
}


@pytest.mark.parametrize("views", [None, True, False])
def test_hooks_of_torch(views: bool | None) -> None:
    def on_rank() -> list[str]:
        different = []
        for name, register in HOOKS.items():
            # powerSGD starts collectives in callbacks: on gloo, with one bucket only.
            cap_mb = 25 if "powerSGD" in name else 4e-4
            ours, theirs = pair(
                mlp(8, depth=4), gradient_as_bucket_view=views, bucket_cap_mb=cap_mb
            )
            register(ours)
            register(theirs)
            for step in range(6):
                for model in (ours, theirs):
                    model.zero_grad()
                    model(batch(step, width=8)).square().mean().backward()
                try:
                    assert_identical(gradients(ours), gradients(theirs))
                except AssertionError as error:
                    different.append(f"{name}, step {step}: {error}")
                    break
        return different

    assert run_ranks(2, on_rank) == [[], []]


class Recorder:
    """What a hook saw of its buckets."""

    def __init__(self) -> None:
        self.steps: list[list[tuple[int, bool, int]]] = []

    def hook(self, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        gradients, parameters = bucket.gradients(), bucket.parameters()
        if not bucket.buffer().is_sparse:  # torch's has no gradients() then
            assert [g.shape for g in gradients] == [p.shape for p in parameters]
            assert sum(g.numel() for g in gradients) == bucket.buffer().numel()
            start = bucket.buffer().data_ptr()
            for gradient in gradients:
                assert gradient.data_ptr() == start, "gradients are views, one behind the other"
                start += gradient.nbytes
        self.steps[-1].append((bucket.index(), bucket.is_last(), bucket.buffer().numel()))
        return default_hooks.allreduce_hook(None, bucket)


def record(ddp: nn.Module, losses: list[Callable[[nn.Module], Tensor]]) -> Recorder:
    recorder = Recorder()
    ddp.register_comm_hook(None, recorder.hook)
    for loss in losses:
        recorder.steps.append([])
        ddp.zero_grad()
        loss(ddp).backward()
    return recorder


def test_the_last_bucket_says_so_exactly_once() -> None:
    def tokens() -> Tensor:
        return torch.tensor([[1, 2], [3, 4]]) + dist.get_rank()

    def on_rank() -> None:
        torch.manual_seed(0)
        cases: list[tuple[nn.Module, dict[str, Any], Callable[[nn.Module], Tensor]]] = [
            (mlp(4), {}, lambda m: m(batch(0)).mean()),
            (mlp(4), {"bucket_cap_mb": 1e-6}, lambda m: m(batch(0)).mean()),
            (mlp(4), {"static_graph": True}, lambda m: m(batch(0)).mean()),
            (
                Branches(),
                {"find_unused_parameters": True, "bucket_cap_mb": 1e-6},
                lambda m: m(batch(0), "b").mean(),
            ),
            (seeded(Bag), {}, lambda m: m(tokens()).mean()),
        ]
        for model, options, loss in cases:
            ours, theirs = pair(model, **options)
            found = record(ours, [loss] * 3).steps
            expected = record(theirs, [loss] * 3).steps
            for seen, torchs in zip(found, expected, strict=True):
                assert [index for index, _, _ in seen] == list(range(len(seen)))
                assert [last for _, last, _ in seen] == [False] * (len(seen) - 1) + [True]
                assert sum(numel for *_, numel in seen) == sum(numel for *_, numel in torchs)

    run_ranks(2, on_rank)


def test_set_buffer_and_a_result_of_its_own() -> None:
    """A hook may put another tensor in the bucket, or give one back that was never in it."""

    def replaced(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        bucket.set_buffer(bucket.buffer() * 3)
        assert bucket.gradients()[0].untyped_storage().data_ptr() == (
            bucket.buffer().untyped_storage().data_ptr()
        )
        return default_hooks.allreduce_hook(None, bucket)

    def returned(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(torch.ones_like(bucket.buffer()))
        return future

    def on_rank() -> None:
        for hook in (replaced, returned):
            for views in (None, True, False):
                ours, theirs = pair(mlp(4), gradient_as_bucket_view=views)
                for model in (ours, theirs):
                    model.register_comm_hook(None, hook)
                train_both(ours, theirs)

    run_ranks(2, on_rank)


def test_chained_futures() -> None:
    """A hook whose second collective starts in a callback of the first."""

    def twice(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        first = dist.all_reduce(bucket.buffer(), async_op=True).get_future()

        def again(done: torch.futures.Future[Any]) -> Tensor:
            value = done.value()[0]
            dist.all_reduce(value)
            return value / dist.get_world_size() ** 2

        return first.then(again)

    def on_rank() -> None:
        # One bucket: with several, callbacks of two ranks may start collectives in another order.
        ours, theirs = pair(mlp(4), bucket_cap_mb=100)
        for model in (ours, theirs):
            model.register_comm_hook(None, twice)
        train_both(ours, theirs)

    run_ranks(2, on_rank)


def test_gradients_in_a_hook_are_not_divided() -> None:
    def on_rank() -> None:
        ours, theirs = pair(mlp(4))
        for model in (ours, theirs):
            model.register_comm_hook(None, debugging_hooks.noop_hook)
        found = step_both(ours, theirs, lambda m: m(batch(0)).square().mean())
        plain = mlp(4)
        plain(batch(0)).square().mean().backward()
        assert_identical(found, gradients(plain))

    run_ranks(2, on_rank)


def test_with_unused_parameters_and_no_sync() -> None:
    def on_rank() -> None:
        torch.manual_seed(0)
        ours, theirs = pair(Branches(), find_unused_parameters=True)
        for model in (ours, theirs):
            model.register_comm_hook(None, default_hooks.allreduce_hook)
        names = ["ab", "b"][dist.get_rank()]
        for step in range(3):
            for model in (ours, theirs):
                model.zero_grad()
                with model.no_sync():
                    model(batch(10 + step), "a").mean().backward()
                model(batch(step), names).mean().backward()
            found = gradients(ours)
            assert_identical(found, gradients(theirs))
            assert found["branches.c.weight"] is None

    run_ranks(2, on_rank)


def test_a_hook_with_sparse_gradients() -> None:
    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        work = dist.all_reduce(bucket.buffer() / dist.get_world_size(), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    def on_rank() -> None:
        generator = torch.Generator().manual_seed(dist.get_rank())
        words = [torch.randint(12, (3, 4), generator=generator) for _ in range(3)]
        ours, theirs = pair(seeded(Bag))
        for model in (ours, theirs):
            model.register_comm_hook(None, hook)
        for step in range(3):
            step_both(ours, theirs, lambda m, s=step: m(words[s]).square().mean())

    run_ranks(2, on_rank)


def test_annotations_as_strings() -> None:
    """What ``from __future__ import annotations`` makes of a good hook; torch refuses it."""

    def on_rank() -> None:
        for text in ("GradBucket", "dist.GradBucket", "torch.distributed.GradBucket", "Any"):

            def hook(state, bucket):  # type: ignore[no-untyped-def]
                return default_hooks.allreduce_hook(None, bucket)

            hook.__annotations__ = {"bucket": text, "return": "torch.futures.Future[torch.Tensor]"}
            DDP(mlp(4)).register_comm_hook(None, hook)

    run_ranks(1, on_rank)


def test_three_ranks() -> None:
    def on_rank() -> None:
        for name in ("allreduce", "builtin allreduce", "fp16", "bf16"):
            ddp = DDP(mlp(4), bucket_cap_mb=1e-4)
            HOOKS[name](ddp)
            for step in range(2):
                ddp.zero_grad()
                ddp(batch(step)).square().mean().backward()
                found = gradients(ddp)
                expected = reference_gradients(
                    ddp, lambda m, rank, s=step: m(batch(s, rank)).square().mean()
                )
                if "allreduce" in name:
                    assert_close(found, expected)
                else:
                    for key, value in found.items():
                        torch.testing.assert_close(value, expected[key], rtol=2e-2, atol=2e-3)

    run_ranks(3, on_rank)
