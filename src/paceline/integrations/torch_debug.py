"""A page of ``torch.distributed.debug``'s server: what ``paceline doctor`` says of the job.

Used by scripts that start torch's server::

    from torch.distributed.debug import start_debug_server
    from torch.distributed.debug._debug_handlers import default_handlers
    from paceline.integrations.torch_debug import DoctorHandler

    start_debug_server(handlers=[*default_handlers(), DoctorHandler()])

It runs in the server's own process, beside rank 0, and reads the run folder only: it answers even
if every rank hangs. torch's server listens on all interfaces and asks nobody who they are; that
is torch's choice, and so is starting it.
"""

from __future__ import annotations

import os

from paceline.errors import ConfigurationError
from paceline.observe.run_folder import RUN_DIR, RunFolder
from paceline.observe.stall.report import describe_run
from paceline.observe.stall.views import look_at_ranks
from paceline.torch_private.debug import DebugHandler, HTTPRequestHandler, NavLink, Route

_PATH = "/paceline"
_TEMPLATE = """
{% extends "base.html" %}
{% block header %}<h1>{% block title %}Paceline{% endblock %}</h1>{% endblock %}
{% block content %}<pre>{{ text | e }}</pre>{% endblock %}
"""
_ANSWER_S = 2.5


class DoctorHandler(DebugHandler):
    """Who is late, where, and since when.

    Args:
        run_dir: The run folder; None takes the one that ``paceline run`` records into.

    Raises:
        ConfigurationError: There is none.
    """

    def __init__(self, run_dir: str | os.PathLike[str] | None = None) -> None:
        found = run_dir or os.environ.get(RUN_DIR)
        if not found:
            raise ConfigurationError(
                "there is no run folder to show: start the job with `paceline run`, or set "
                f"{RUN_DIR}"
            )
        self._folder = RunFolder(found)

    def routes(self) -> list[Route]:
        """The page's address."""
        return [Route(_PATH, self._show)]

    def nav_links(self) -> list[NavLink]:
        """The link in the server's menu."""
        return [NavLink(_PATH, "Paceline")]

    def templates(self) -> dict[str, str]:
        """The page, in the server's frame."""
        return {"paceline.html": _TEMPLATE}

    def dump(self) -> str:
        """The same as text, for the server's periodic dumps."""
        return describe_run(self._folder, look_at_ranks(self._folder, _ANSWER_S))

    def dump_filename(self) -> str:
        """Of those dumps."""
        return "paceline"

    def _show(self, request: HTTPRequestHandler) -> bytes:
        page: bytes = request.frontend.render_template("paceline.html", text=self.dump())
        return page
