"""The helpers of torch's class that programs call: private names included."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline import DistributedDataParallel as DDP
from paceline.testing import run_ranks
from tests.ddp.compare import (
    TorchDDP,
    assert_identical,
    batch,
    gradients,
    pair,
    train_both,
)
from tests.ddp.models import mlp


class TestHelpers:
    def test_attributes_of_torchs_class(self) -> None:
        def on_rank() -> None:
            ours, theirs = pair(mlp(4), bucket_cap_mb=3)
            names = [
                *("dim", "device", "device_type", "device_ids", "output_device"),
                *("find_unused_parameters", "static_graph", "skip_all_reduce_unused_params"),
                *("bucket_bytes_cap", "bucket_bytes_cap_list", "broadcast_bucket_size"),
                *("require_backward_grad_sync", "require_forward_param_sync", "mixed_precision"),
                *("is_multi_device_module", "parameters_to_ignore", "batched_grad_copy"),
            ]
            different = {
                name: (getattr(ours, name, "missing"), getattr(theirs, name, "missing"))
                for name in names
                if getattr(ours, name, "missing") != getattr(theirs, name, "missing")
            }
            assert different == {}
            assert isinstance(ours, TorchDDP)

        run_ranks(2, on_rank)

    def test_data_parallel_params(self) -> None:
        def on_rank() -> None:
            model = mlp(4)
            ddp = DDP(model)
            assert list(ddp._get_data_parallel_params(ddp)) == list(model.parameters())
            named = dict(ddp._get_data_parallel_params(ddp, named_params=True))
            assert list(named) == [f"module.{n}" for n, _ in model.named_parameters()]

        run_ranks(1, on_rank)

    def test_remove_autograd_hooks(self) -> None:
        def on_rank() -> None:
            ddp, plain = DDP(mlp(4)), mlp(4)
            ddp._remove_autograd_hooks()
            if dist.get_rank() == 0:  # alone: a reduction would hang
                plain(batch(0)).square().mean().backward()
                ddp.module(batch(0)).square().mean().backward()
                assert_identical(gradients(ddp), gradients(plain))

        run_ranks(2, on_rank)

    def test_check_reducer_finalized(self) -> None:
        def on_rank() -> None:
            ddp = DDP(mlp(4))
            ddp._check_reducer_finalized()
            ddp(batch(0)).mean().backward()
            ddp._check_reducer_finalized()
            waiting = DDP(mlp(4), missing_gradients="wait")
            waiting(batch(0))
            waiting.module[4](batch(0)).mean().backward()
            with pytest.raises(RuntimeError):
                waiting._check_reducer_finalized()

        run_ranks(2, on_rank)

    def test_active_module_during_forward(self) -> None:
        class Asks(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(4, 4)
                self.seen: list[object] = []

            def forward(self, x: Tensor) -> Tensor:
                self.seen.append(TorchDDP._get_active_ddp_module())
                return self.linear(x)

        def on_rank() -> None:
            model = Asks()
            ddp = DDP(model)
            ddp(batch(0)).mean().backward()
            assert model.seen[0] is ddp
            assert TorchDDP._get_active_ddp_module() is None

        run_ranks(1, on_rank)

    def test_train_and_eval_reach_the_module(self) -> None:
        def on_rank() -> None:
            ddp = DDP(mlp(4))
            assert ddp.eval() is ddp
            assert not ddp.module.training
            assert ddp.train().module.training

        run_ranks(1, on_rank)

    def test_to_kwargs(self) -> None:
        def on_rank() -> None:
            ddp = DDP(mlp(4))
            x = batch(0)
            inputs, kwargs = ddp.to_kwargs((x,), {"y": x}, 0)
            assert torch.equal(inputs[0][0], x)
            assert torch.equal(kwargs[0]["y"], x)

        run_ranks(1, on_rank)

    def test_sink_clone_is_accepted(self) -> None:
        def on_rank() -> None:
            ours, theirs = pair(mlp(4))
            for ddp in (ours, theirs):
                ddp._set_ddp_sink_clone(False)
            train_both(ours, theirs, 2)

        run_ranks(2, on_rank)

    def test_check_reduction_is_deprecated(self) -> None:
        def on_rank() -> None:
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                DDP(mlp(4), check_reduction=True)
            assert len(seen) == 1
            assert issubclass(seen[0].category, (DeprecationWarning, FutureWarning))

        run_ranks(1, on_rank)

    def test_inputs_of_all_kinds(self) -> None:
        """Positional, keyword, nested: they reach the module unchanged."""

        class Echo(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(4, 4)

            def forward(self, *inputs: object, **kwargs: object) -> tuple[object, ...]:
                return self.linear(torch.ones(1, 4)), inputs, kwargs

        def on_rank() -> None:
            ddp = DDP(Echo())
            given = ([1, (2,)], {"a": None}), {"x": torch.ones(1), "y": "text"}
            output, inputs, kwargs = ddp(*given[0], **given[1])
            assert inputs == given[0]
            assert kwargs == given[1]
            output.sum().backward()
            (output, *_) = ddp()
            output.sum().backward()

        run_ranks(2, on_rank)
