"""The command line: `rollstream run`, `submit`, `trace`, `export` and `rewards`."""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from rollstream.graphs.options import OVERRIDES
from rollstream.stages.errors import ConfigError, RollstreamError, StageError

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Reinforcement-learning post-training on Ray.")
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}

Script = Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A Python script that calls run(...).")]
Steps = Annotated[int | None, typer.Option(min=1, help="Steps in all, instead of the script's.")]
Out = Annotated[Path | None, typer.Option(help="The run's folder, instead of the script's.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint; there must be one.")]
Record = Annotated[list[str] | None, typer.Option(metavar="STAGE", help="Record what this stage puts out. Repeatable.")]
Replay = Annotated[
    list[str] | None,
    typer.Option(metavar="FILE", help="Take this recording in the place of the stage that made it. Repeatable."),
]
Until = Annotated[str | None, typer.Option(metavar="STAGE", help="Run up to this stage; train nothing.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything and print the graph; start nothing.")]


@app.command(context_settings=_PASS_ON)
def run(
    context: typer.Context,
    script: Script,
    steps: Steps = None,
    out: Out = None,
    resume: Resume = False,
    record: Record = None,
    replay: Replay = None,
    until: Until = None,
    dry_run: DryRun = False,
) -> None:
    """Runs a script as `python` would, with its run's options overridden. Put options before SCRIPT; what follows it
    is the script's own."""
    parts: dict[str, Any] = {"record": record, "replay": replay, "until": until}
    os.environ[OVERRIDES] = json.dumps(overrides(steps=steps, out=out, resume=resume, dry_run=dry_run, **parts))
    sys.argv = [str(script), *context.args]
    sys.path.insert(0, str(script.resolve().parent))
    runpy.run_path(str(script), run_name="__main__")


@app.command(context_settings=_PASS_ON)
def submit(
    context: typer.Context,
    script: Script,
    address: Annotated[str, typer.Option(envvar="RAY_API_SERVER_ADDRESS", help="The cluster's dashboard.")],
    steps: Steps = None,
    out: Out = None,
    resume: Resume = False,
    record: Record = None,
    replay: Replay = None,
    until: Until = None,
    follow: Annotated[bool, typer.Option(help="Print the job's log until it ends.")] = True,
) -> None:
    """Sends a script, with its folder, to a Ray cluster as a job; paths are those that the job sees."""
    from rollstream.graphs.jobs import follow_job, submit_job

    given = overrides(steps=steps, out=out, resume=resume, record=record, replay=replay, until=until)
    job = submit_job(address, script, context.args, given)
    typer.echo(f"{job}   status: ray job status --address {address} {job}")
    if follow:
        raise typer.Exit(follow_job(address, job))


@app.command()
def trace(
    group: Annotated[str, typer.Argument(help="A group's id, or its order: its place among the run's prompts.")],
    out: Annotated[Path | None, typer.Option(help="The run's folder, instead of the newest in runs/.")] = None,
) -> None:
    """Tells what became of one group: which stage had it when, and where it is. Reads files only, also those of a run
    that goes on."""
    from rollstream.graphs.group_trace import trace_group
    from rollstream.graphs.run_files import newest_run

    typer.echo(trace_group(out or newest_run(Path("runs")), group, now=time.time()))


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint of a run: NAME/checkpoints/step_000010.")],
    out: Annotated[Path, typer.Argument(help="The folder to write; it must be empty or not there.")],
    adapter: Annotated[bool, typer.Option("--adapter", help="Write the adapters alone, for PEFT.")] = False,
    model: Annotated[
        Path | None, typer.Option(help="The model folder that the run began with, where it has moved.")
    ] = None,
) -> None:
    """Writes the model of a checkpoint as a folder for transformers, adapters merged. Works on the CPU, without Ray, on
    checkpoints of any layout, also while the run goes on."""
    from rollstream.graphs.seal import check_is_whole

    checkpoint = checkpoint.resolve()  # its name says its step
    check_is_whole(checkpoint)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is there already: give a folder that is empty or not there")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # read when torch is first loaded; the GPUs may be at work
    from rollstream.stages.megatron.checkpoint_export import export_checkpoint

    export_checkpoint(checkpoint, out, adapter=adapter, model=model)
    typer.echo(f"{'adapters for PEFT' if adapter else 'model for transformers'}: {out}")


@app.command()
def rewards() -> None:
    """Lists the reward functions that can be named in Reward.Config(function=...)."""
    from rollstream.stages.reward.resolve import known_rewards

    typer.echo("\n".join(known_rewards()))


def overrides(*, out: Path | None, resume: bool = False, dry_run: bool = False, **given: Any) -> dict[str, Any]:
    """RunOptions fields that the command line sets, as JSON has them; what it does not say stays the script's.

    >>> overrides(steps=3, out=None, resume=True, replay=["rollout.arrows"])
    {'steps': 3, 'replay': ['rollout.arrows'], 'resume': 'must'}
    """
    given |= {"out": str(out) if out else None, "resume": "must" if resume else None, "dry_run": dry_run or None}
    return {name: value for name, value in given.items() if value is not None}


def main() -> None:
    """Entry point. An error of ours is its message and exit code 1; a Ctrl-C is 130."""
    try:
        app()
    except StageError:  # the run has told it
        raise SystemExit(1) from None
    except RollstreamError as error:
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
