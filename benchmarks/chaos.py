"""A run whose processes are killed at random, against the same run left alone.

    python benchmarks/chaos.py [--json] [--seed 0] [--kills 40] [--steps N] [--staleness 0] [--engine transformers]
                               [--folder DIR]

GRPO on a tiny model: prompts, rollout, reward, reference, advantage and a Megatron update stage. While it runs, one of
its processes at a time gets a SIGKILL: a stage's, an edge's, the weight store's, vLLM's, or the driver's, which is then
started again and resumes. The update stage of both runs writes down every group that its weights were trained on; that
record is saved and loaded with the weights, so at the end it tells what the final weights have seen: the same groups as
often, and the same lengths of their responses, or the run lost something. (With a staleness above 0, which weights draw
a sample is a matter of time, and lengths differ.)
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
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import bench
import psutil
import tiny_model

HERE = Path(__file__)
#: What is killed, and how often in comparison.
WEIGHTS = {"stage": 6, "edge": 4, "store": 1, "driver": 2, "engine": 3}
TITLES = {
    "ray::StageHost": "stage",
    "ray::EdgeActor": "edge",
    "ray::WeightStore": "store",
    "VLLM::EngineCore": "engine",
}
RAY_AGENTS = ("ray::RuntimeEnvAgent", "ray::DashboardAgent")
#: Seconds between the first step after a kill, or after a start, and the next kill; less where a step ends meanwhile,
#: so that the kills don't outlast the steps on a fast machine.
PAUSE_S = (0.2, 2.5)
GROUPS_PER_STEP = 4
#: A run in which nothing ends for so long has failed.
PATIENCE_S = 300.0


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--json", action="store_true")
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--kills", type=int, default=40)
    arguments.add_argument("--steps", type=int, default=None, help="by default three for each kill, and four")
    arguments.add_argument("--staleness", type=int, default=0)
    arguments.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    arguments.add_argument("--folder", type=Path, default=None)
    arguments.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    given = arguments.parse_args()
    given.steps = given.steps or 3 * given.kills + 4
    if given.child:
        return train(given)
    with tempfile.TemporaryDirectory(prefix="chaos") as folder:
        report = compare(given, given.folder or Path(folder))
    if not given.json:
        print("\n".join(f"{name:28} {value}" for name, value in report["results"].items()))
    print(json.dumps(report))


def compare(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    tiny_model.write_model(folder / "model")
    tiny_model.write_sums(folder / "sums.jsonl")
    quiet = Trial(folder / "quiet", folder, given)
    list(quiet.run(kills=0, rng=random.Random(given.seed)))
    stormy = Trial(folder / "stormy", folder, given)
    killed = list(stormy.run(kills=given.kills, rng=random.Random(given.seed)))
    expected, got = quiet.witnessed(), stormy.witnessed()
    results = {
        "kills": len(killed),
        "killed": dict(Counter(killed)),
        "groups": len(got),
        "same_groups": Counter(g["group_id"] for g in expected) == Counter(g["group_id"] for g in got),
        "trained_twice": sum(n - 1 for n in Counter(g["order"] for g in got).values()),
        "lost": len({g["order"] for g in expected} - {g["order"] for g in got}),
        "in_order": [g["order"] for g in got] == sorted(g["order"] for g in got),
        "same_lengths": lengths(expected) == lengths(got),
        "same_samples": expected == got,
        "left_processes": len(stormy.left),
        "left": stormy.left,
        "left_ray_agents": len(stormy.agents),
        "quiet_s": round(quiet.seconds, 1),
        "stormy_s": round(stormy.seconds, 1),
    }
    wanted = {"kills": given.kills, "same_groups": 1, "in_order": 1} | ({} if given.staleness else {"same_lengths": 1})
    bars: dict[str, Any] = {name: {"value": int(results[name]), "at_least": bar} for name, bar in wanted.items()}
    bars |= {name: {"value": results[name], "at_most": 0} for name in ("trained_twice", "lost", "left_processes")}
    settings = {name: value for name, value in vars(given).items() if name not in ("child", "folder")}
    return bench.report(settings, ("ray", "torch", "megatron-core", "rollstream"), results, bars)


def lengths(groups: Sequence[dict[str, Any]]) -> Counter[int]:
    """How many responses of each length were trained on."""
    return Counter(length for group in groups for length in group["lengths"])


class Trial:
    """One run, in a folder of its own, by as many drivers as it takes."""

    def __init__(self, out: Path, inputs: Path, given: argparse.Namespace):
        self.out, self._inputs, self._given = out, inputs, given
        self._kinds = [kind for kind in WEIGHTS if kind != "engine" or given.engine == "vllm"]
        self._family: dict[int, psutil.Process] = {}
        self.seconds = 0.0
        self.left: list[str] = []  # command lines of processes that outlived their driver
        self.agents: list[str] = []  # Ray's own among them: they end by themselves, after a while
        self.log = out.parent / f"{out.name}.log"

    def run(self, *, kills: int, rng: random.Random) -> Iterator[str]:
        """Runs to the end and gives the kind of each process killed on the way."""
        begun = time.monotonic()
        done = 0
        while True:
            driver = self._start()
            lives = done
            for kind in self._storm(driver, kills - done, rng):
                done += 1
                yield kind
            if driver.poll() is None:
                driver.wait(timeout=PATIENCE_S)
            self._bury()
            if driver.returncode == 0:
                break
            if driver.returncode != -signal.SIGKILL or done == lives:
                raise SystemExit(f"the run ended with {driver.returncode}; its log: {self.log}\n{self._tail()}")
        self.seconds = time.monotonic() - begun

    def witnessed(self) -> list[dict[str, Any]]:
        """What the final weights were trained on, in order."""
        return json.loads((self.out / "model" / "witness.json").read_text())

    def _start(self) -> subprocess.Popen[bytes]:
        names = ("steps", "staleness", "engine")
        options = ["--folder", self.out, *(part for n in names for part in (f"--{n}", getattr(self._given, n)))]
        command = [sys.executable, HERE, "--child", self._inputs, *options]
        with open(self.log, "ab") as log:
            self._begun_at = log.tell()
            return subprocess.Popen([str(part) for part in command], stdout=log, stderr=log)

    def _storm(self, driver: subprocess.Popen[bytes], kills: int, rng: random.Random) -> Iterator[str]:
        """One kill after another, each some time after a step; ends with the driver."""
        for _ in range(kills):
            if not self._wait_for_step(driver):
                return
            self._pause(rng.uniform(*PAUSE_S))
            kind, targets = "", []
            while not targets:  # the only one of a kind may be on its way back
                if driver.poll() is not None:
                    return
                kind = rng.choices(self._kinds, [WEIGHTS[kind] for kind in self._kinds])[0]
                targets = [driver.pid] if kind == "driver" else self._members(driver, kind)
            try:
                os.kill(rng.choice(sorted(targets)), signal.SIGKILL)
            except ProcessLookupError:  # it ended by itself
                continue
            yield kind
            if kind == "driver":
                driver.wait(timeout=PATIENCE_S)
                return

    def _wait_for_step(self, driver: subprocess.Popen[bytes]) -> bool:
        """Waits for the next step of this driver; false where it ended instead."""
        known = self._num_steps()
        patience = time.monotonic() + PATIENCE_S
        while self._num_steps() <= known:
            self._remember(driver)
            if driver.poll() is not None:
                return False
            if time.monotonic() > patience:
                driver.kill()
                raise SystemExit(f"no step in {PATIENCE_S:g} s; the log: {self.log}\n{self._tail()}")
            time.sleep(0.1)
        return True

    def _pause(self, seconds: float) -> None:
        known, until = self._num_steps(), time.monotonic() + seconds
        while time.monotonic() < until and self._num_steps() == known:
            time.sleep(0.02)

    def _num_steps(self) -> int:
        with open(self.log, "rb") as log:
            log.seek(self._begun_at)
            return log.read().count(b"\n{")

    def _tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])

    def _members(self, driver: subprocess.Popen[bytes], kind: str) -> list[int]:
        """Processes of this kind that work for the driver; Ray writes the class of an actor into its title."""
        self._remember(driver)
        found: list[int] = []
        for process in self._family.values():
            try:
                title = " ".join(process.cmdline())
            except psutil.Error:
                continue
            if any(name in title for name, is_a in TITLES.items() if is_a == kind):
                found.append(process.pid)
        return found

    def _remember(self, driver: subprocess.Popen[bytes]) -> None:
        """Notes who descends from the driver while it can be seen."""
        try:
            for process in psutil.Process(driver.pid).children(recursive=True):
                self._family.setdefault(process.pid, process)
        except psutil.Error:
            return

    def _bury(self) -> None:
        """Waits for all processes of a driver that ended, and ends those that stay."""
        _, left = psutil.wait_procs(list(self._family.values()), timeout=30)
        for process in left:
            try:
                title = " ".join(process.cmdline()).strip()
                process.kill()
            except psutil.NoSuchProcess:
                continue
            (self.agents if title in RAY_AGENTS else self.left).append(title[:200])
        self._family.clear()


def train(given: argparse.Namespace) -> None:
    """The driver: the run, resumed where there is a checkpoint."""
    from chaos_graph import graph

    from rollstream import Placement, run

    options = {"save_every": 3, "max_restarts": 1000, "max_deaths": 1000, "stall_s": PATIENCE_S}
    made = graph(given.child, GROUPS_PER_STEP, given.staleness, given.engine)
    placement = Placement.auto(threads=1)
    for step in run(made, steps=given.steps, out=given.folder, resume="auto", placement=placement, **options):
        print("\n" + json.dumps({"step": step.index}), flush=True)


if __name__ == "__main__":
    main()
