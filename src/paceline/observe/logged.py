"""``paceline.log(loss=...)``: what a script says about its step.

The recorder takes it with the step's record (step_recorder.py). Must not import torch: a script
that has tensors has imported it.
"""

from __future__ import annotations

import logging
import math
import numbers as abstract
from typing import Any, NamedTuple

from paceline.errors import ArgumentTypeError, ConfigurationError
from paceline.observe.ring_codec import MAX_NAME_BYTES, MAX_NUMBERS

logger = logging.getLogger("paceline")


class LoggedValues(NamedTuple):
    """What was logged about one step. A number may still be a tensor of an accelerator."""

    loss: float = math.nan
    samples: int | None = None
    numbers: tuple[tuple[str, float], ...] = ()


_NOTHING = LoggedValues()


class Logged:
    """What was logged since it was last taken."""

    def __init__(self) -> None:
        self.is_wanted = False
        self._loss: Any = None
        self._samples: int | None = None
        self._numbers: dict[str, Any] = {}
        self._has_dropped = False

    def add(self, loss: Any, samples: int | None, numbers: dict[str, Any]) -> None:
        """Keep numbers until the step is over. The newest counts, but samples add up."""
        if loss is not None:
            self._loss = loss
        if samples is not None:
            self._samples = (self._samples or 0) + samples
        if not numbers:
            return
        self._numbers |= numbers
        if len(self._numbers) > MAX_NUMBERS:
            self._numbers = dict(list(self._numbers.items())[:MAX_NUMBERS])
            if not self._has_dropped:
                self._has_dropped = True
                logger.warning(
                    "paceline.log: more than %d different numbers in one step; the first are kept",
                    MAX_NUMBERS,
                )

    def take(self) -> LoggedValues:
        """Return what was logged, and forget it."""
        if self._loss is None and self._samples is None and not self._numbers:
            return _NOTHING
        loss = math.nan if self._loss is None else float(self._loss)
        named = self._numbers
        numbers = tuple((k, float(v)) for k, v in named.items()) if named else ()
        values = LoggedValues(loss, self._samples, numbers)
        self._loss, self._samples, self._numbers = None, None, {}
        return values


logged = Logged()


def log(*, loss: Any = None, samples: Any = None, **numbers: Any) -> None:
    """Say something about the step that runs now. Without a recorder nothing happens.

    A step ends with the next forward of the wrapper, so call it anywhere between two forwards. With
    several calls in one step the newest number counts; samples add up.

    Args:
        loss: Shown in the live table and in the report. A number, or a tensor with one element: one
            on an accelerator is read when the step is over, not now.
        samples: How many samples (or tokens) this rank had in this step. Without it, the size of
            the first dimension of the forward's first tensor is taken.
        numbers: More of them, at most 32 in a step; they are kept in the step's record and handed
            to :func:`paceline.observe.on_step`.

    Raises:
        ArgumentTypeError: Something is no number.
        ConfigurationError: More numbers, or longer names, than a record has room for.

    Example::

        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        paceline.log(loss=loss, accuracy=accuracy)
    """
    if loss is not None:
        loss = _check("loss", loss)
    if samples is not None:
        samples = _check_samples(samples)
    if numbers:
        _check_names(numbers)
        numbers = {name: _check(name, value) for name, value in numbers.items()}
    if logged.is_wanted:
        logged.add(loss, samples, numbers)


def _check(name: str, value: Any) -> Any:
    """Return a float, or a copy of a tensor that would have to be waited for."""
    if isinstance(value, float):
        return value
    is_cpu = getattr(value, "is_cpu", None)
    if is_cpu is not None:
        return _check_tensor(name, value, is_cpu=is_cpu)
    if isinstance(value, abstract.Real):
        return float(value)
    raise ArgumentTypeError(
        f"paceline.log({name}=...) takes a number or a tensor with one element, not "
        f"{type(value).__name__}"
    )


def _check_tensor(name: str, tensor: Any, *, is_cpu: bool) -> Any:
    if is_cpu:
        try:
            number = tensor.item()  # the only call of torch in most steps
        except RuntimeError:
            if tensor.numel() == 1:
                raise
        else:
            if not isinstance(number, complex):
                return float(number)
    if tensor.numel() != 1 or tensor.is_complex():
        raise ArgumentTypeError(
            f"paceline.log({name}=...) takes a number or a tensor with one element, not a tensor "
            f"of shape {tuple(tensor.shape)} and {tensor.dtype}: take its mean() or its sum()"
        )
    return tensor.detach().clone()  # the script may write to it before we read it


def _check_samples(samples: Any) -> int:
    number = float(_check("samples", samples))
    if not number >= 0 or number != int(number):
        raise ConfigurationError(f"paceline.log(samples=...) takes a count, not {samples}")
    return int(number)


def _check_names(numbers: dict[str, Any]) -> None:
    if len(numbers) > MAX_NUMBERS:
        raise ConfigurationError(
            f"paceline.log takes {MAX_NUMBERS} numbers beside loss and samples, not {len(numbers)}"
        )
    for name in numbers:
        if len(name) > MAX_NAME_BYTES // 4 and len(name.encode()) > MAX_NAME_BYTES:
            raise ConfigurationError(
                f"paceline.log takes names of {MAX_NAME_BYTES} bytes at most, not {name!r}"
            )
