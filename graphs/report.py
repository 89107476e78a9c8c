"""What a run shows while it runs: a live view on a terminal, one line a step elsewhere (files, job logs).

grpo   step 12/200   0:03:41   1,840 tokens/s
metrics   those of the last step, the ones that tell of trouble first
edges     what waits between stages, against its bound
stages    how each one's time splits into computing and waiting
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rollstream.graphs.stats import EdgeStats, Evaluated, Snapshot, StageStats, Step

#: Shown before the others, in this order, where a step has them.
LEADING_METRICS = (
    "reward/mean",
    "reward/std",
    "rollout/response_tokens",
    "actor/loss",
    "actor/kl",
    "actor/entropy",
    "actor/grad_norm",
    "actor/clip_fraction",
    "time/step_s",
)
MAX_METRICS_SHOWN = 12
TOKENS_PER_S = "time/tokens_per_s"
_BAR_CHARS = 24
_REFRESHES_PER_S = 4


class LiveView:
    """Shows a run on `console`, by default standard error: standard output stays the script's.

    with LiveView() as view:
        view.show(snapshot)       # as often as there is news
        view.step(step)
    """

    def __init__(self, console: Console | None = None):
        self._console = console or Console(stderr=True)
        self._live: Live | None = None

    def __enter__(self) -> LiveView:
        if self._console.is_terminal:
            self._live = Live(
                console=self._console, refresh_per_second=_REFRESHES_PER_S, redirect_stdout=sys.stdout.isatty()
            )
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()
            self._live = None

    def show(self, snapshot: Snapshot) -> None:
        """Renews the live view; nothing where there is no terminal."""
        if self._live:
            self._live.update(drawn(snapshot))

    def step(self, step: Step) -> None:
        """One line for a finished step, where there is no terminal."""
        if not self._console.is_terminal:
            self._print(step_line(step))

    def message(self, text: str) -> None:
        """A message to the user, above the live view."""
        self._print(text)

    def _print(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)


def step_line(step: Step) -> str:
    """
    >>> step_line(Step(index=3, version=4, metrics={"actor/loss": 0.25, "reward/mean": 0.5}, checkpoint="runs/a/3"))
    'step 3  version 4  reward/mean 0.5  actor/loss 0.25  saved runs/a/3'
    """
    known = [f"{name} {_number(step.metrics[name])}" for name in LEADING_METRICS if name in step.metrics]
    saved = [f"saved {step.checkpoint}"] if step.checkpoint else []
    return "  ".join([f"step {step.index}", f"version {step.version}", *known, *saved])


def evaluated_line(found: Evaluated) -> str:
    """The mean reward, and what else is not 0.

    >>> evaluated_line(Evaluated("eval", 20, 20, {"eval/reward/mean": 0.5, "eval/rollout/truncated": 0.0}, 12.34))
    'eval of step 20  reward/mean 0.5  in 12.3 s'
    """
    metrics = {name.removeprefix(f"{found.name}/"): value for name, value in sorted(found.metrics.items())}
    shown = [f"{name} {_number(value)}" for name, value in metrics.items() if value or name == "reward/mean"]
    return "  ".join([f"{found.name} of step {found.step}", *shown, f"in {found.seconds:.1f} s"])


def drawn(snapshot: Snapshot) -> Group:
    """The whole view, 80 columns wide at least."""
    parts: list[Text | Table] = [_header(snapshot)]
    if snapshot.metrics:
        parts.append(_metrics(snapshot.metrics))
    if snapshot.edges:
        parts.append(_edges(snapshot.edges))
    if snapshot.stages:
        parts.append(_stages(snapshot.stages))
    return Group(*parts)


def _header(snapshot: Snapshot) -> Text:
    of = f"/{snapshot.steps}" if snapshot.steps is not None else ""
    header = Text(no_wrap=True, overflow="ellipsis")
    header.append(snapshot.graph, style="bold")
    header.append(f"   step {snapshot.step}{of}   {_clock(snapshot.elapsed_s)}")
    rate = snapshot.metrics.get(TOKENS_PER_S)
    if rate is not None:
        header.append(f"   {rate:,.0f} tokens/s")
    return header


def _metrics(metrics: Mapping[str, float]) -> Table:
    """Two metrics a row, so that a dozen leave room for the rest in 24 lines."""
    table = _table("metrics", "", "", "")
    leading = [name for name in LEADING_METRICS if name in metrics]
    names = leading + sorted(n for n in metrics if n not in leading and n != TOKENS_PER_S)
    shown = names[:MAX_METRICS_SHOWN]
    half = (len(shown) + 1) // 2
    for i in range(half):
        row = [shown[i], *shown[half + i : half + i + 1]]
        table.add_row(*(cell for name in row for cell in (Text(name), _value(metrics[name]))))
    if len(names) > len(shown):
        table.add_row(Text(f"and {len(names) - len(shown)} more", style="dim"))
    return table


def _edges(edges: tuple[EdgeStats, ...]) -> Table:
    table = _table("edges", "groups", "size", "oldest")
    for edge in edges:
        full = edge.groups >= edge.max_groups or edge.nbytes >= edge.max_bytes
        table.add_row(
            Text(edge.name),
            Text(f"{edge.groups}/{edge.max_groups}", style="yellow" if full else ""),
            Text(f"{_size(edge.nbytes)}/{_size(edge.max_bytes)}"),
            Text("ended" if edge.closed and not edge.groups else _age(edge.oldest_age_s) if edge.groups else "-"),
        )
    return table


def _stages(stages: tuple[StageStats, ...]) -> Table:
    table = _table("stages", "busy", "", "now")
    for stage in stages:
        known_s = stage.busy_s + stage.wait_s
        share = stage.busy_s / known_s if known_s > 0 else 0.0
        filled = round(share * _BAR_CHARS)
        bar = Text("█" * filled, style="green").append("░" * (_BAR_CHARS - filled), style="dim")
        now = f"{stage.working_on} {_age(stage.working_s)}" if stage.working_on else "waits"
        table.add_row(Text(stage.name), Text(f"{share:.0%}" if known_s > 0 else "-"), bar, Text(now))
    return table


def _table(*columns: str) -> Table:
    """A table without lines; what does not fit is cut, never wrapped."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, no_wrap=True, overflow="ellipsis")
    return table


def _value(value: float) -> Text:
    return Text(_number(value), style="" if math.isfinite(value) else "bold red")


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 10_000 and math.isfinite(value) else f"{value:.4g}"


def _clock(seconds: float) -> str:
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def _age(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else f"{seconds / 60:.0f} min" if seconds < 3600 else _clock(seconds)


def _size(nbytes: int) -> str:
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if size >= 100 else f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:,.1f} GiB"
