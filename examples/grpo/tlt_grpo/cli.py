"""`tlt-grpo`: the only place that reads argv."""

import logging
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from tlt_client import Client
from tlt_client.errors import InvalidArgument, TltClientError

from tlt_grpo.config import Beside, Config, Dtype, Mode, Route, Scale
from tlt_grpo.errors import GrpoError
from tlt_grpo.log import Line, Log, read

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


@app.command()
def train(
    url: Annotated[str, typer.Option(help="Of the rollout server.")],
    model: Annotated[str, typer.Option(help="What the server serves: folder or hub name.")],
    out: Annotated[Path, typer.Option(help="For policy and log; the server must see it under the same path.")],
    steps: Annotated[int, typer.Option(help="GRPO steps.")] = 10,
    prompts: Annotated[int, typer.Option(help="Problems in a step.")] = 8,
    group: Annotated[int, typer.Option(help="Responses to each.")] = 8,
    max_new_tokens: Annotated[int, typer.Option(help="Of a response.")] = 512,
    temperature: Annotated[float, typer.Option(help="Of rollouts.")] = 1.0,
    scale: Annotated[Scale, typer.Option(help="Divide advantages by their group's deviation, or by nothing.")] = "std",
    learning_rate: Annotated[float, typer.Option(help="AdamW's.")] = 1e-5,
    updates: Annotated[int, typer.Option(help="Optimiser steps in a GRPO step.")] = 1,
    clip_low: Annotated[float, typer.Option(help="The ratio counts from 1 - this.")] = 0.2,
    clip_high: Annotated[float, typer.Option(help="The ratio counts to 1 + this.")] = 0.28,
    truncate: Annotated[float, typer.Option(help="A token's importance weight counts to this.")] = 2.0,
    kl: Annotated[float | None, typer.Option(help="Weight of the KL from the start; 0 measures it only.")] = None,
    all_responses: Annotated[bool, typer.Option(help="Learn from groups of equal rewards, too.")] = False,
    batch_tokens: Annotated[int, typer.Option(help="Tokens in one forward pass.")] = 8192,
    head_rows: Annotated[int, typer.Option(help="Tokens whose logits are in memory at a time.")] = 2048,
    checkpointing: Annotated[bool, typer.Option(help="Compute activations again, to save memory.")] = False,
    publish: Annotated[Route, typer.Option(help="How the server gets the policy.")] = "disk",
    rollouts: Annotated[Mode, typer.Option(help="Whether responses go on while the policy learns.")] = "on_policy",
    max_age: Annotated[int, typer.Option(help="Of tokens to learn from, in publications.")] = 4,
    offload: Annotated[bool, typer.Option(help="Release the server's memory while the policy learns.")] = False,
    drafter_trainer: Annotated[str | None, typer.Option(help="URL of one with on_demand.")] = None,
    drafter_beside: Annotated[Beside, typer.Option(help="What it trains beside; `learn` on another GPU.")] = "publish",
    drafter_steps: Annotated[int, typer.Option(help="That it takes in a step.")] = 5,
    drafter_judged_every: Annotated[int, typer.Option(help="Steps from one judgement of it to the next.")] = 1,
    checkpoint_every: Annotated[int, typer.Option(help="Steps from one state to the next.")] = 10,
    resume: Annotated[bool, typer.Option(help="Go on from the state in --out.")] = False,
    held_out: Annotated[int, typer.Option(help="Held-out problems to answer first and last.")] = 0,
    device: Annotated[str, typer.Option(help="torch's name of it.")] = "cpu",
    dtype: Annotated[Dtype | None, typer.Option(help="Of the weights; bfloat16 on a GPU, else float32.")] = None,
    seed: Annotated[int, typer.Option(help="Of problems, and of how responses are shared out to updates.")] = 0,
) -> None:
    """Train a policy on the embedded task, with rollouts from a server."""
    config = Config(**{name: value for name, value in locals().items() if name in Config.__struct_fields__})
    _run(config, resume=resume)


def _run(config: Config, *, resume: bool) -> None:
    from tlt_grpo.shown import View, draw
    from tlt_grpo.train import begin, go  # torch is imported once the settings are known to be good

    log_file = config.out / "log.jsonl"
    Log.require_place(log_file, resume=resume)
    with Client(config.url) as client:
        training, done = begin(config, client, resume=resume)
        with Log(log_file, done if resume else None) as log, View(Console(), config.steps, done) as view:

            def tell(line: Line) -> None:
                log.write(line)
                view.tell(line)

            try:
                last = go(training, done, tell)
            except KeyboardInterrupt:
                what = f"{config.out} holds the log, and what --resume goes on from, if any"
                typer.echo(f"tlt-grpo: stopped; {what}", err=True)
                raise typer.Exit(130) from None
    draw(read(log_file), config.out / "run.png")
    typer.echo(f"{last}: the policy; {config.out / 'run.png'}: the run")


def main() -> None:
    """The entry point: what went wrong is one line; a traceback means a bug of ours."""
    warnings = logging.StreamHandler()
    warnings.setFormatter(logging.Formatter("tlt-grpo: %(message)s"))
    for name in ("tlt_grpo", "tlt_client"):
        logging.getLogger(name).addHandler(warnings)
    try:
        app()
    except (GrpoError, TltClientError) as error:
        typer.echo(f"tlt-grpo: {error}", err=True)
        sys.exit(2 if isinstance(error, GrpoError | InvalidArgument) else 1)
