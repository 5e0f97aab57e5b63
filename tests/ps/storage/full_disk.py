"""Servers on disks that are too small."""

from __future__ import annotations

import multiprocessing
import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from paceline.errors import ServerStateError
from paceline.ps.protocol.settings import ServerSettings
from paceline.ps.server.process import serve

Running = tuple[multiprocessing.Process, Connection]


def serve_on_a_small_disk(settings: ServerSettings, ready: Connection, most_bytes: int) -> None:
    """A server whose files may have so many bytes each; 0 is any."""
    if most_bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
    try:
        serve(settings, ready.send)
    except ServerStateError as error:
        ready.send(str(error))
        os._exit(3)


@contextmanager
def running(settings: ServerSettings, most_bytes: int = 0) -> Iterator[Running]:
    context = multiprocessing.get_context("forkserver")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=serve_on_a_small_disk, args=(settings, writer, most_bytes))
    process.start()
    writer.close()
    try:
        assert reader.poll(60), "the server did not start"
        assert reader.recv() == settings.address
        yield process, reader  # type: ignore[misc]
    finally:
        process.kill()
        process.join()
        process.close()
        reader.close()


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
