"""Servers on disks that are too small."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from paceline.errors import ServerStateError
from paceline.launch.child import Child
from paceline.ps.protocol.settings import ServerSettings
from paceline.ps.server.process import serve
from tests.children import child_process


def serve_on_a_small_disk(ready: Connection, settings: ServerSettings, most_bytes: int) -> None:
    """A server whose files may have so many bytes each; 0 is any."""
    if most_bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
    try:
        serve(settings, ready.send)
    except ServerStateError as error:
        ready.send(str(error))
        os._exit(3)


@contextmanager
def running(settings: ServerSettings, most_bytes: int = 0) -> Iterator[Child]:
    with child_process(serve_on_a_small_disk, settings, most_bytes) as child:
        assert child.pipe.poll(60), "the server did not start"
        assert child.pipe.recv() == settings.address
        yield child


@contextmanager
def small_file_system(path: Path, size: int) -> Iterator[None]:
    if os.getuid():
        pytest.skip("only root can mount a small file system")
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(path)]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"this machine mounts nothing: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)
