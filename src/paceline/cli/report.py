"""``paceline report``: read a run folder, write one HTML page, or compare two runs.

What a report says is computed in :mod:`paceline.report`; this file has the options, the files and
the words on the terminal. It must not import torch.
"""

from __future__ import annotations

import argparse
import json
import sys
import webbrowser
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from paceline.errors import ConfigurationError
from paceline.observe.run_folder import RUNS, find_run
from paceline.report.analysis import Analysis, Measured, analyse, plain
from paceline.report.compare import RunComparison, compare
from paceline.report.compare import headline as comparison_headline
from paceline.report.files import cannot_write, report_file
from paceline.report.flight import write_dumps
from paceline.report.page import render_comparison, render_report
from paceline.report.run import Run, read_run
from paceline.report.trace import write_trace
from paceline.report.wording import duration, headline, membership_summary, percent, warnings

EXAMPLE = """\
example:
  paceline report                            the newest run below paceline-runs/
  paceline report RUN                        writes RUN/report.html
  paceline report RUN --open                 and shows it in a browser
  paceline report RUN --json numbers.json --trace trace.json
                                             all numbers; a trace for ui.perfetto.dev
  paceline report BEFORE AFTER               what became faster or slower
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``paceline report``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLE
    parser.add_argument(
        "runs",
        nargs="*",
        metavar="RUN",
        help="a run folder, its name, or 'latest'; two are compared, earlier one first",
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="where the page goes (default: RUN/report.html)"
    )
    parser.add_argument("--open", action="store_true", help="show the page in a browser")
    parser.add_argument("--json", metavar="FILE", help="all numbers of the page; - is stdout")
    parser.add_argument("--trace", metavar="FILE", help="a trace for ui.perfetto.dev")
    parser.add_argument(
        "--flight-recorder",
        metavar="FOLDER",
        help="the reductions for torch's torchfrtrace, one file for each rank",
    )


def run(args: argparse.Namespace) -> int:
    """Write what is asked for; 2 if there is nothing to report on, or nowhere to write it."""
    try:
        return _run(args)
    except ConfigurationError as error:
        print(f"paceline report: {error}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    # Whoever asks for JSON on stdout wants nothing else there.
    console = Console(stderr=args.json == "-", highlight=False, soft_wrap=True)
    folders = [_folder(each) for each in args.runs or ["latest"]]
    if len(folders) > 2:
        raise ConfigurationError(f"one run or two, not {len(folders)}")
    if len(folders) == 2:
        return _compare(args, console, folders)
    found, measured = _measure(console, folders[0])
    _print_summary(console, measured.analysis)
    _write_extras(args, found, measured)
    page = render_report(measured)
    _finish(args, console, folders[0] / "report.html", page)
    return 0


def _folder(name: str) -> Path:
    """A run by its name; else a path as it is, whose faults are told when it is read."""
    is_name = name == "latest" or (not Path(name).is_dir() and (RUNS / name).is_dir())
    return find_run(name).path if is_name else Path(name)


def _measure(console: Console, folder: Path) -> tuple[Run, Measured]:
    with console.status(f"Reading {escape(str(folder))} ..."):
        found = read_run(folder)
        return found, analyse(found)


def _compare(args: argparse.Namespace, console: Console, folders: list[Path]) -> int:
    if args.trace or args.flight_recorder:
        raise ConfigurationError("--trace and --flight-recorder are for one run, not for two")
    comparison = compare(*(_measure(console, folder)[1] for folder in folders))
    console.print(f"[bold]{escape(comparison_headline(comparison))}[/bold]")
    console.print(_table_of(comparison))
    if args.json:
        _write_json(args.json, plain(comparison))
    _finish(args, console, folders[1] / "compare.html", render_comparison(comparison))
    return 0


def _table_of(comparison: RunComparison) -> Table:
    table = Table("", comparison.before, comparison.after, "difference (95 %)", "verdict")
    for change in comparison.changes:
        interval = f"{change.low_ms:+.3g} to {change.high_ms:+.3g} ms"
        table.add_row(
            change.name,
            duration(change.before_ms),
            duration(change.after_ms),
            interval,
            change.verdict.value,
        )
    return table


def _print_summary(console: Console, analysis: Analysis) -> None:
    console.print(f"[bold]{escape(headline(analysis))}[/bold]")
    if analysis.culprit:
        diagnosis = analysis.culprit.diagnosis
        console.print(f"  {escape(diagnosis.text)} ({escape(diagnosis.evidence)})")
    console.print(
        f"  median step {duration(analysis.times.p50)}, p99 {duration(analysis.times.p99)}; "
        f"{percent(analysis.overlap.hidden_share)} of communication hidden; "
        f"steps {analysis.first_step} to {analysis.last_step}"
    )
    if text := membership_summary(analysis):
        console.print(f"  {text}")
    for text in warnings(analysis):
        console.print(f"  [yellow]warning:[/yellow] {escape(text.splitlines()[0])}")


def _write_extras(args: argparse.Namespace, found: Run, measured: Measured) -> None:
    if args.json:
        _write_json(args.json, measured.analysis.to_dict())
    if args.trace:
        with report_file(Path(args.trace)) as file:
            write_trace(file, measured.analysis, measured.steps)
    if args.flight_recorder:
        try:
            write_dumps(Path(args.flight_recorder), found.histories)
        except OSError as error:
            raise cannot_write(Path(args.flight_recorder), error) from error


def _write_json(where: str, value: object) -> None:
    text = json.dumps(value, indent=1, allow_nan=False) + "\n"
    if where == "-":
        sys.stdout.write(text)
    else:
        with report_file(Path(where)) as file:
            file.write(text)


def _finish(args: argparse.Namespace, console: Console, usual: Path, page: str) -> None:
    path = Path(args.output) if args.output else usual
    with report_file(path) as file:
        file.write(page)
    console.print(f"report: {escape(str(path))}")
    if args.open and not webbrowser.open(path.resolve().as_uri()):
        console.print("no browser was found; open the file yourself")
