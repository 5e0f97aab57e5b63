"""What went wrong in a step, told to every rank.

A rank that fails does not raise at once: its peers would wait for it. It keeps a report, finishes
the step's reductions with zeros, and raises the flag FAILED in the control block. Every rank sees
the flag in the same step; all of them then exchange their reports and raise the same error.
Healthy steps pay nothing for this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline import errors
from paceline.config import MissingGradients, ReducePolicy
from paceline.ddp.agree import missing
from paceline.ddp.agree.reports import FailureKind, FailureReport


def build_error(reports: Sequence[FailureReport], policy: ReducePolicy) -> errors.StepError:
    """Turn the reports of all ranks into the error that every rank raises."""
    order = list(FailureKind)
    kind = min((report.kind for report in reports), key=order.index)
    concerned = [report for report in reports if report.kind is kind]
    if kind is FailureKind.MISSING:
        return _missing_error(concerned, policy)
    text = _TEXTS[kind]
    told = "\n".join(f"  rank {report.rank}: {_account(report)}" for report in concerned)
    first = concerned[0]
    return text.error(
        f"{text.head}\n{told}\n{text.remedy} No rank has applied this step's gradients.",
        rank=first.rank,
        parameters=first.parameters,
    )


def _missing_error(reports: Sequence[FailureReport], policy: ReducePolicy) -> errors.StepError:
    if policy.missing is MissingGradients.WAIT:
        text = missing.torch_text(reports, policy)
    else:
        text = missing.our_text(reports, policy)
    make = errors.GraphChangedError if policy.static_graph else errors.UnusedParametersError
    first = reports[0]
    return make(text, rank=first.rank, parameters=first.parameters)


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
    FailureKind.JOIN: _Text(
        errors.DesynchronizedError,
        head="Inside of join(), ranks that have run out of inputs mirror one forward and one "
        "backward pass of each wrapper in turn. They cannot mirror this.",
        remedy="Run the backward pass of a wrapper before the forward of the next, or wrap the "
        "whole model once.",
    ),
    FailureKind.SHARED: _Text(
        errors.SharedParametersError,
        head="Two wrappers share parameters and ran in one backward pass, but they treat a "
        "gradient differently, and its parts cannot be told apart any more.",
        remedy="Give both wrappers the same settings (and both the same weighted(n)), or run one "
        "backward pass for each.",
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
        head="Expected to mark a variable ready only once: a gradient arrived a second time in one "
        "backward pass, after it had been handed to the reduction.",
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


def autograd_grad_error(rank: int) -> errors.AutogradGradError:
    """Return the error for gradients that were taken away before they could be reduced."""
    return errors.AutogradGradError(
        f"Rank {rank}: torch.autograd.grad was asked for gradients of parameters that "
        "DistributedDataParallel reduces. It hands them out before they can be reduced, so every "
        "rank would get its own. Call loss.backward() and read parameter.grad; or run the forward "
        "under `with ddp.no_sync():`, or through ddp.module, if local gradients are what you want.",
        rank=rank,
    )
