"""Transformers: ``from paceline.integrations.transformers import Trainer``.

The Trainer makes an Accelerate ``Accelerator`` and leaves the wrapping to it: ours takes its place.
The process group is made earlier, by ``TrainingArguments``; whoever wants the backend ``paceline``
for it takes ours.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import transformers
import transformers.trainer

from paceline.integrations.accelerate import Accelerator, backend_allowed

__all__ = ["Seq2SeqTrainer", "Trainer", "TrainerMixin", "TrainingArguments"]


class TrainerMixin:
    """Makes a Trainer of any kind train in our wrapper: ``class Mine(TrainerMixin, SFTTrainer)``.

    Attributes:
        wrapper_options: Arguments for the wrapper that ``TrainingArguments`` does not have. Set it
            in a class of your own: ``wrapper_options = {"nonfinite": "raise"}``.
    """

    wrapper_options: dict[str, Any] = {}  # noqa: RUF012 (replaced, never changed)

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator, of our class."""
        with _accelerator_is(partial(Accelerator, wrapper_options=self.wrapper_options)):
            super().create_accelerator_and_postprocess()  # type: ignore[misc]


class Trainer(TrainerMixin, transformers.Trainer):
    """Transformers' Trainer with Paceline's wrapper."""


class Seq2SeqTrainer(TrainerMixin, transformers.Seq2SeqTrainer):
    """Transformers' Seq2SeqTrainer with Paceline's wrapper."""


class TrainingArguments(transformers.TrainingArguments):
    """Transformers' arguments; on CPUs the process group is the backend ``paceline``.

    ``ddp_backend="gloo"`` asks for gloo. Transformers' own class refuses ``"paceline"``.
    """

    @property
    def _setup_devices(self) -> Any:
        with backend_allowed():
            return super()._setup_devices


@contextlib.contextmanager
def _accelerator_is(make: Any) -> Iterator[None]:
    before = transformers.trainer.Accelerator
    transformers.trainer.Accelerator = make
    try:
        yield
    finally:
        transformers.trainer.Accelerator = before
