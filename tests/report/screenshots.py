"""Make the pictures of the report's page in docs/: ``make screenshots``.

Of a simulated job whose truth is known (histories.py), so that they do not change from day to day.
Look at them before you commit them.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from paceline.report.analysis import analyse
from paceline.report.page import render_report
from paceline.report.phases import Phase
from tests.report.browser import launched
from tests.report.histories import Delay, Job, make_run

DOCS = Path(__file__).parents[2] / "docs"
JOB = Job(
    steps=1200,
    jitter=0.05,
    delays=(
        Delay(2, Phase.BACKWARD, 18.0, run_delay=0.8),
        Delay(1, Phase.INPUT, 900.0, steps=lambda step: step % 170 == 50),
    ),
)
# Width of the window and its colours; what is shown of it: from where on, width and height.
SHOTS = {
    "report-1600.png": (1600, "light", 160, 1280, 2420),
    "report-400.png": (400, "dark", 0, 400, 1760),
}


def main() -> None:
    """Write all pictures."""
    with tempfile.TemporaryDirectory() as folder, launched() as browser:
        page_file = Path(folder, "report.html")
        page_file.write_text(render_report(analyse(make_run(JOB, name="my-run"))))
        for name, (window, scheme, x, width, height) in SHOTS.items():
            context = browser.new_context(
                viewport={"width": window, "height": 900}, color_scheme=scheme
            )
            page = context.new_page()
            page.goto(page_file.as_uri())
            page.wait_for_selector("html[data-ready]", state="attached", timeout=60_000)
            clip = {"x": x, "y": 0, "width": width, "height": height}
            page.screenshot(path=DOCS / name, full_page=True, clip=clip)
            context.close()
            print(DOCS / name)


if __name__ == "__main__":
    main()
