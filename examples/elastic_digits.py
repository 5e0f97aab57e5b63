"""Digits under elastic training: a rank is killed every few seconds, and the accuracy is the same.

    python examples/elastic_digits.py

It starts ``paceline run --elastic`` on itself twice: once undisturbed, and once with somebody who
kills a rank every few seconds. With --hold the survivors wait for the replacement, so both runs end
with the same parameters, bit for bit. Needs scikit-learn.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RANKS = 3

parser = argparse.ArgumentParser(description="Train on digits while ranks are killed.")
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--kill-every", type=float, default=3.0, metavar="S")
parser.add_argument("--step-pause", type=float, default=0.03, metavar="S", help="slows it down")


def train(args: argparse.Namespace) -> None:
    """What each rank does."""
    import torch
    import torch.distributed as dist
    from sklearn.datasets import load_digits
    from torch.utils.data import DataLoader, TensorDataset

    from paceline import DistributedDataParallel as DDP
    from paceline import elastic

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    data = TensorDataset(images[:1500], labels[:1500])
    layers = (torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    model = DDP(torch.nn.Sequential(*layers))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    sampler = elastic.DistributedSampler(data, global_batch=30, seed=1)
    loader = DataLoader(data, batch_sampler=sampler, generator=torch.Generator())
    state = elastic.State(model=model, optimizer=optimizer, sampler=sampler, step=0, epoch=0)

    @elastic.run
    def run_epochs(state: elastic.State) -> None:
        """Train; called again whenever ranks have come or gone."""
        for epoch in range(state.epoch, args.epochs):
            sampler.set_epoch(epoch)
            for inputs, targets in loader:
                torch.nn.functional.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
                optimizer.zero_grad()
                state.step += 1
                state.commit()
                time.sleep(args.step_pause)
            state.epoch = epoch + 1
            if dist.get_rank() == 0:
                print(f"epoch {epoch}: step {state.step}", flush=True)

    run_epochs(state)
    if dist.get_rank() == 0:
        with torch.no_grad():
            right = (model.module(images[1500:]).argmax(1) == labels[1500:]).float().mean()
        total = sum(float(p.detach().double().sum()) for p in model.parameters())
        text = f"accuracy {100 * right:.2f}% after {state.step} steps, sum of parameters {total!r}"
        print(text, flush=True)


def run_job(args: argparse.Namespace, folder: Path, kill_every_s: float) -> tuple[str, int]:
    """Run the job, and kill a rank from time to time; return its last line and how many died."""
    print(f"--- a rank is killed every {kill_every_s:g} s" if kill_every_s else "--- undisturbed")
    command = [sys.executable, "-m", "paceline", "run", "--elastic", "-n", str(RANKS), "--tee", "0"]
    command += ["--hold", "60", "--run-dir", str(folder), __file__]
    options = ["--epochs", str(args.epochs), "--step-pause", str(args.step_pause)]
    job = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True)
    assert job.stdout is not None
    draw, kills, killed_s = random.Random(1), 0, time.monotonic()
    last = ""
    for line in job.stdout:
        last = line.rstrip()
        print(last, flush=True)
        is_time = kill_every_s and time.monotonic() - killed_s > kill_every_s
        is_last = last.startswith(f"epoch {args.epochs - 1}:")
        if is_time and last.startswith("epoch") and not is_last:
            time.sleep(draw.uniform(0.0, 0.5))  # somewhere in a step
            slot, pid = draw.choice(list(running(folder).items()))
            print(f"kill -9 rank {slot}, pid {pid}", flush=True)
            os.kill(pid, signal.SIGKILL)
            kills, killed_s = kills + 1, time.monotonic()
    if job.wait():
        raise SystemExit(f"the job has ended with {job.returncode}")
    return last, kills


def running(folder: Path) -> dict[str, int]:
    """The ranks that train, by number, as the launcher has written them down last."""
    lines = (folder / "membership.jsonl").read_text().splitlines()
    return dict(json.loads(lines[-1])["pids"])


def main() -> None:
    """One command: an undisturbed run, and one with kills."""
    args = parser.parse_args()
    if "PACELINE_ELASTIC_DIR" in os.environ:  # a rank of ours
        train(args)
        return
    with tempfile.TemporaryDirectory() as name:
        calm, _ = run_job(args, Path(name) / "undisturbed", 0.0)
        rough, kills = run_job(args, Path(name) / "disturbed", args.kill_every)
    print(f"undisturbed:   {calm}")
    print(f"with {kills} kills: {rough}")
    if calm != rough:
        raise SystemExit("they differ")


if __name__ == "__main__":
    main()
