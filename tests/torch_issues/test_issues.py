"""What torch's wrapper does in the situations of ``docs/torch-issues.md``, and what ours does.

All cases share one set of ranks for each wrapper. Both sides are asserted: when torch changes, the
page has to.
"""

from __future__ import annotations

import gc
import re
import warnings
from dataclasses import dataclass

import pytest
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import paceline
from paceline.testing import run_ranks
from tests.torch_issues.cases import CASES

WRONG, RIGHT = "False", "True"


@dataclass(frozen=True)
class Shown:
    """The result of a case, or ``Error: text``; and the first warning of Paceline or torch."""

    result: str
    warning: str


def show_all(name: str) -> dict[str, Shown]:
    """In a rank: run every case with one of the two wrappers."""
    wrap = TorchDDP if name == "torch" else paceline.DistributedDataParallel
    return {case.__name__: show(case, wrap) for case in CASES}


def show(case: object, wrap: object) -> Shown:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            result = str(case(wrap))  # type: ignore[operator]
        except Exception as error:
            result = f"{type(error).__name__}: {error}"
    gc.collect()  # a wrapper that raised may be in a cycle
    return Shown(result, " | ".join(str(one.message) for one in said))


@pytest.fixture(scope="module")
def shown() -> dict[str, list[dict[str, Shown]]]:
    return {name: run_ranks(2, show_all, name, timeout_s=200) for name in ("torch", "paceline")}


# case: what torch's shows, what ours shows; both are patterns, on every rank.
EXPECTED = {
    "two_forwards_with_a_buffer": (RIGHT, RIGHT),
    "two_forwards_with_batch_norm": (RIGHT, RIGHT),
    "batch_norm_in_eval_called_again": (RIGHT, RIGHT),
    "gradient_penalty": (RIGHT, RIGHT),
    "grad_of_parameters": (WRONG, "AutogradGradError: Rank .* would get its own"),
    "backward_with_create_graph": ("RuntimeError: a leaf Variable that requires grad", RIGHT),
    "always_in_no_sync": (WRONG, "BackwardOutsideNoSyncError: Rank .*Leave no_sync"),
    "only_backward_in_no_sync": (RIGHT, RIGHT),
    "unequal_batches": (WRONG, RIGHT),
    "unequal_batches_accumulated": (WRONG, RIGHT),
    "saved_for_one_process": ("Unexpected key.*module.0.weight", RIGHT),
    "loaded_from_one_process": ("Missing key.*module.0.weight", RIGHT),
    "names_of_parameters": ("prefix: True; .*: False", "prefix: True; .*: True"),
    "unfrozen_after_wrapping": (WRONG, "ParametersChangedError: .*0.weight, 0.bias"),
    "frozen_after_wrapping": (
        "RuntimeError: Expected to have finished reduction",
        "UnusedParametersError: .*requires_grad is False there: 0.weight, 0.bias",
    ),
    "frozen_and_unfrozen_again": (RIGHT, RIGHT),
    "nothing_to_train": (
        "RuntimeError: DistributedDataParallel is not needed",
        "UntrainableModuleError: .*set requires_grad on what shall be trained before",
    ),
    "unused_parameter": (
        "the first step said nothing; then Expected to have finished reduction",
        "^UnusedParametersError: .*rank 0: spare.weight, spare.bias",
    ),
    "output_without_loss": (RIGHT, RIGHT),
    "dataclass_output": (RIGHT, RIGHT),
    "dict_output": (RIGHT, RIGHT),
    "checkpointed_twice": (WRONG, "ReadyTwiceError: .*layer.bias: gradient number 2"),
    "backward_twice": (WRONG, RIGHT),
    "through_the_module": (WRONG, WRONG),
    "converted_after_wrapping": (WRONG, "GradientMismatchError: .*is torch.float64 now"),
    "reloaded_by_assignment": (WRONG, "ParametersChangedError: .*load_state_dict"),
    "pickled": (RIGHT, RIGHT),
    "saved_whole": (RIGHT, RIGHT),
    "deep_copied": (RIGHT, RIGHT),
    "gradients_share_the_buckets_memory": (WRONG, RIGHT),
    "sync_batch_norm_on_cpu": ("ValueError: SyncBatchNorm layers only work with GPU", RIGHT),
}
# Ours trains on as torch's does, and says so.
WARNED = {
    "through_the_module": "2 times in a row .* never averaged",
}


def test_every_case_has_its_expectation() -> None:
    assert [case.__name__ for case in CASES] == list(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_torch(name: str, shown: dict[str, list[dict[str, Shown]]]) -> None:
    for rank in shown["torch"]:
        assert re.search(EXPECTED[name][0], rank[name].result, re.DOTALL)


@pytest.mark.parametrize("name", EXPECTED)
def test_ours(name: str, shown: dict[str, list[dict[str, Shown]]]) -> None:
    for rank in shown["paceline"]:
        assert re.search(EXPECTED[name][1], rank[name].result, re.DOTALL)


@pytest.mark.parametrize("name", WARNED)
def test_what_trains_on_is_warned_of(name: str, shown: dict[str, list[dict[str, Shown]]]) -> None:
    for of_torch, of_ours in zip(shown["torch"], shown["paceline"], strict=True):
        assert not re.search("never averaged", of_torch[name].warning)
        assert re.search(WARNED[name], of_ours[name].warning)
