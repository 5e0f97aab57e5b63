"""Names, arguments, their order and defaults are torch's."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch.nn.parallel as torch_parallel
from torch.nn.parallel.scatter_gather import scatter_kwargs

import paceline

FUNCTIONS = {
    "data_parallel": torch_parallel.data_parallel,
    "gather": torch_parallel.gather,
    "parallel_apply": torch_parallel.parallel_apply,
    "replicate": torch_parallel.replicate,
    "scatter": torch_parallel.scatter,
    "scatter_kwargs": scatter_kwargs,
}


def arguments(function: Any) -> list[tuple[str, Any]]:
    return [(p.name, p.default) for p in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str) -> None:
    assert arguments(getattr(paceline, name)) == arguments(FUNCTIONS[name])


@pytest.mark.parametrize(
    "name", ["__init__", "forward", "replicate", "scatter", "parallel_apply", "gather"]
)
def test_methods_of_the_wrapper(name: str) -> None:
    theirs = getattr(torch_parallel.DataParallel, name)
    assert arguments(getattr(paceline.DataParallel, name)) == arguments(theirs)
    assert name in vars(paceline.DataParallel), "inherited from torch: it knows no CPU"


def test_attributes_are_torchs() -> None:
    import torch

    parallel = paceline.DataParallel(torch.nn.Identity(), ["cpu", "cpu"])
    for name in ("module", "device_ids", "output_device", "dim", "src_device_obj"):
        assert hasattr(parallel, name)
