"""Sentences: the headline of a report and its warnings. Pure functions of an analysis."""

from __future__ import annotations

from paceline.report.analysis import Analysis, Event, RankTimes, Suspect
from paceline.report.causes import Cause
from paceline.report.phases import Phase
from paceline.report.run import RunState
from paceline.report.stragglers import Pattern

SHORT_CAUSES = {
    Cause.NO_CORE: "its threads wait for a core",
    Cause.THROTTLED: "its cgroup is out of CPU quota",
    Cause.STOLEN: "the hypervisor takes its cores away",
    Cause.TOO_MANY_THREADS: "there are more threads than cores",
    Cause.PAGING: "pages come from disk",
    Cause.DATA_LOADER: "it waits for its data loader",
    Cause.BETWEEN_STEPS: "a checkpoint, an evaluation or logging, perhaps",
    Cause.MORE_WORK: "it computes more than the others",
    Cause.BLOCKED: "it sleeps, or waits for something outside",
}
PHASE_WORDS = {
    Phase.REDUCTION: "after the reduction",
    Phase.OPTIMIZER: "in the optimizer",
    Phase.INPUT: "in its input",
    Phase.FORWARD: "in forward",
    Phase.LOSS: "in its loss",
    Phase.BACKWARD: "in backward",
}
# Shares of the time from which on something is worth a headline or a warning.
MUCH = 0.1
# Kinds of notes that are warnings.
LOUD = ("warning", "error", "thread", "stall")
MEMBERSHIP = ("group", "member", "join", "leave", "left", "epoch", "recover", "lost")


def headline(analysis: Analysis) -> str:
    """Say in one sentence what matters most."""
    if not analysis.steps:
        return "Too few steps were recorded to compare ranks."
    culprit = analysis.culprit
    if culprit is not None:
        return _culprit(culprit)
    if analysis.lost_share >= MUCH:
        return (
            f"Ranks wait for each other {percent(analysis.lost_share)} of their time, "
            "for no rank in particular."
        )
    exposed = analysis.overlap.exposed_ms / analysis.times.mean if analysis.times.mean else 0.0
    if exposed >= MUCH:
        return f"{percent(exposed)} of each step is communication that backward does not hide."
    usual = duration(analysis.times.p50)
    if len(analysis.ranks) == 1:
        return f"One rank, which waits for nobody: {usual} a step."
    return f"Nobody holds the others up: {usual} a step, and all ranks keep pace."


def _culprit(suspect: Suspect) -> str:
    straggler = suspect.straggler
    text = (
        f"Rank {straggler.rank} costs the others {percent(straggler.share)} of their time, "
        f"{PHASE_WORDS[straggler.phase]}"
    )
    if straggler.pattern is Pattern.PERIODIC:
        text += f", every {straggler.period_steps} steps"
    elif straggler.pattern is Pattern.ONE_OFF:
        text += f", at step {straggler.worst_step}"
    cause = SHORT_CAUSES.get(suspect.diagnosis.cause)
    return f"{text}; {cause}." if cause else f"{text}."


def warnings(analysis: Analysis, *, is_failure_told: bool = False) -> list[str]:
    """Return what a reader must know, the most important first."""
    found = list(analysis.problems)
    if not is_failure_told:
        found += _of_state(analysis)
    if analysis.first_step > 2:
        found.append(
            f"Records keep the newest steps only: this is about steps {analysis.first_step} to "
            f"{analysis.last_step}."
        )
    found += _of_clocks(analysis)
    found += _of_machines(analysis)
    if analysis.skipped_steps:
        found.append(f"{analysis.skipped_steps} steps were skipped because of NaN or infinity.")
    if analysis.steps and not any(rank.own[Phase.OPTIMIZER] for rank in analysis.ranks):
        found.append(
            "No optimizer was seen, so its time counts as input: Paceline sees subclasses of "
            "torch.optim.Optimizer."
        )
    return found + _of_events([event for event in analysis.events if _is_loud(event, analysis)])


def _of_events(events: list[Event]) -> list[str]:
    """What several ranks say alike, such as who stalls, is told once."""
    by_text: dict[str, list[Event]] = {}
    for event in events:
        by_text.setdefault(event.text.lower(), []).append(event)
    told = []
    for same in by_text.values():
        ranks = sorted({event.rank for event in same})
        who = f"Rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        told.append(f"{who}: {same[0].text}")
    return told


def _of_state(analysis: Analysis) -> list[str]:
    if analysis.state is RunState.RUNNING:
        return ["The run is still going: this is what it has recorded so far."]
    if analysis.state is RunState.STOPPED:
        return ["A rank is gone and did not say why: it was killed, or its host went down."]
    if analysis.state is RunState.FAILED:
        first, *_ = analysis.failure.splitlines() or [""]
        return [
            f"The run failed: {first.removeprefix('paceline run: ')}"
            if first
            else "The run failed."
        ]
    return []


def _of_clocks(analysis: Analysis) -> list[str]:
    found = []
    for clock in analysis.clocks:
        error_ms, bound_ms = clock.uncertainty_ns / 1e6, clock.bound_ns / 1e6
        if error_ms > 0.05 * analysis.times.p50:
            found.append(
                f"The clock of {clock.host} is known to about {duration(error_ms)} (certainly to "
                f"{duration(bound_ms)}): differences between hosts below that mean nothing."
            )
    return found


def _of_machines(analysis: Analysis) -> list[str]:
    found = []
    for host in analysis.hosts:
        here = _at_once([rank for rank in analysis.ranks if rank.host == host], analysis)
        cores = max((rank.cores for rank in here), default=0)
        threads = sum(rank.threads for rank in here)
        # Ranks that are pinned have cores of their own.
        shared = cores and len({(rank.cores, rank.core_list) for rank in here}) == 1
        if shared and threads > cores:
            remedy = f"set OMP_NUM_THREADS={max(1, cores // len(here))}"
            if threads <= len(here):
                remedy = "they take turns; use fewer ranks"
            found.append(
                f"{host} has {cores} cores for {len(here)} ranks with {threads} threads: {remedy}."
            )
    return found


def _at_once(ranks: list[RankTimes], analysis: Analysis) -> list[RankTimes]:
    """Of an elastic job, as many as took part at the same time."""
    most = max((change.world for change in analysis.membership), default=len(ranks))
    return sorted(ranks, key=lambda rank: -rank.steps)[:most]


def is_membership(kind: str) -> bool:
    """Say whether a note is about who takes part."""
    return any(word in kind.lower() for word in MEMBERSHIP)


def quiet_events(analysis: Analysis) -> tuple[list[Event], list[Event]]:
    """Return notes that are no warnings: about membership, and others."""
    quiet = [event for event in analysis.events if not _is_loud(event, analysis)]
    members = [event for event in quiet if is_membership(event.kind)]
    others = [event for event in quiet if event not in members]
    # An elastic job has it from its launcher, once and with the reason.
    return ([] if analysis.membership else members), others


def _is_loud(event: Event, analysis: Analysis) -> bool:
    """A step that was given up because another rank had died is no news if that is told."""
    is_consequence = event.text.startswith(("GroupAbortedError", "PeerLostError"))
    went_on = any(change.epoch and change.at_s >= event.at_s for change in analysis.membership)
    return event.kind in LOUD and not (is_consequence and (went_on or analysis.failure))


def membership_summary(analysis: Analysis) -> str:
    """Say in one sentence how often ranks came or went; '' if the job is not elastic."""
    if not analysis.membership:
        return ""
    changes = [change for change in analysis.membership if change.epoch]
    if not changes:
        return "Elastic: nobody left or joined."
    worlds = sorted({change.world for change in analysis.membership})
    ranks = f"{worlds[0]} to {worlds[-1]}" if len(worlds) > 1 else str(worlds[0])
    lost = duration(1000 * sum(change.took_s for change in changes))
    times = "once" if len(changes) == 1 else f"{len(changes)} times"
    return f"Elastic: membership changed {times}, {ranks} ranks; {lost} in all to go on."


def percent(part: float) -> str:
    """A share, for people."""
    value = 100 * part
    return f"{value:.0f} %" if value >= 9.95 or value == 0 else f"{value:.1f} %"


def duration(ms: float) -> str:
    """Milliseconds, for people: three digits and a unit."""
    if ms >= 60_000:
        return f"{int(ms // 60_000)} min {ms % 60_000 / 1000:.0f} s"
    if ms >= 1000:
        return f"{ms / 1000:.3g} s"
    if ms >= 0.9995:
        return f"{ms:.3g} ms" if ms < 999.5 else "1 s"
    return f"{ms * 1000:.0f} µs"
