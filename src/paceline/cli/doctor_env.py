"""``paceline doctor env``: is this machine fit for training, and what is to be fixed?

Each check is a function that returns a :class:`Finding`; none changes anything, and none may fail:
what raises is a finding, too.
"""

from __future__ import annotations

import contextlib
import enum
import json
import mmap
import os
import platform
import resource
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.cores import cpu_quota
from paceline.memory.segment import check_segment, create_segment
from paceline.printable import size_text

_MANY_DESCRIPTORS = 1024
_LITTLE_BYTES = 1 << 30


class Level(enum.Enum):
    """How a check came out."""

    OK = "ok"
    NOTE = "note"
    """It works, but slower, or not everywhere."""

    FAIL = "FAIL"
    """Training will not work, or not as asked."""


@dataclass(frozen=True)
class Finding:
    """One line.

    Attributes:
        name: What was looked at.
        level: How it came out.
        found: What was found.
        fix: What to do about it; '' if nothing.
    """

    name: str
    level: Level
    found: str
    fix: str = ""


def run_checks(*, as_json: bool) -> int:
    """Print all findings; return 1 if something fails."""
    findings = list(_all_findings())
    if as_json:
        told = [vars(each) | {"level": each.level.value.lower()} for each in findings]
        print(json.dumps(told, indent=1))
    else:
        width = max(len(each.name) for each in findings)
        for each in findings:
            print(f"{each.level.value:<5}{each.name:<{width}}  {each.found}")
            if each.fix:
                print(f"{'':<5}{'':<{width}}  -> {each.fix}")
    return 1 if any(each.level is Level.FAIL for each in findings) else 0


def _all_findings() -> Iterator[Finding]:
    for check in CHECKS:
        try:
            yield check()
        except Exception as error:
            name = check.__name__.removeprefix("check_").replace("_", " ")
            yield Finding(name, Level.NOTE, f"cannot be checked: {type(error).__name__}: {error}")


# --- software ------------------------------------------------------------------------------------


def check_python() -> Finding:
    """Version and system."""
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.platform != "linux":
        return Finding("python", Level.NOTE, found, "shared memory between ranks needs Linux")
    return Finding("python", Level.OK, found)


def check_torch() -> Finding:
    """Is it there, and which build?"""
    try:
        import torch
    except ImportError as error:
        return Finding("torch", Level.FAIL, f"cannot be imported: {error}", "pip install torch")
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    if not torch.distributed.is_available():
        fix = "install a build of torch with distributed support"
        return Finding("torch", Level.FAIL, f"{torch.__version__}, no torch.distributed", fix)
    return Finding("torch", Level.OK, f"{torch.__version__} ({build})")


def check_backends() -> Finding:
    """What c10d can run on."""
    import torch.distributed as dist

    backends = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
        "ucc": dist.is_ucc_available(),
    }
    found = ", ".join(name for name, there in backends.items() if there) or "none"
    if not backends["gloo"]:
        fix = "install a build of torch with gloo: ranks on CPUs need it"
        return Finding("backends", Level.FAIL, found, fix)
    return Finding("backends", Level.OK, found)


def check_native_core() -> Finding:
    """Is the extension loaded, and if not, why?"""
    from paceline.native.extension import native

    name = "native core"
    if native is not None:
        return Finding(name, Level.OK, "loaded: ranks of one host share memory")
    switch = next((v for v in ("PACELINE_DISABLE_NATIVE",) if os.environ.get(v)), "")
    if switch:
        return Finding(name, Level.NOTE, f"turned off by {switch}", f"unset {switch}")
    fix = "reinstall Paceline with gcc and Python's headers: without it gradients go over gloo"
    return Finding(name, Level.NOTE, "not built, or not loadable", fix)


# --- memory --------------------------------------------------------------------------------------


def check_memfd() -> Finding:
    """Can segments be made, and sealed?"""
    descriptor = create_segment("paceline-doctor", mmap.PAGESIZE)
    try:
        check_segment(descriptor, mmap.PAGESIZE)
        mmap.mmap(descriptor, mmap.PAGESIZE).close()
    finally:
        os.close(descriptor)
    return Finding("memfd", Level.OK, "segments can be made, sealed and mapped")


def check_dev_shm() -> Finding:
    """Paceline does not use it; data loader workers do."""
    free = shutil.disk_usage("/dev/shm").free
    if free < _LITTLE_BYTES:
        fix = (
            "Paceline does not need it, but DataLoader workers do: docker run --shm-size=8g, or "
            "torch.multiprocessing.set_sharing_strategy('file_system')"
        )
        return Finding("/dev/shm", Level.NOTE, f"{_size(free)} free", fix)
    return Finding("/dev/shm", Level.OK, f"{_size(free)} free")


def check_memory() -> Finding:
    """What the machine and the cgroup allow."""
    limit, used = _cgroup_memory()
    available = _available_memory()
    found = f"{_size(available)} available"
    if limit is not None:
        available = min(available, max(0, limit - used))
        found += f"; the cgroup allows {_size(limit)}, {_size(used)} in use"
    if available < _LITTLE_BYTES:
        fix = "raise the container's memory limit, or end other programs: ranks will be killed"
        return Finding("memory", Level.NOTE, found, fix)
    return Finding("memory", Level.OK, found)


def _available_memory() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return 1024 * int(line.split()[1])
    return 0


def _cgroup_memory() -> tuple[int | None, int]:
    """Return the limit and what is in use, of the first cgroup that has a limit."""
    root = Path("/sys/fs/cgroup")
    for path in (_own_cgroup(), root, root / "memory"):
        with contextlib.suppress(OSError, ValueError):
            found = cgroup_memory_of(path)
            if found is not None:
                return found
    return None, 0


def cgroup_memory_of(path: Path) -> tuple[int, int] | None:
    """Return a cgroup's limit and what is in use, of either version; None without a limit.

    Files that nobody has used lately are in memory only until somebody needs it.

    Raises:
        OSError, ValueError: It is no cgroup of memory.
    """
    limit, used, idle = "memory.max", "memory.current", "inactive_file"
    if not (path / limit).exists():
        limit, used, idle = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
    text = (path / limit).read_text().strip()
    if text == "max" or int(text) >= 1 << 60:
        return None
    pairs = (line.split() for line in (path / "memory.stat").read_text().splitlines())
    cached = next((int(pair[1]) for pair in pairs if pair[0] == idle), 0)
    return int(text), max(0, int((path / used).read_text()) - cached)


def _own_cgroup() -> Path:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        if line.startswith("0::"):
            return Path("/sys/fs/cgroup") / line[3:].lstrip("/")
    return Path("/sys/fs/cgroup")


def check_limits() -> Finding:
    """Of this shell: descriptors, locked memory, processes, core dumps."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    processes = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    space = resource.getrlimit(resource.RLIMIT_AS)[0]
    found = f"{_limit(soft)} descriptors (at most {_limit(hard)}), {_limit(processes)} processes"
    if space != resource.RLIM_INFINITY:
        found += f", address space {_size(space)}"
        return Finding("ulimits", Level.NOTE, found, "ulimit -v unlimited: ranks map each other")
    if soft != resource.RLIM_INFINITY and soft < _MANY_DESCRIPTORS:
        return Finding("ulimits", Level.NOTE, found, f"ulimit -n {_MANY_DESCRIPTORS} or more")
    return Finding("ulimits", Level.OK, found)


# --- cores and clock -----------------------------------------------------------------------------


def check_cores() -> Finding:
    """Cores that this process may use, against threads that it would start."""
    cores = len(os.sched_getaffinity(0))
    quota = cpu_quota()
    usable = min(cores, quota) if quota is not None else float(cores)
    threads = int(os.environ.get("OMP_NUM_THREADS") or 0)
    found = f"{cores} of {os.cpu_count()} cores"
    if quota is not None:
        found += f", the cgroup allows {quota:.1f} of them"
    found += f"; OMP_NUM_THREADS is {threads or 'not set'}"
    load = os.getloadavg()[0]
    found += f"; load {load:.1f}"
    if threads > usable:
        fix = f"OMP_NUM_THREADS * ranks should be at most {usable:.0f}; `paceline run` sets it"
        return Finding("cores", Level.NOTE, found, fix)
    if load > 1.5 * usable:
        return Finding("cores", Level.NOTE, found, "other programs use the cores: steps will vary")
    return Finding("cores", Level.OK, found)


def check_clock() -> Finding:
    """Ranks of a host share the monotonic clock; it must be a cheap one."""
    path = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    source = path.read_text().strip() if path.exists() else "unknown"
    began = time.perf_counter_ns()
    for _ in range(1000):
        time.perf_counter_ns()
    each_ns = (time.perf_counter_ns() - began) / 1000
    found = f"{source}, {each_ns:.0f} ns a look"
    if each_ns > 2000:
        fix = "a slow clock source makes records cost more; try clocksource=tsc on the kernel line"
        return Finding("clock", Level.NOTE, found, fix)
    return Finding("clock", Level.OK, found)


# --- network -------------------------------------------------------------------------------------


def check_loopback() -> Finding:
    """Ranks of one host meet on it."""
    with socket.socket() as server, socket.socket() as client:
        server.bind(("127.0.0.1", 0))
        server.listen(1)
        client.settimeout(5)
        client.connect(server.getsockname())
    return Finding("loopback", Level.OK, "127.0.0.1 takes connections, free ports are there")


def check_interfaces() -> Finding:
    """What gloo would choose, by the host's name."""
    names = [name for _, name in socket.if_nameindex()]
    host = socket.gethostname()
    wanted = os.environ.get("GLOO_SOCKET_IFNAME")
    found = f"{', '.join(names)}; this host is {host}"
    if wanted and wanted not in names:
        fix = f"GLOO_SOCKET_IFNAME={wanted} is not one of them"
        return Finding("interfaces", Level.FAIL, found, fix)
    try:
        address = socket.gethostbyname(host)
    except OSError:
        fix = (
            "the host's own name does not resolve: add it to /etc/hosts, or set "
            f"GLOO_SOCKET_IFNAME={names[0]}"
        )
        return Finding("interfaces", Level.NOTE, found, fix)
    return Finding("interfaces", Level.OK, f"{found} ({address})")


def check_port() -> Finding:
    """torchrun's and torch's usual port."""
    port = int(os.environ.get("MASTER_PORT", "29500"))
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("127.0.0.1", port))
        except OSError as error:
            fix = "another job has it: set MASTER_PORT; `paceline run` finds a free one"
            return Finding("port", Level.NOTE, f"{port}: {error.strerror}", fix)
    return Finding("port", Level.OK, f"{port} is free")


# --- stalls --------------------------------------------------------------------------------------


def check_processes() -> Finding:
    """Can ranks see each other's processes, and ask them for stacks? No ptrace is needed."""
    pid = os.getpid()
    if not Path(f"/proc/{pid}/status").exists() or not hasattr(os, "pidfd_open"):
        return Finding("processes", Level.NOTE, "/proc or pidfd is missing", "mount /proc")
    os.close(os.pidfd_open(pid))
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    note = ""
    if scope.exists():
        note = f" (ptrace_scope is {scope.read_text().strip()}, which does not matter)"
    return Finding("processes", Level.OK, f"ranks can watch each other{note}")


def _size(size: int) -> str:
    if size >= resource.RLIM_INFINITY and resource.RLIM_INFINITY > 0:
        return "unlimited"
    return size_text(size)


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


CHECKS: tuple[Callable[[], Finding], ...] = (
    check_python,
    check_torch,
    check_backends,
    check_native_core,
    check_memfd,
    check_dev_shm,
    check_memory,
    check_limits,
    check_cores,
    check_clock,
    check_loopback,
    check_interfaces,
    check_port,
    check_processes,
)
