"""Steps as OpenMetrics text on a port, for Prometheus and its like. Off unless asked for.

``PACELINE_METRICS_PORT=9400`` starts one in every rank (recording.py), on that port plus the local
rank; or make one and give it to ``on_step``. It listens on the loopback interface unless another
address is given: metrics say what a job does, to whoever asks.

One thread serves one request after the other, and none for longer than a few seconds. Steps come in
from the thread that trains. They meet at one lock, which is held for as long as it takes to copy a
few numbers.
"""

from __future__ import annotations

import contextlib
import io
import math
import socket
import threading
import time
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from paceline.forks import tell_children
from paceline.observe.metrics.values import phase_seconds
from paceline.observe.records import StepRecord

LOOPBACK = "127.0.0.1"
CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_REQUEST_TIMEOUT_S = 5.0
_POLL_S = 0.5
_CLOSE_S = 3.0

_COUNTERS = {
    "paceline_steps": "Steps that were reduced.",
    "paceline_skipped_steps": "Steps left out because of gradients that are not finite.",
    "paceline_samples": "Samples of this rank.",
    "paceline_step_seconds": "Seconds of steps.",
    "paceline_phase_seconds": "Seconds of steps, by phase.",
    "paceline_cpu_seconds": "CPU seconds of this process.",
    "paceline_major_faults": "Pages that came from disk.",
}
_GAUGES = {
    "paceline_loss": "The newest loss that the script has logged.",
    "paceline_logged": "The newest of each other number that the script has logged.",
}


class _Totals:
    """Sums and newest values, by name and labels."""

    def __init__(self) -> None:
        self._values: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))

    def add(self, record: StepRecord) -> None:
        where = f'wrapper="{record.wrapper}"'
        counted = {
            "paceline_steps": 1.0,
            "paceline_skipped_steps": float(record.is_skipped),
            "paceline_samples": float(record.samples),
            "paceline_step_seconds": max(0, record.duration_ns) / 1e9,
            "paceline_cpu_seconds": record.cpu_ns / 1e9,
            "paceline_major_faults": float(record.major_faults),
        }
        for name, value in counted.items():
            self._values[name][where] += value
        for phase, seconds in phase_seconds(record).items():
            self._values["paceline_phase_seconds"][f'{where},phase="{phase}"'] += seconds
        if not math.isnan(record.loss):
            self._values["paceline_loss"][where] = record.loss
        for name, value in record.numbers:
            self._values["paceline_logged"][f'{where},name="{_escape(name)}"'] = value

    def text(self, labels: str) -> str:
        lines = []
        for kind, suffix, names in (("counter", "_total", _COUNTERS), ("gauge", "", _GAUGES)):
            for name, words in names.items():
                lines += [f"# TYPE {name} {kind}", f"# HELP {name} {words}"]
                lines += [
                    f"{name}{suffix}{{{labels}{where}}} {_number(value)}"
                    for where, value in self._values.get(name, {}).items()
                ]
        return "\n".join([*lines, "# EOF", ""])


class OpenMetrics:
    """Serves this process's steps as text under ``http://host:port/metrics``.

    Args:
        port: 0: the kernel chooses; :attr:`port` says which.
        host: Where to listen.
        rank: Which rank this is; a label of every number.

    Raises:
        OSError: The port is taken, or not allowed.
    """

    def __init__(self, port: int = 0, host: str = LOOPBACK, rank: int | None = None) -> None:
        self._lock = threading.Lock()
        self._totals = _Totals()
        self._labels = "" if rank is None else f'rank="{rank}",'
        server = _Server((host, port), _make_handler(self))
        self._server: _Server | None = server
        self.port = int(server.server_address[1])
        self._thread = threading.Thread(target=server.serve, name="paceline metrics", daemon=True)
        self._thread.start()
        tell_children(self)

    def __call__(self, record: StepRecord) -> None:
        """Count a step in."""
        with self._lock:
            self._totals.add(record)

    def text(self) -> str:
        """Return what is served."""
        with self._lock:
            return self._totals.text(self._labels)

    def close(self) -> None:
        """Stop serving. Returns when thread and socket are gone, and soon in any case."""
        server, self._server = self._server, None
        if server is not None:
            server.stop()
            self._thread.join(_CLOSE_S)
            server.server_close()

    def let_go(self) -> None:
        """In a forked child: the port is the parent's, and the thread is not here."""
        server, self._server = self._server, None
        if server is not None:
            server.socket.close()
        self._lock = threading.Lock()

    def __enter__(self) -> OpenMetrics:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Server(HTTPServer):
    """Serves until it is stopped; a client that is slow is hung up on then."""

    timeout = _POLL_S

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._is_stopped = threading.Event()
        self._client: socket.socket | None = None
        super().__init__(address, handler)

    def serve(self) -> None:
        """Serve one after the other: the body of the thread."""
        while not self._is_stopped.is_set():
            try:
                self.handle_request()
            except (OSError, ValueError):  # the socket was closed meanwhile
                return

    def stop(self) -> None:
        """Have the thread end soon, whatever a client does."""
        self._is_stopped.set()
        client = self._client
        if client is not None:
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Serve a client, and know which one it is meanwhile."""
        self._client = request
        try:
            if not self._is_stopped.is_set():
                super().finish_request(request, client_address)
        finally:
            self._client = None

    def handle_error(self, *_: Any) -> None:
        """A client that hangs up is no business of the training's terminal."""


class _Until(io.RawIOBase):
    """Reads from a socket until a moment: a client that sends a byte now and then has no more."""

    def __init__(self, connection: socket.socket, until_s: float) -> None:
        self._connection, self._until_s = connection, until_s

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left_s = self._until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the request took too long")
        self._connection.settimeout(left_s)
        return self._connection.recv_into(buffer)


def _make_handler(metrics: OpenMetrics) -> type[BaseHTTPRequestHandler]:
    class MetricsHandler(BaseHTTPRequestHandler):
        timeout = _REQUEST_TIMEOUT_S  # to read the request, and for each write

        def setup(self) -> None:
            super().setup()
            self.rfile.close()
            until_s = time.monotonic() + self.timeout
            self.rfile = io.BufferedReader(_Until(self.connection, until_s))

        def do_GET(self) -> None:
            if self.path.partition("?")[0] != "/metrics":
                self.send_error(404, "metrics are under /metrics")
                return
            body = metrics.text().encode()
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Say nothing on the terminal of a training script."""

    return MetricsHandler


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return "NaN" if math.isnan(value) else repr(float(value))
