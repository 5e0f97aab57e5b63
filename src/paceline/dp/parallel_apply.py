"""``parallel_apply``: run modules, or functions, at the same time, each on its device.

Called by :class:`paceline.dp.DataParallel` and by users. Knows nothing about how replicas are made.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.containers import first_tensor
from paceline.dp.devices import CPU, DeviceLike, DeviceScope, accelerator_type, parse_device
from paceline.dp.intraop_threads import divide_intraop_threads
from paceline.dp.replica_threads import POOL, Job, ReplicaOutcome
from paceline.errors import PacelineError, ReplicaCountError
from paceline.thread_state import ThreadState, in_callers_context


def parallel_apply(
    modules: Sequence[Callable[..., Any]],
    inputs: Sequence[Any],
    kwargs_tup: Sequence[dict[str, Any]] | None = None,
    devices: Sequence[DeviceLike | None] | None = None,
) -> list[Any]:
    """Call each module with its inputs, all at the same time, and return what they return.

    Each runs on a thread that stays for the next call, under the caller's grad mode, inference
    mode, autocast and context variables. CPU entries share the caller's intra-op threads. A single
    module runs on the caller's own thread.

    Args:
        modules: Modules or functions.
        inputs: For each, a tuple or list of positional arguments, or one argument.
        kwargs_tup: For each, its keyword arguments.
        devices: For each, where it runs. None: where its first tensor is, else on the current
            accelerator, else on the CPU.

    Raises:
        ReplicaCountError: If the sequences have different lengths.
        Exception: What the first failing replica raised: the same object, with its traceback and
            a note that names replica and device. All replicas have ended then.
    """
    _check_lengths(len(modules), inputs=inputs, kwargs_tup=kwargs_tup, devices=devices)
    if not modules:
        return []
    kwargs = kwargs_tup if kwargs_tup is not None else [{} for _ in modules]
    where = devices if devices is not None else [None] * len(modules)
    targets = [_choose_device(d, i) for d, i in zip(where, inputs, strict=True)]
    if len(modules) == 1:
        outcomes = [_run_here(_call(modules[0], inputs[0], kwargs[0], targets[0]))]
    else:
        outcomes = _run_on_threads(modules, inputs, kwargs, targets)
    _raise_first(outcomes, targets)
    return [outcome.value for outcome in outcomes]


def _check_lengths(count: int, **given: Sequence[Any] | None) -> None:
    for name, sequence in given.items():
        if sequence is not None and len(sequence) != count:
            raise ReplicaCountError(
                f"The number of modules {count} is not equal to the number of {name} "
                f"{len(sequence)}. Give parallel_apply one entry of {name} for each module."
            )


def _choose_device(device: DeviceLike | None, arguments: Any) -> torch.device:
    if device is not None:
        return parse_device(device)
    tensor = first_tensor(arguments)
    if tensor is not None:
        return tensor.device
    kind = accelerator_type()
    return CPU if kind is None else parse_device(kind)


def _call(
    module: Callable[..., Any], arguments: Any, kwargs: dict[str, Any], device: torch.device
) -> Job:
    scope = DeviceScope(device)
    # A tensor alone is one argument, not a row of them.
    args = arguments if isinstance(arguments, (list, tuple)) else (arguments,)

    def call() -> Any:
        with scope.entered():
            return module(*args, **kwargs)

    return call


def _run_here(job: Job) -> ReplicaOutcome:
    try:
        return ReplicaOutcome(job())
    except Exception as error:
        return ReplicaOutcome(error=error)


def _run_on_threads(
    modules: Sequence[Callable[..., Any]],
    inputs: Sequence[Any],
    kwargs: Sequence[dict[str, Any]],
    devices: Sequence[torch.device],
) -> list[ReplicaOutcome]:
    state = ThreadState.capture()
    calls = map(_call, modules, inputs, kwargs, devices)
    jobs = [in_callers_context(_under(state, call)) for call in calls]
    with POOL.lend(len(jobs)) as threads:
        divide_intraop_threads(threads, devices)
        return threads.run(jobs)


def _under(state: ThreadState, call: Job) -> Job:
    def job() -> Any:
        with state.entered():
            return call()

    return job


def _raise_first(outcomes: Sequence[ReplicaOutcome], devices: Sequence[torch.device]) -> None:
    failed = [i for i, outcome in enumerate(outcomes) if outcome.error is not None]
    if not failed:
        return
    first = failed[0]
    error = outcomes[first].error
    assert error is not None
    where = f"Caught {type(error).__name__} in replica {first} on device {devices[first]}."
    put_first(error, where)
    text = f"{where} Raised by replica {first} of {len(outcomes)}, on {devices[first]}."
    for other in failed[1:]:
        text += f" Replica {other} failed too: {type(outcomes[other].error).__name__}."
    tell_where(error, text)
    for outcome in outcomes:
        outcome.error = None
    try:
        raise error
    finally:
        del error  # else this frame and the exception would hold each other


class _Text(str):
    """A text that a KeyError, which shows the repr of its key, shows as it is."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def put_first(error: BaseException, text: str) -> None:
    """Put torch's phrase in front of the text of an exception that has nothing but a text.

    And of a KeyError, whose key is its text.
    """
    if not error.args:
        error.args = (text,)
    elif len(error.args) == 1 and isinstance(error.args[0], str):
        error.args = (_Text(f"{text}\n{error.args[0]}"),)
    elif type(error) is KeyError and len(error.args) == 1:
        error.args = (_Text(f"{text}\n{error.args[0]!r}"),)


def tell_where(error: BaseException, text: str) -> None:
    """Add a line to what an exception shows, without touching its type, arguments or traceback."""
    if sys.version_info >= (3, 11):
        error.add_note(text)
    elif error.__cause__ is None:  # before notes existed, a cause is what is always shown
        error.__cause__ = PacelineError(text)
