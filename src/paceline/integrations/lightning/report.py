"""A run's report, carried by Lightning's Trainer without a line in the script.

Lightning asks the entry points ``lightning.pytorch.callbacks_factory`` (or
``pytorch_lightning.callbacks_factory``) for callbacks. Where steps are recorded
(``PACELINE_RUN_DIR``), ours gives each step its loss, and writes ``report.html`` into the run
folder at the end of ``fit``. Else there is no callback. What the page says is
:mod:`paceline.report`'s business.
"""

from __future__ import annotations

import importlib
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import PacelineError
from paceline.observe.logged import log
from paceline.observe.recording import active_recorder
from paceline.observe.run_folder import RUN_DIR

if TYPE_CHECKING:
    Base: Any = object
else:
    Base = object

logger = logging.getLogger("paceline")
_PACKAGE = "paceline.integrations.lightning"


class ReportMixin(Base):
    """For ``lightning.pytorch.Callback``."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *rest: Any) -> None:
        """Give the step its loss."""
        super().on_train_batch_end(trainer, module, outputs, *rest)
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if loss is not None and active_recorder() is not None:
            log(loss=loss)

    def on_fit_end(self, trainer: Any, module: Any) -> None:
        """Write the page, on the first rank."""
        super().on_fit_end(trainer, module)
        if trainer.is_global_zero and active_recorder() is not None:
            _write_page(Path(os.environ[RUN_DIR]))


def _write_page(folder: Path) -> None:
    """Write the report of a run; training has ended well even if that fails."""
    from paceline.report.analysis import analyse
    from paceline.report.files import report_file
    from paceline.report.page import render_report
    from paceline.report.run import read_run

    path = folder / "report.html"
    try:
        page = render_report(analyse(read_run(folder)))
        with report_file(path) as file:
            file.write(page)
    except PacelineError as error:
        logger.warning("there is no report of this run: %s", error)
    else:
        logger.info("report: %s", path)


def callbacks() -> list[Any]:
    """Return the callbacks of every Trainer of ``lightning``."""
    return _make("trainer")


def standalone_callbacks() -> list[Any]:
    """Return those of ``pytorch_lightning``."""
    return _make("standalone_trainer")


def _make(module: str) -> list[Any]:
    if not os.environ.get(RUN_DIR):
        return []
    return [importlib.import_module(f"{_PACKAGE}.{module}").ReportCallback()]
