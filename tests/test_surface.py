"""The public names, and what it costs to import them. A change here is one for users to read."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import subprocess
import sys
from importlib import metadata

import pytest

import paceline
from paceline import errors

SURFACE = {
    "paceline": """
        BucketStats DDPStats DataParallel DistributedDataParallel PacelineError ShardLoader Shards
        __version__ clip_grad_norm_ data_parallel elastic errors gather hooks log nn observe
        parallel_apply patch_torch ps replicate scatter scatter_kwargs testing unpatch_torch
    """,
    "paceline.elastic": "DistributedSampler IterableCursor MembershipEvent State run",
    "paceline.hooks": """
        Choice DDPCommHookType DiLoCoOptimizer DiLoCoState HierarchicalModelAverager HookCost
        HookState ModelAverager PeriodicModelAverager PostLocalSGDOptimizer PostLocalSGDState
        PowerSGDState QuantizedState TopKState allreduce_hook batched_powerSGD_hook
        bf16_compress_hook bf16_compress_wrapper choose diloco_hook fp16_compress_hook
        fp16_compress_wrapper noop_hook post_localSGD_hook powerSGD_hook
        quantization_perchannel_hook quantization_pertensor_hook quantized_hook register
        register_ddp_comm_hook topk_hook
    """,
    "paceline.nn": "SyncBatchNorm",
    "paceline.observe": """
        BucketStats BucketTimes DDPStats Handle StepClock StepRecord log metrics note on_step
    """,
    "paceline.ps": """
        Adagrad Adam Bags Embedding EmbeddingBag EmbeddingBagCollection Init LocalServers
        RowwiseAdagrad SGD Servers Start TableConfig connect local
    """,
    "paceline.testing": "ForkServerError RankFailure RanksFailedError run_ranks warm_up",
}


def run_python(code: str) -> str:
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return found.stdout.strip()


@pytest.mark.parametrize("name", SURFACE)
def test_names_are_these_and_no_others(name: str) -> None:
    module = importlib.import_module(name)
    assert set(module.__all__) == set(SURFACE[name].split())
    for public in module.__all__:
        assert getattr(module, public) is not None


@pytest.mark.parametrize(
    "name", ["paceline", "paceline.elastic", "paceline.observe", "paceline.ps"]
)
def test_no_late_name_is_that_of_a_submodule(name: str) -> None:
    """Importing the submodule would put it in the place of a name that is imported on use."""
    package = importlib.import_module(name)
    submodules = {found.name for found in pkgutil.iter_modules(package.__path__)}
    values = {public: getattr(package, public) for public in submodules & set(package.__all__)}
    assert all(inspect.ismodule(value) for value in values.values()), values


def test_only_the_base_of_the_errors_is_at_the_top() -> None:
    shown = {name for name in vars(errors) if name.endswith("Error") and hasattr(paceline, name)}
    assert shown == {"PacelineError"}


def test_dir_shows_the_surface() -> None:
    assert dir(paceline) == sorted(paceline.__all__)


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="module 'paceline' has no attribute 'nonsense'"):
        _ = paceline.nonsense


def test_version_is_that_of_the_package() -> None:
    assert paceline.__version__ == metadata.version("paceline")


def test_import_is_cheap() -> None:
    heavy = ("torch", "zmq", "numpy", "multiprocessing", "importlib.metadata", "http")
    code = f"import sys, paceline; print([n for n in {heavy} if n in sys.modules])"
    assert run_python(code) == "[]"


def test_modules_come_with_the_package() -> None:
    """Without an import of their own, and without what only servers need."""
    code = (
        "import sys, paceline\n"
        "for name in ('elastic', 'errors', 'testing', 'ps', 'hooks', 'nn', 'observe'):\n"
        "    print(getattr(paceline, name).__name__, 'zmq' in sys.modules)"
    )
    assert run_python(code).split("\n") == [
        "paceline.elastic False",
        "paceline.errors False",
        "paceline.testing False",
        "paceline.ps False",
        "paceline.hooks False",
        "paceline.nn False",
        "paceline.observe False",
    ]
