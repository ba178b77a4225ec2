"""The command line: `tlt-server {fork, drafter, serve, fleet, keeper, train, …}`. Only here argv is read."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from tlt_server import __version__
from tlt_server.config import (
    AUTO,
    Arm,
    Dialect,
    DrafterForm,
    DrafterKind,
    GraphSharing,
    ServerConfig,
    Trainer,
    Watchfulness,
)
from tlt_server.errors import ConfigError, DemoFailed, TltError
from tlt_server.fleet.keeper.command import keeper
from tlt_server.fleet.start.command import SETTINGS as fleet_settings
from tlt_server.fleet.start.command import fleet
from tlt_server.fork.commands import app as fork_app
from tlt_server.keys import FLAGS, Keys, hide, taken_out
from tlt_server.trainer.commands import CardBench, CardTarget, Form
from tlt_server.trainer.commands import app as drafter_app

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="A rollout server for RL training: SGLang with lossless speculative decoding.",
)
app.add_typer(fork_app, name="fork")
app.command("fleet", **fleet_settings)(fleet)
app.command("keeper")(keeper)
app.add_typer(drafter_app, name="drafter")
train_app = typer.Typer(help="Train the drafter of running servers.")
app.add_typer(train_app, name="train")
Part = Literal["speculation", "loop", "both"]
_out = Console(highlight=False, soft_wrap=True)


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        _out.print(__version__)
        raise typer.Exit


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": ["--help"]},
    epilog="Every flag of `sglang serve` works too: see `python -m sglang.launch_server --help`.",
)
def serve(
    context: typer.Context,
    drafter: Annotated[str | None, typer.Option(help="EAGLE or EAGLE-3: folder, hub name; auto, mtp, none.")] = None,
    drafter_kind: Annotated[DrafterKind | None, typer.Option(help="What --drafter auto makes; eagle.")] = None,
    arm: Annotated[
        list[str] | None,
        typer.Option(help="num_steps,topk,num_draft_tokens, history:7; several to choose from; auto; 3,1,4 if none."),
    ] = None,
    speculation: Annotated[bool | None, typer.Option(help="Whether to use the drafter.")] = None,
    trainer: Annotated[str | None, typer.Option(help="Drafter trainer to follow: tcp://HOST:PORT, ipc://PATH.")] = None,
    watchdog: Annotated[Watchfulness | None, typer.Option(help="What a drafter that is worse meets.")] = None,
    graph_sharing: Annotated[GraphSharing | None, typer.Option(help="none captures each arm by itself; pool.")] = None,
    graph_memory_gb: Annotated[float | None, typer.Option(help="That CUDA graphs may take of each GPU; any.")] = None,
    strict_fields: Annotated[bool | None, typer.Option(help="Refuse fields of requests that nobody knows.")] = None,
    dialect: Annotated[Dialect | None, typer.Option(help="Whose HTTP API to speak; sglang.")] = None,
    tlt_config: Annotated[Path | None, typer.Option(help="TOML file with these settings; flags go first.")] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="What clients must show; or TLT_API_KEY.")] = None,
    admin_api_key_file: Annotated[Path | None, typer.Option(help="For changes; or TLT_ADMIN_API_KEY.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Serve though others may get in.")] = False,
) -> None:
    """Run the rollout server. Without a model it serves the small embedded one."""
    from tlt_server.fork.status import require_fork

    config = read_config(
        tlt_config,
        drafter,
        arm,
        trainer,
        speculation=speculation,
        drafter_kind=drafter_kind,
        watchdog=watchdog,
        graph_sharing=graph_sharing,
        graph_memory_gb=graph_memory_gb,
        strict_fields=strict_fields,
        dialect=dialect,
    )
    require_fork()
    from tlt_server.launch import serve as run

    run(config, context.args, Keys.read(api_key_file, admin_api_key_file), insecure=insecure)


@train_app.callback(invoke_without_command=True)
def train(
    context: typer.Context,
    tlt_config: Annotated[Path | None, typer.Option(help="TOML file with the settings; flags go first.")] = None,
    target: Annotated[str | None, typer.Option(help="Folder or hub name; docs/support.md has the families.")] = None,
    folder: Annotated[str | None, typer.Option(help="For checkpoints and published drafters.")] = None,
    drafter: Annotated[str | None, typer.Option(help="Folder to begin with; else the server's own.")] = None,
    drafter_kind: Annotated[DrafterKind | None, typer.Option(help="Of one to make, that has learnt nothing.")] = None,
    listen: Annotated[str | None, typer.Option(help="Control link: tcp://HOST:PORT or ipc://PATH.")] = None,
    features: Annotated[str | None, typer.Option(help="Link of features; the port after the control link's.")] = None,
    port: Annotated[int | None, typer.Option(help="Of status and metrics; 30502.")] = None,
    loss: Annotated[str | None, typer.Option(help="eagle, hass or eagle3.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda:N; under torchrun cpu or cuda.")] = None,
) -> None:
    """Train the drafter of servers that `serve --trainer`. Without a target it is the embedded one's. On several GPUs:
    torchrun --standalone --nproc-per-node N -m tlt_server train ..."""
    if context.invoked_subcommand:
        return
    import logging

    from tlt_server.demo import default_paths
    from tlt_server.trainer.config import TrainConfig
    from tlt_server.trainer.start import train as run

    flags: dict[str, Any] = {"target": target, "folder": folder, "drafter": drafter, "drafter_kind": drafter_kind}
    flags |= {"listen": listen, "features": features, "port": port, "loss": loss, "device": device}
    config = TrainConfig.read(tlt_config, flags, {"target": str(default_paths()[0])})
    logging.basicConfig(level=logging.WARNING, format="[%(asctime)s train] %(message)s", datefmt="%Y-%m-%d %H:%M:%S")
    logging.getLogger("tlt_server").setLevel(logging.INFO)
    run(config)


@train_app.command("export")
def train_export(
    folder: Annotated[Path, typer.Option(help="The trainer's.")],
    out: Annotated[Path, typer.Option(help="The folder to make.")],
    checkpoint: Annotated[bool, typer.Option(help="As last saved, though no gate has passed it.")] = False,
    form: Form = DrafterForm.SGLANG,
    target: CardTarget = None,
    bench: CardBench = None,
) -> None:
    """Write the drafter that was published last for SGLang, vLLM or speculators, with a model card."""
    from tlt_server.drafter.card import from_bench
    from tlt_server.trainer.publish.export import export

    measured = from_bench(bench) if bench else None
    of = export(folder, out, checkpointed=checkpoint, form=form, target=target, measured=measured)
    _out.print(f"{out} made: {of['tokens']} tokens learnt in {of['steps']} steps, for target {of['trained_on']}")


@train_app.command("replay")
def train_replay(
    prompts: Annotated[Path, typer.Argument(help='JSON lines, {"prompt": "text"} or {"prompt": [token ids]}.')],
    url: Annotated[str, typer.Option(help="Of a server that follows the trainer.")] = "http://127.0.0.1:30000",
    responses: Annotated[int, typer.Option(min=1, help="To each prompt.")] = 1,
    temperature: Annotated[float, typer.Option(min=0, help="That of the rollouts to come.")] = 1.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Of a response, at most.")] = 1024,
    at_once: Annotated[int, typer.Option(min=1, help="Requests in flight.")] = 64,
) -> None:
    """Warm a drafter up before any RL: sample responses that are dropped, while the trainer learns from them."""
    from tlt_client import SamplingParams

    from tlt_server.trainer.data.replay import read, replay

    params = SamplingParams(temperature=temperature, max_new_tokens=max_new_tokens)
    for replayed in replay(url, read(prompts), responses, params, at_once):
        _out.print(str(replayed))


@app.command()
def bench(
    url: Annotated[str, typer.Option(help="Of the running server.")] = "http://127.0.0.1:30000",
    prompts: Annotated[Path | None, typer.Option(help='JSON lines, {"prompt": "text"}; else sums to work out.')] = None,
    concurrency: Annotated[str, typer.Option(help="Requests in flight, as in 1,8,32.")] = "1,8",
    seconds: Annotated[float, typer.Option(help="That each strategy has at each of them in a round.")] = 5.0,
    rounds: Annotated[int, typer.Option(min=1, help="Figures are medians over these.")] = 3,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Of a response, at most.")] = 1024,
    temperature: Annotated[float, typer.Option(min=0, help="That of your rollouts.")] = 1.0,
    top_p: Annotated[float, typer.Option(min=1e-6, max=1, help="Likewise.")] = 1.0,
    arms: Annotated[bool, typer.Option(help="Measure each arm by itself, too.")] = True,
    json: Annotated[Path | None, typer.Option(help="File for the figures.")] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="Of the server; or TLT_API_KEY.")] = None,
    admin_api_key_file: Annotated[Path | None, typer.Option(help="Likewise; or TLT_ADMIN_API_KEY.")] = None,
) -> None:
    """Say what speculation is worth on a running server: plain decoding against the bandit, and each arm."""
    from tlt_client import SamplingParams

    from tlt_server.bench.plan import Plan, counts
    from tlt_server.bench.run import run
    from tlt_server.demo.task import problems
    from tlt_server.trainer.data.replay import read

    asked = read(prompts) if prompts else [problem.prompt for problem in problems(64, seed=0)]
    sampling = SamplingParams(temperature=temperature, top_p=top_p, max_new_tokens=max_new_tokens)
    plan = Plan(url=url, prompts=asked, sampling=sampling, loads=counts(concurrency), seconds=seconds, rounds=rounds)
    keys = Keys.read(api_key_file, admin_api_key_file)
    run(plan, keys, _out, ["tlt-server", *sys.argv[1:]], json, arms=arms)


@app.command()
def top(
    url: Annotated[str, typer.Argument(help="Of a server, or of a fleet.")] = "http://127.0.0.1:30000",
    once: Annotated[bool, typer.Option("--once", help="Print one frame and exit.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two reads.")] = 2.0,
    api_key_file: Annotated[Path | None, typer.Option(help="Of the server; or TLT_API_KEY.")] = None,
) -> None:
    """Watch a server, or a fleet, in the terminal; in a browser, at /tlt/ of it. q ends."""
    from tlt_server.watch import top as watch

    show = watch.once if once else watch.top
    show(url, Keys.read(api_key_file, None).api, Console(highlight=False), interval)


@app.command()
def demo(
    part: Annotated[Part, typer.Option(help="speculation: off and on, compared; loop: RL and both trainers.")] = "both",
    problems: Annotated[int, typer.Option(min=1, help="Of speculation; each is answered 8 times.")] = 16,
    steps: Annotated[int, typer.Option(min=1, help="Of RL.")] = 10,
    json: Annotated[Path | None, typer.Option(help="File for the figures.")] = None,
    plot: Annotated[Path, typer.Option(help="File for the picture of the loop.")] = Path("demo.png"),
) -> None:
    """Serve the embedded model with speculation off and on; then train it by RL, and a drafter with it."""
    from tlt_server import results
    from tlt_server.demo.parts import run
    from tlt_server.fork.status import require_fork

    require_fork()
    if json:
        results.require_place(json)
    if part != "speculation":
        results.require_place(plot, "--plot")
    figures, faults = run(part, problems, steps, plot, _out)
    if json:
        results.write(results.measured_here("demo", ["tlt-server", *sys.argv[1:]], figures), json)
        _out.print(f"figures written to {json}")
    if faults:
        raise DemoFailed("; ".join(faults))


def read_config(
    path: Path | None,
    drafter: str | None = None,
    arms: Sequence[str] | None = None,
    trainer: str | None = None,
    **others: Any,
) -> ServerConfig:
    """Our settings: the file's, overridden by the flags that were given; `others` need no parsing."""
    import msgspec

    from tlt_server.config import read_toml

    config = read_toml(path, ServerConfig) if path else ServerConfig()
    given = {
        "drafter": drafter,
        **_arms(arms or ()),
        "trainer": msgspec.structs.replace(config.trainer or Trainer(address=""), address=trainer) if trainer else None,
        **others,
    }
    return msgspec.structs.replace(config, **{name: value for name, value in given.items() if value is not None})


def _arms(given: Sequence[str]) -> dict[str, Any]:
    """The settings that `--arm` makes. ConfigError: beside auto there is another drafter's arm."""
    arms = tuple(Arm.parse(text) for text in given if text != AUTO)
    if AUTO not in given:
        return {"arms": arms or None}
    if drafted := [str(arm) for arm in arms if not arm.of_history]:
        raise ConfigError(
            f"--arm auto beside {', '.join(drafted)}: it finds the drafter's arms; history:7 may be beside"
        )
    return {"arms": AUTO, "auto_history": tuple(arm.num_steps for arm in arms)}


def main() -> None:
    """The entry point: an error of ours is one line and its exit code, anything else a traceback."""
    said = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        _, secrets = taken_out(sys.orig_argv)
        for flag in (flag for flag, name in FLAGS.items() if name in secrets):
            said.print(f"tlt-server: {flag}: all users of this machine could read it; set {FLAGS[flag]} instead")
        hide(sys.orig_argv)
        app()
    except TltError as error:
        said.print(f"tlt-server: {error}", markup=False)
        sys.exit(error.exit_code)
