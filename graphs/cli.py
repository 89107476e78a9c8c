"""The command line: `rollstream run`, `rollstream submit`, `rollstream rewards`."""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from rollstream.graphs.options import OVERRIDES
from rollstream.stages.errors import RollstreamError, StageError

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Reinforcement-learning post-training on Ray.")
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}

Script = Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A Python script that calls run(...).")]
Steps = Annotated[int | None, typer.Option(min=1, help="Steps in all, instead of the script's.")]
Out = Annotated[Path | None, typer.Option(help="The run's folder, instead of the script's.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint; there must be one.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything and print the graph; start nothing.")]


@app.command(context_settings=_PASS_ON)
def run(
    context: typer.Context,
    script: Script,
    steps: Steps = None,
    out: Out = None,
    resume: Resume = False,
    dry_run: DryRun = False,
) -> None:
    """Runs a script as `python` would, with its run's options overridden. Put options before SCRIPT; what follows it
    is the script's own."""
    os.environ[OVERRIDES] = json.dumps(overrides(steps=steps, out=out, resume=resume, dry_run=dry_run))
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
    follow: Annotated[bool, typer.Option(help="Print the job's log until it ends.")] = True,
) -> None:
    """Sends a script, with its folder, to a Ray cluster as a job."""
    from rollstream.graphs.jobs import follow_job, submit_job

    given = overrides(steps=steps, out=out, resume=resume, dry_run=False)
    job = submit_job(address, script, context.args, given)
    typer.echo(f"{job}   status: ray job status --address {address} {job}")
    if follow:
        raise typer.Exit(follow_job(address, job))


@app.command()
def rewards() -> None:
    """Lists the reward functions that can be named in Reward.Config(function=...)."""
    from rollstream.stages.reward.resolve import known_rewards

    typer.echo("\n".join(known_rewards()))


def overrides(*, steps: int | None, out: Path | None, resume: bool, dry_run: bool) -> dict[str, Any]:
    """RunOptions fields that the command line sets; what it does not say stays the script's.

    >>> overrides(steps=3, out=None, resume=True, dry_run=False)
    {'steps': 3, 'resume': 'must'}
    """
    given: dict[str, Any] = {"steps": steps, "out": str(out) if out else None}
    given |= {"resume": "must" if resume else None, "dry_run": dry_run or None}
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
