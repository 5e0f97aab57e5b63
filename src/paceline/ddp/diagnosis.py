"""What went wrong in a step, told to every rank.

A rank that fails does not raise at once: its peers would wait for it. It keeps a report, finishes
the step's reductions with zeros, and raises the flag FAILED in the control block. Every rank sees
the flag in the same step; all of them then exchange their reports and raise the same error.
Healthy steps pay nothing for this.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline import errors


class FailureKind(enum.Enum):
    """Why a step failed on a rank; the first of all ranks' kinds in this order is the error."""

    BACKWARD_RAISED = "backward raised"
    HOOK = "communication hook"
    GRAPH_CHANGED = "graph changed"
    READY_TWICE = "ready twice"
    GRADIENT_MISMATCH = "gradient mismatch"
    MISSING = "missing gradients"
    NONFINITE = "non-finite gradient"


@dataclass(frozen=True)
class FailureReport:
    """One rank's account of its failure.

    ``indices`` are the parameters' indices (as torch's messages give them), ``detail`` is a
    sentence that only that rank can say.
    """

    kind: FailureKind
    rank: int
    parameters: tuple[str, ...] = ()
    indices: tuple[int, ...] = ()
    detail: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return what goes over the wire."""
        return {
            "kind": self.kind.value,
            "rank": self.rank,
            "parameters": list(self.parameters),
            "indices": list(self.indices),
            "detail": self.detail,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> FailureReport:
        """Rebuild a report from :meth:`to_json`."""
        return cls(
            FailureKind(data["kind"]),
            int(data["rank"]),
            tuple(str(name) for name in data["parameters"]),
            tuple(int(index) for index in data["indices"]),
            str(data["detail"]),
        )


def build_error(
    reports: Sequence[FailureReport], *, my_rank: int, tracks_unused: bool, static_graph: bool
) -> errors.StepError:
    """Turn the reports of all ranks into the error that every rank raises."""
    order = list(FailureKind)
    kind = min((report.kind for report in reports), key=order.index)
    concerned = [report for report in reports if report.kind is kind]
    if kind is FailureKind.MISSING:
        return missing_error(concerned, my_rank, tracks_unused, static_graph)
    text = _TEXTS[kind]
    told = "\n".join(f"  rank {report.rank}: {_account(report)}" for report in concerned)
    first = concerned[0]
    return text.error(
        f"{text.head}\n{told}\n{text.remedy} No rank has applied this step's gradients.",
        rank=first.rank,
        parameters=first.parameters,
    )


def _account(report: FailureReport) -> str:
    names = ", ".join(report.parameters)
    return ": ".join(part for part in (names, report.detail) if part)


@dataclass(frozen=True)
class _Text:
    """How a kind of failure is told: what is wrong, and what to do."""

    error: type[errors.StepError]
    head: str
    remedy: str


_TEXTS = {
    FailureKind.BACKWARD_RAISED: _Text(
        errors.PeerFailedError,
        head="The backward pass raised an exception on some ranks before all gradients were there, "
        "so this step has no complete gradient on any rank.",
        remedy="Look at the exception on the ranks named above, then run the step again on every "
        "rank.",
    ),
    FailureKind.HOOK: _Text(
        errors.HookResultError,
        head="The communication hook failed.",
        remedy="A hook takes (state, bucket) and returns a torch.futures.Future that holds one "
        "tensor with as many elements as bucket.buffer().",
    ),
    FailureKind.GRAPH_CHANGED: _Text(
        errors.GraphChangedError,
        head="Your training graph has changed in this iteration, but static_graph=True promises "
        "that it never does.",
        remedy="Construct DistributedDataParallel without static_graph, and with "
        "find_unused_parameters=True if parameters come and go.",
    ),
    FailureKind.READY_TWICE: _Text(
        errors.ReadyTwiceError,
        head="A gradient arrived a second time in one backward pass, after it had been handed to "
        "the reduction.",
        remedy="This happens when a layer is run several times under reentrant activation "
        "checkpointing, or find_unused_parameters=True meets reentrant checkpointing. Pass "
        "static_graph=True, or use_reentrant=False to torch.utils.checkpoint.checkpoint.",
    ),
    FailureKind.GRADIENT_MISMATCH: _Text(
        errors.GradientMismatchError,
        head="A gradient does not have the dtype or the layout that its bucket was planned for.",
        remedy="Convert the module (for example .half()) before it is wrapped, on every rank "
        "alike. For sparse gradients use nn.Embedding(sparse=True) or "
        "nn.EmbeddingBag(sparse=True), which the wrapper recognises.",
    ),
    FailureKind.NONFINITE: _Text(
        errors.NonFiniteGradientError,
        head='A gradient is not finite, and nonfinite="raise" was asked for.',
        remedy='Look at the loss and the input of that rank; nonfinite="skip" leaves such steps '
        "out.",
    ),
}


def missing_error(
    reports: Sequence[FailureReport], my_rank: int, tracks_unused: bool, static_graph: bool
) -> errors.StepError:
    """Say which parameters received no gradient, on which ranks, and what to do.

    The phrases in the head and in the lines per rank are the ones that torch's own tests, and the
    log searches of many teams, look for.
    """
    lines = []
    for report in sorted(reports, key=lambda r: (r.rank != my_rank, r.rank)):
        indices = " ".join(str(index) for index in report.indices)
        lines.append(
            f"Parameter indices which did not receive grad for rank {report.rank}: {indices}\n"
            f"Parameters which did not receive grad for rank {report.rank}: "
            + ", ".join(report.parameters)
        )
    head = "Expected to have finished reduction in the prior iteration before starting a new one. "
    if static_graph:
        head += (
            "This error indicates that your training graph has changed in this iteration, e.g., "
            "one parameter is used in first iteration, but then got unused in the second "
            "iteration. this is not compatible with static_graph set to True.\n"
        )
        remedy = "Construct DistributedDataParallel without static_graph."
        make: type[errors.StepError] = errors.GraphChangedError
    else:
        make = errors.UnusedParametersError
        head += "The backward pass ended and these parameters had no gradient.\n"
        remedy = _unused_remedy(tracks_unused)
    first = reports[0]
    return make(
        head + "\n".join(lines) + "\n" + remedy, rank=first.rank, parameters=first.parameters
    )


def _unused_remedy(tracks_unused: bool) -> str:
    outputs = (
        "make sure that all `forward` function outputs participate in calculating loss; outputs in "
        "objects of your own classes cannot be found, so return tensors in lists, tuples, dicts or "
        "dataclasses."
    )
    if tracks_unused:
        return f"Since `find_unused_parameters=True` is enabled, {outputs}"
    return (
        "Either tell the wrapper that parameters may go unused, by passing the keyword argument "
        "`find_unused_parameters=True` (or `static_graph=True` if the same ones go unused in every "
        f"step), or {outputs} If several backward passes together bring all gradients, pass "
        '`missing_gradients="wait"`. (There is no need to set the environment variable '
        "TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL: names are always given.)"
    )
