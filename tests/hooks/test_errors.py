"""Bad input: what each hook says, or does as documented."""

from __future__ import annotations

import gc
import math
import os
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from paceline import DistributedDataParallel as DDP
from paceline import hooks
from paceline.errors import (
    ConfigurationError,
    HookInputError,
    HookResultError,
    NonFiniteGradientError,
    UnknownHookError,
)
from paceline.testing import RanksFailedError, run_ranks
from tests.hooks.cases import CASES, Bucket

COMPRESSING = [name for name in CASES if name != "allreduce"]


class TestUnknownHook:
    def test_by_name(self) -> None:
        with pytest.raises(UnknownHookError, match=r"no hook 'int4'.*'int8'"):
            hooks.register(None, "int4")  # type: ignore[arg-type]

    @pytest.mark.parametrize("kind", ["ALLREDUCE", None, 3])
    def test_by_type(self, kind: Any) -> None:
        with pytest.raises(AttributeError, match=r"a member of DDPCommHookType.*BATCHED_POWER_SGD"):
            hooks.register_ddp_comm_hook(kind, None)  # type: ignore[arg-type]


class TestOptions:
    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("fp16", "hook 'fp16' does not take ratio=0.5; it takes no options"),
            ("int8", "hook 'int8' does not take ratio=0.5; it takes: block, stochastic, error_"),
            ("powersgd", "'powersgd' does not take ratio=0.5; it takes: matrix_approximation_rank"),
            ("diloco", "hook 'diloco' does not take ratio=0.5; it takes: start_step"),
        ],
    )
    def test_unknown(self, name: str, text: str) -> None:
        with pytest.raises(ConfigurationError, match=text):
            hooks.register(None, name, ratio=0.5)  # type: ignore[arg-type]

    def test_what_the_name_says_already(self) -> None:
        with pytest.raises(ConfigurationError, match="hook 'int8' does not take wire='sign'"):
            hooks.register(None, "int8", wire="sign")  # type: ignore[arg-type]

    def test_channels_of_no_values(self) -> None:
        bucket = Bucket(torch.ones(4), [torch.zeros(4)])
        with pytest.raises(ConfigurationError, match="bucket_size is an int above 0, not 0"):
            hooks.quantization_perchannel_hook(None, bucket, bucket_size=0)


class TestWrongKindOfGradient:
    @pytest.mark.parametrize("name", COMPRESSING)
    def test_integers(self, name: str) -> None:
        """Refused before a group is asked for, so this needs none."""
        state, hook = CASES[name].make()
        with pytest.raises(HookInputError, match="bucket 0 is int32"):
            hook(state, Bucket(torch.ones(4, dtype=torch.int32), [torch.zeros(4)]))

    def test_sparse_names_hook_and_shape(self) -> None:
        def on_rank() -> None:
            model = DDP(nn.Embedding(10, 3, sparse=True))
            hooks.register(model, "int8")
            model(torch.tensor([1, 2])).sum().backward()

        with pytest.raises(RanksFailedError) as caught:
            run_ranks(2, on_rank)
        text = str(caught.value)
        assert "quantized_hook works on dense floating-point gradients" in text
        assert "bucket 0 is sparse (parameters of shape (10, 3))" in text
        assert "Use allreduce_hook" in text

    def test_is_what_torch_raises(self) -> None:
        assert issubclass(HookInputError, RuntimeError)
        assert issubclass(HookInputError, TypeError)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_reach_every_rank_and_are_forgotten(bad: float) -> None:
    """As with a plain all-reduce; and error feedback does not keep them."""

    def on_rank() -> None:
        world = dist.get_world_size()
        for name, case in CASES.items():
            state, hook = case.make()
            parameters = [torch.zeros(20, 30), torch.zeros(40)]
            for step in range(4):
                generator = torch.Generator().manual_seed(step)
                values = torch.randn(world, 640, generator=generator)
                buffer = values[dist.get_rank()].clone()
                if step == 1 and dist.get_rank() == 1:
                    buffer[100] = bad
                hook(state, Bucket(buffer, parameters)).wait()
                if step == 1:
                    assert not torch.isfinite(buffer[100]), name
                else:
                    assert torch.isfinite(buffer).all(), (name, step)

    run_ranks(2, on_rank)


def test_ddp_names_the_parameter_of_a_nan_under_quantisation() -> None:
    def on_rank() -> None:
        torch.manual_seed(0)
        model = DDP(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nonfinite="raise")
        hooks.register(model, "int8")
        x = torch.full((2, 4), math.nan if dist.get_rank() == 1 else 1.0)
        with pytest.raises(NonFiniteGradientError):
            model(x).sum().backward()
        model.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        assert all(torch.isfinite(p.grad).all() for p in model.parameters())

    run_ranks(2, on_rank)


class TestWrongResult:
    """A hook that returns the wrong thing, under a wrapper of ours that also runs on torch's."""

    @pytest.mark.parametrize(
        ("result", "text"),
        [
            (lambda b: b.buffer(), "returned Tensor instead of a torch.futures.Future"),
            (lambda b: None, "returned NoneType"),
            (lambda b: hooks.noop_hook(None, b).then(lambda f: "text"), "holds str, not a tensor"),
            (lambda b: hooks.noop_hook(None, b).then(lambda f: f.value()[:1]), "holds 1 elements"),
        ],
    )
    def test_is_named(self, result: Any, text: str) -> None:
        def wrong(state: object, bucket: Any) -> Any:
            return result(bucket)

        def on_rank() -> None:
            model = DDP(nn.Linear(3, 3))
            model.register_comm_hook(None, wrong)
            with pytest.raises(HookResultError, match=text):
                model(torch.ones(1, 3)).sum().backward()

        run_ranks(1, on_rank)

    @pytest.mark.parametrize("wrap", [DDP, TorchDDP], ids=["paceline", "torch"])
    def test_inside_a_wrapper_for_16_bits(self, wrap: Any) -> None:
        def tensor_hook(state, bucket):  # type: ignore[no-untyped-def]
            return bucket.buffer()

        def on_rank() -> None:
            model = wrap(nn.Linear(3, 3))
            model.register_comm_hook(None, hooks.fp16_compress_wrapper(tensor_hook))
            with pytest.raises(RuntimeError, match=r"tensor_hook returned Tensor instead of"):
                model(torch.ones(1, 3)).sum().backward()

        run_ranks(1, on_rank)


@pytest.mark.parametrize("wrap", [DDP, TorchDDP], ids=["paceline", "torch"])
def test_an_error_in_a_round_is_raised_by_backward(wrap: Any) -> None:
    """And the next bucket says that the order is lost, instead of hanging or mixing up numbers."""

    class Failing(hooks.HookState):
        ROUNDS = 1
        NAME = "failing_hook"

        def rounds(self, view: Any, step: int) -> Any:
            raise ValueError(f"no way with bucket {view.index}")
            yield

    def failing_hook(state, bucket):  # type: ignore[no-untyped-def]
        return state.run(bucket)

    def on_rank() -> None:
        model = wrap(nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]), bucket_cap_mb=0.0003)
        model.register_comm_hook(Failing(), failing_hook)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="no way with bucket 0"):
                model(torch.ones(1, 8)).sum().backward()
        # What the error says helps: a new wrapper with a new state.
        again = wrap(nn.Linear(8, 8))
        hooks.register(again, "int8")
        again(torch.ones(1, 8)).sum().backward()
        assert torch.isfinite(again.module.weight.grad).all()

    run_ranks(2, on_rank)


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [DDP, TorchDDP], ids=["paceline", "torch"])
def test_a_rank_that_does_not_come_ends_the_step_in_time(wrap: Any) -> None:
    """The rounds of a hook have the time-out of the group, and nothing waits beyond it."""

    def on_rank() -> tuple[float, str]:
        dist.init_process_group(
            "gloo",
            init_method=os.environ["PACELINE_TEST_INIT_METHOD"],
            rank=int(os.environ["RANK"]),
            world_size=2,
            timeout=timedelta(seconds=2),
        )
        model = wrap(nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]), bucket_cap_mb=0.0003)
        hooks.register(model, "int8")
        model(torch.ones(1, 8)).sum().backward()
        began_s, text = time.monotonic(), ""
        if dist.get_rank() == 0:
            with pytest.raises(RuntimeError) as caught:
                model(torch.ones(1, 8)).sum().backward()
            text = str(caught.value)
        else:
            time.sleep(6)
        return time.monotonic() - began_s, text

    (waited_s, text), _ = run_ranks(2, on_rank, init=False)
    assert 1.5 < waited_s < 6
    assert "time" in text.lower() or "deadline" in text


def test_no_thread_outlives_model_and_group() -> None:
    def on_rank() -> None:
        before = set(threading.enumerate())
        model = DDP(nn.Linear(8, 8))
        hooks.register(model, "int8")
        model(torch.ones(1, 8)).sum().backward()
        [thread] = set(threading.enumerate()) - before
        assert thread.name == "paceline-rounds"
        del model
        dist.destroy_process_group()
        gc.collect()
        thread.join(timeout=60)
        assert not thread.is_alive()

    run_ranks(1, on_rank)


class TestSettings:
    @pytest.mark.parametrize(
        ("make", "text"),
        [
            (lambda: hooks.QuantizedState(wire="int4"), "wire='int4' is not known"),
            (lambda: hooks.QuantizedState(block=12), "multiple of 8"),
            (lambda: hooks.QuantizedState(block=0), "multiple of 8"),
            (lambda: hooks.QuantizedState(wire="e4m3", stochastic=True), "works with wire='int8'"),
            (lambda: hooks.TopKState(ratio=0.0), "ratio is above 0"),
            (lambda: hooks.TopKState(ratio=1.5), "ratio is above 0"),
            (lambda: hooks.TopKState(warmup_ratio=2.0), "warmup_ratio is above 0"),
            (lambda: hooks.TopKState(momentum=1.0), "momentum is at least 0"),
            (lambda: hooks.TopKState(momentum_masking=True), "needs a momentum above 0"),
            (lambda: hooks.TopKState(warmup_steps=-1), "warmup_steps is not negative"),
            (lambda: hooks.PowerSGDState(None, matrix_approximation_rank=0), "int above 0"),
        ],
    )
    def test_are_checked(self, make: Any, text: str) -> None:
        with pytest.raises(ConfigurationError, match=text):
            make()
