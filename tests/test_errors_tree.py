"""The exception tree: public names, what each refines, and that programs can read and send them."""

from __future__ import annotations

import builtins
import pickle
import re

import pytest

from paceline import errors

# Name: (parent in our tree, the builtin it refines as well). From the docstring of errors.
TREE = {
    "ConfigurationError": ("PacelineError", "ValueError"),
    "ArgumentTypeError": ("ConfigurationError", "TypeError"),
    "UntrainableModuleError": ("ConfigurationError", "RuntimeError"),
    "UnknownHookError": ("ConfigurationError", "AttributeError"),
    "MeshError": ("ConfigurationError", "RuntimeError"),
    "SharedMemoryError": ("ConfigurationError", "RuntimeError"),
    "CollectiveInputError": ("ConfigurationError", "RuntimeError"),
    "TableShapeError": ("ConfigurationError", "AssertionError"),
    "PlacementError": ("ConfigurationError", "RuntimeError"),
    "ForeignWrapperError": ("ConfigurationError", "RuntimeError"),
    "AlreadyTrainingError": ("ConfigurationError", "RuntimeError"),
    "GroupNotReadyError": ("PacelineError", "ValueError"),
    "NotPicklableError": ("PacelineError", "RuntimeError"),
    "ModelMismatchError": ("PacelineError", "RuntimeError"),
    "ParametersChangedError": ("PacelineError", "RuntimeError"),
    "FinalizationError": ("PacelineError", "RuntimeError"),
    "StepError": ("PacelineError", "RuntimeError"),
    "UnusedParametersError": ("StepError", "RuntimeError"),
    "SharedParametersError": ("StepError", "RuntimeError"),
    "GraphChangedError": ("StepError", "RuntimeError"),
    "ReadyTwiceError": ("StepError", "RuntimeError"),
    "NonFiniteGradientError": ("StepError", "ArithmeticError"),
    "GradientMismatchError": ("StepError", "RuntimeError"),
    "HookResultError": ("StepError", "TypeError"),
    "HookInputError": ("StepError", "TypeError"),
    "HookOrderLostError": ("StepError", "RuntimeError"),
    "AutogradGradError": ("StepError", "RuntimeError"),
    "BackwardOutsideNoSyncError": ("StepError", "RuntimeError"),
    "PeerFailedError": ("StepError", "RuntimeError"),
    "DesynchronizedError": ("StepError", "RuntimeError"),
    "ReplicasDifferError": ("DesynchronizedError", "RuntimeError"),
    "CollectiveError": ("StepError", "RuntimeError"),
    "PeerLostError": ("CollectiveError", "ConnectionError"),
    "CollectiveTimeoutError": ("CollectiveError", "TimeoutError"),
    "CollectiveMismatchError": ("CollectiveError", "RuntimeError"),
    "GroupAbortedError": ("CollectiveError", "RuntimeError"),
    "GroupClosedError": ("CollectiveError", "RuntimeError"),
    "HookSignatureError": ("PacelineError", "ValueError"),
    "HookNotCallableError": ("PacelineError", "TypeError"),
    "HookAlreadyRegisteredError": ("PacelineError", "RuntimeError"),
    "ReplicaCountError": ("PacelineError", "AssertionError"),
    "ScatterError": ("PacelineError", "RuntimeError"),
    "ScatterDimError": ("ScatterError", "IndexError"),
    "GatherError": ("PacelineError", "RuntimeError"),
    "GatherKeysError": ("GatherError", "ValueError"),
    "GatherTypeError": ("GatherError", "TypeError"),
    "TorchNameError": ("PacelineError", "ImportError"),
    "RecordsError": ("PacelineError", "ValueError"),
    "SharedWriteError": ("PacelineError", "RuntimeError"),
    "ServerError": ("PacelineError", "RuntimeError"),
    "ServerLostError": ("ServerError", "ConnectionError"),
    "ServerRefusedError": ("ServerError", "RuntimeError"),
    "PushRefusedError": ("ServerRefusedError", "RuntimeError"),
    "ServerKeyError": ("ServerError", "PermissionError"),
    "ServersClosedError": ("ServerError", "RuntimeError"),
    "IdRangeError": ("PacelineError", "IndexError"),
    "BagsError": ("PacelineError", "ValueError"),
    "ServerStartError": ("PacelineError", "RuntimeError"),
    "ServerStateError": ("ServerStartError", "RuntimeError"),
    "NormInputError": ("PacelineError", "ValueError"),
    "MembershipError": ("PacelineError", "RuntimeError"),
    "CheckpointError": ("MembershipError", "RuntimeError"),
    "StateTransferError": ("MembershipError", "RuntimeError"),
}


def defined() -> dict[str, type[errors.PacelineError]]:
    return {
        name: value
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.PacelineError)
    }


def test_names_are_these_and_no_others() -> None:
    assert set(defined()) == {"PacelineError", *TREE}


@pytest.mark.parametrize("name", sorted(TREE))
def test_derives_from_its_parent_and_its_builtin(name: str) -> None:
    parent, builtin = TREE[name]
    error = getattr(errors, name)
    assert issubclass(error, getattr(errors, parent))
    assert issubclass(error, getattr(builtins, builtin))
    assert getattr(errors, parent) in error.__bases__


@pytest.mark.parametrize("name", ["PacelineError", *sorted(TREE)])
def test_carries_its_facts_also_through_pickle(name: str) -> None:
    error = getattr(errors, name)("what", rank=3, parameters=["a", "b"], operation="sum")
    for one in (error, pickle.loads(pickle.dumps(error))):
        assert type(one) is type(error)
        assert str(one) == "what"
        assert (one.rank, one.parameters, one.operation) == (3, ("a", "b"), "sum")


def test_docstring_draws_this_tree() -> None:
    """One line per class; children are indented below their parent."""
    drawn: dict[str, tuple[str, str | None]] = {}
    path: list[str] = ["PacelineError"]
    for line in (errors.__doc__ or "").splitlines():
        if match := re.match(r"^  ([│├└─ ]+)(\w+Error)(?: \((\w+)\))?", line):
            depth = len(match[1]) // 4
            path[depth:] = [match[2]]
            drawn[match[2]] = (path[depth - 1], match[3])
    assert set(drawn) == set(TREE)
    for name, (parent, builtin) in drawn.items():
        assert parent == TREE[name][0]
        if builtin is not None:
            assert builtin == TREE[name][1]
