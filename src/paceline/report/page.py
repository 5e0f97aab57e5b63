"""One self-contained HTML page: the analysis in words and drawings, the records for its timeline.

Called by ``cli/report.py``. Everything that comes from records is escaped by the template engine;
the page's policy (CSP) allows its own script and style sheet, by their hashes, and nothing else: no
request, no script that somebody smuggled into a parameter's name.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import re
import time
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup

from paceline.printable import size_text
from paceline.report import figures, wording
from paceline.report.analysis import Analysis, Measured, Suspect
from paceline.report.compare import Change, RunComparison
from paceline.report.compare import headline as compare_headline
from paceline.report.embed import embed, to_script_json
from paceline.report.stragglers import Pattern

REPORT_SCRIPTS = ("uPlot.min.js", "theme.js", "data.js", "timeline.js", "chart.js", "page.js")
NOTHING = "\N{EN DASH}"
REPORT_STYLES = ("uPlot.min.css", "page.css")


def render_report(measured: Measured) -> str:
    """Return the page of one run."""
    a = measured.analysis
    backward_ends, bucket_bars = figures.bucket_bars(a)
    longest = max((figures.total_ms(rank) for rank in a.ranks), default=0.0)
    members, events = wording.quiet_events(a)
    return render(
        "report.html.j2",
        REPORT_SCRIPTS,
        REPORT_STYLES,
        a=a,
        headline=emphasise(wording.headline(a)),
        culprit=a.culprit,
        warnings=wording.warnings(a, is_failure_told=bool(a.failure)),
        bars=_bars(a, longest),
        heat=figures.heat_rows(measured.steps, [rank.rank for rank in a.ranks]),
        backward_ends=backward_ends,
        bucket_bars=bucket_bars,
        many_wrappers=len({bucket.wrapper for bucket in a.buckets}) > 1,
        members=members,
        events=events,
        membership_summary=wording.membership_summary(a),
        spans=figures.membership_spans(a),
        clocks=[clock for clock in a.clocks if clock.windows],
        phase_words=wording.PHASE_WORDS,
        began=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(a.began_s)) if a.began_s else "",
        data=Markup(to_script_json(embed(measured.steps))),
    )


def render_comparison(comparison: RunComparison) -> str:
    """Return the page that compares two runs."""
    edges = [max(abs(each.low_ms), abs(each.high_ms)) for each in comparison.changes]
    widest = max([*edges, 0.001])
    rows = [(each, _interval(each, widest)) for each in comparison.changes]
    return render(
        "compare.html.j2",
        ("theme.js", "compare.js"),
        ("page.css",),
        c=comparison,
        rows=rows,
        headline=emphasise(compare_headline(comparison)),
    )


def _interval(change: Change, widest_ms: float) -> tuple[float, float]:
    """Where a difference lies in a drawing 160 wide, with zero in its middle."""
    low, high = (80 + 76 * each / widest_ms for each in (change.low_ms, change.high_ms))
    return round(low, 2), round(max(2.0, high - low), 2)


def _bars(a: Analysis, longest_ms: float) -> list[dict[str, Any]]:
    return [
        {
            "rank": rank,
            "total": figures.total_ms(rank),
            "pieces": figures.rank_bar(rank, longest_ms),
        }
        for rank in a.ranks
    ]


def render(template: str, scripts: tuple[str, ...], styles: tuple[str, ...], **values: Any) -> str:
    """Fill a template, with its scripts and style sheets inside."""
    script = "\n".join(asset(name) for name in scripts)
    style = "\n".join(asset(name) for name in styles)
    return (
        environment()
        .get_template(template)
        .render(csp=_policy(script, style), script=Markup(script), style=Markup(style), **values)
    )


def asset(name: str) -> str:
    """Return the text of a file beside this one."""
    return (
        resources.files("paceline.report")
        .joinpath("assets")
        .joinpath(name)
        .read_text(encoding="utf-8")
    )


def _policy(script: str, style: str) -> str:
    def allowed(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    return (
        f"default-src 'none'; script-src {allowed(script)}; style-src {allowed(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


@functools.cache
def environment() -> jinja2.Environment:
    """Return the template engine: everything is escaped, and what is not defined is an error."""
    found = jinja2.Environment(
        loader=jinja2.FunctionLoader(asset),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {
        "ms": wording.duration,
        "percent": wording.percent,
        "bytes": size_text,
        "short": short,
        "sentence": sentence,
        "how_often": how_often,
        "signed_ms": signed_duration,
    }
    return found


def emphasise(text: str) -> Markup:
    """Mark ranks and shares in a headline."""
    return Markup(re.sub(r"(Rank \d+|\d+(?:\.\d+)? %)", r"<em>\1</em>", html.escape(text)))


def short(value: float) -> str:
    """A number with 3 digits, without an exponent where people would not write one."""
    if value != value:
        return NOTHING
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def signed_duration(ms: float) -> str:
    """A difference, with its sign."""
    sign = "\N{MINUS SIGN}" if ms < 0 else "+"
    return sign + wording.duration(abs(ms))


def sentence(text: str) -> str:
    """A clause, as a sentence."""
    return f"{text[0].upper()}{text[1:]}." if text else ""


def how_often(suspect: Suspect) -> str:
    """How regularly a rank makes the others wait, in words."""
    straggler = suspect.straggler
    if straggler.pattern is Pattern.NEVER:
        return NOTHING
    if straggler.pattern is Pattern.PERIODIC:
        return f"every {straggler.period_steps} steps"
    if straggler.pattern is Pattern.ONE_OFF:
        return f"one-off, step {straggler.worst_step}"
    last = f"last in {wording.percent(straggler.last_share)} of steps"
    return f"{straggler.pattern.value}, {last}" if straggler.is_significant else last
