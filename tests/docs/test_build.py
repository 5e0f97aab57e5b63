"""The docs build without a warning: pages are in a table of contents, links lead somewhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.report.browser import CHROMIUM, launched

ROOT = Path(__file__).parents[2]

# Pixels that have to be scrolled to, of the page or of its text as a whole.
HIDDEN = """() => {
  const parts = [document.documentElement, ...document.querySelectorAll("body, .content")];
  return Math.max(...parts.map((part) => part.scrollWidth - part.clientWidth));
}"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages; a warning fails."""
    pytest.importorskip("sphinx", reason="Sphinx is not installed: make docs installs it")
    folder = tmp_path_factory.mktemp("docs")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-d", str(folder / "d")]
    built = subprocess.run(
        [*command, str(ROOT / "docs"), str(folder / "html")], capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    return folder / "html"


def test_build_without_a_warning(html: Path) -> None:
    assert "DistributedDataParallel" in (html / "api" / "ddp.html").read_text()


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
@pytest.mark.parametrize("width", [390, 1440])
def test_no_page_is_wider_than_the_window(html: Path, width: int) -> None:
    """On a phone and on a desktop. Wide tables and code have a scroll bar of their own."""
    pytest.importorskip("playwright")
    paths = sorted(path for path in html.rglob("*.html") if "_static" not in path.parts)
    assert len(paths) > 40
    too_wide = {}
    with launched() as browser:
        page = browser.new_page(viewport={"width": width, "height": 900})
        page.route("http*://**", lambda route: route.abort())
        for path in paths:
            page.goto(path.as_uri(), wait_until="load")
            if more := page.evaluate(HIDDEN):
                too_wide[str(path.relative_to(html))] = more
    assert not too_wide
