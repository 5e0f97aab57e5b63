"""What to say when a backward has left parameters without a gradient.

Two texts. Ours is for the backward in which it happened. With ``missing_gradients="wait"`` the
error comes at the next forward, as torch's does; its text then has the phrases that torch's own
tests, and the log searches of many teams, look for.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.config import ReducePolicy
from paceline.ddp.agree.reports import FailureReport

_OUTPUTS = (
    "make sure that all `forward` function outputs participate in calculating loss; outputs in "
    "objects of your own classes cannot be found, so return tensors in lists, tuples, dicts or "
    "dataclasses."
)


def our_text(reports: Sequence[FailureReport], policy: ReducePolicy) -> str:
    """Say what is missing in this backward."""
    told = "\n".join(f"  rank {r.rank}: {', '.join(r.parameters)}{_detail(r)}" for r in reports)
    if policy.static_graph:
        return (
            "Your training graph has changed in this iteration, but static_graph=True promises the "
            "same in every step: parameters that had a gradient in the first were left without "
            f"one:\n{told}\n"
            "Construct DistributedDataParallel with find_unused_parameters=True instead."
        )
    return (
        "Expected to have finished reduction in the prior iteration, that is at the end of this "
        f"backward pass, but parameters were left without a gradient:\n{told}\n"
        "If they may go unused, pass find_unused_parameters=True (or static_graph=True if the "
        f"same ones go unused in every step). If they should not, {_OUTPUTS} If several backward "
        'passes together bring all gradients, pass missing_gradients="wait".'
    )


def _detail(report: FailureReport) -> str:
    return f" ({report.detail})" if report.detail else ""


def torch_text(reports: Sequence[FailureReport], policy: ReducePolicy) -> str:
    """Say what is missing from the step before, in words that torch's users know."""
    head = "Expected to have finished reduction in the prior iteration before starting a new one. "
    if policy.static_graph:
        head += (
            "This error indicates that your training graph has changed in this iteration, e.g., "
            "one parameter is used in first iteration, but then got unused in the second "
            "iteration. this is not compatible with static_graph set to True."
        )
    elif policy.find_unused:
        head += f"Since `find_unused_parameters=True` is enabled, {_OUTPUTS}"
    else:
        head += (
            "Parameters may go unused only with the keyword; enable it by passing the keyword "
            f"argument `find_unused_parameters=True`, or {_OUTPUTS} (There is no need to set the "
            "environment variable TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL: names are "
            "always given.)"
        )
    return "\n".join([head, *(_torch_lines(report) for report in reports)])


def _torch_lines(report: FailureReport) -> str:
    indices = " ".join(str(index) for index in report.indices)
    names = ", ".join(report.parameters)
    return (
        f"Parameter indices which did not receive grad for rank {report.rank}: {indices}\n"
        f"Parameters which did not receive grad for rank {report.rank}: {names}"
    )
