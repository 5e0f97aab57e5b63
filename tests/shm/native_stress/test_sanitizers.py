"""The native core under ThreadSanitizer, AddressSanitizer and UndefinedBehaviorSanitizer.

``stress.c`` says what is run. The mutations show that the sanitizer would see it if an order were
too weak or a slot too few.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[3] / "src" / "paceline" / "native" / "group"
STRESS = Path(__file__).with_name("stress.c")
COMPILER = shutil.which(os.environ.get("CC", "cc"))
# -fwrapv as in setup.py: integers overflow as torch's do.
FLAGS = ("-std=gnu11", "-O1", "-g", "-fwrapv", "-Wall", "-Wextra", "-Wno-unknown-warning-option")
THREAD = ("-fsanitize=thread", "-Wno-tsan")
ADDRESS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(COMPILER is None, reason="needs a C compiler: cc, or what CC names"),
]


def compile_stress(native: Path, output: Path, flags: Sequence[str]) -> Path:
    plain = sorted(path for path in native.glob("*.c") if "group.h" not in path.read_text())
    sources = [str(STRESS), *map(str, plain)]
    command = [
        str(COMPILER),
        *FLAGS,
        *flags,
        f"-I{native}",
        *sources,
        "-pthread",
        "-o",
        str(output),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return output


def run_stress(binary: Path, world: int, collectives: int, seed: int = 1) -> tuple[int, str]:
    """Return the exit code and what was written."""
    # An address space that is too random is beyond the thread sanitizer of older compilers.
    fixed = [path, "-R"] if (path := shutil.which("setarch")) else []
    options = {"TSAN_OPTIONS": "halt_on_error=1:exitcode=66", "ASAN_OPTIONS": "detect_leaks=1"}
    command = [*fixed, str(binary), str(world), str(collectives), str(seed)]
    environ = {**os.environ, **options}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environ)
    return done.returncode, done.stdout + done.stderr


def skip_without(flags: Sequence[str], directory: Path) -> None:
    """See that the sanitizer's library is there, and that it can start here."""
    source, binary = directory / "nothing.c", directory / "nothing"
    source.write_text("int main(void) { return 0; }\n")
    command = [str(COMPILER), *flags, str(source), "-o", str(binary)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        pytest.skip(f"this compiler cannot link {flags[0]}: {done.stderr.splitlines()[-1:]}")
    code, text = run_stress(binary, 1, 1)
    if code != 0:
        pytest.skip(f"a program with {flags[0]} does not start here: {text.splitlines()[:1]}")


@pytest.mark.parametrize(("flags", "collectives"), [(THREAD, 1300), (ADDRESS, 2500)], ids=str)
def test_is_clean(tmp_path: Path, flags: tuple[str, ...], collectives: int) -> None:
    skip_without(flags, tmp_path)
    binary = compile_stress(NATIVE, tmp_path / "stress", flags)
    for world in (2, 3, 5):
        code, text = run_stress(binary, world, collectives * 2 // world, seed=world)
        assert code == 0, text
        found = {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", text)}
        assert min(found[name] for name in ("mismatches", "in_place", "delays")) > 50, text


MUTATIONS = {
    "a slot too few": ("layout.h", "#define PL_SLOTS 4", "#define PL_SLOTS 3"),
    "an arrival that does not release": (
        "sync.c",
        "atomic_fetch_add(&barrier->arrived, 1) + 1",
        "atomic_fetch_add_explicit(&barrier->arrived, 1, memory_order_relaxed) + 1",
    ),
    "a wait that does not acquire": (
        "sync.c",
        "atomic_load_explicit(&core->control->barrier.arrived, memory_order_acquire)",
        "atomic_load_explicit(&core->control->barrier.arrived, memory_order_relaxed)",
    ),
    "no meeting after a reduction in place": (
        "reduce.c",
        "    int status = advance(core, deadline_ns);\n    return status == PL_OK ? pl_state",
        "    int status = PL_OK;\n    (void)deadline_ns;\n    return status == PL_OK ? pl_state",
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_seen(tmp_path: Path, name: str) -> None:
    skip_without(THREAD, tmp_path)
    native = tmp_path / "native"
    shutil.copytree(NATIVE, native)
    file, right, wrong = MUTATIONS[name]
    text = (native / file).read_text()
    assert text.count(right) == 1, f"{file} has changed: bring this mutation up to date"
    (native / file).write_text(text.replace(right, wrong))
    binary = compile_stress(native, tmp_path / "stress", THREAD)
    for seed in range(5):
        code, text = run_stress(binary, 3, 2000, seed)
        if code != 0:
            break
    # On this processor too weak an order does no harm: only the sanitizer sees it.
    seen = ["data race"] if file == "sync.c" else ["data race", "element"]
    assert code != 0, "nothing was seen"
    assert any(words in text for words in seen), text
