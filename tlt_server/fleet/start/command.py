"""The command line of a fleet."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tlt_server.keys import Keys

SETTINGS: dict[str, Any] = {
    "context_settings": {
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": ["--help"],
    },
    "epilog": "Every flag of `tlt-server serve` works too, for the replicas.",
}
"""As typer's `command` takes them."""
_out = Console(highlight=False, soft_wrap=True)


def fleet(
    context: typer.Context,
    replicas: Annotated[int, typer.Option(min=0, help="Servers to start, by Ray Serve.")] = 0,
    address: Annotated[str | None, typer.Option(help="Ray cluster to start them on; else one of this machine.")] = None,
    gpus: Annotated[float | None, typer.Option(min=0, help="Of each; as many as it has ranks.")] = None,
    member: Annotated[list[str] | None, typer.Option(help="URL of a server that runs already; several.")] = None,
    host: Annotated[str, typer.Option(help="Where the fleet listens.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Likewise.")] = 30000,
    min_ready: Annotated[int, typer.Option(min=1, help="Members without which requests wait.")] = 1,
    router: Annotated[str | None, typer.Option(help="URL of an sglang-router to tell of ready members.")] = None,
    keeper: Annotated[str | None, typer.Option(help="URL of a `tlt-server keeper`, which trainers send to.")] = None,
    state_dir: Annotated[Path | None, typer.Option(help="Of the log, by which a front starts anew; else made.")] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="What clients must show; or TLT_API_KEY.")] = None,
    admin_api_key_file: Annotated[Path | None, typer.Option(help="For changes; or TLT_ADMIN_API_KEY.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Serve though others may get in.")] = False,
) -> None:
    """Run several servers behind one URL, which any trainer takes for one."""
    from tlt_server.fleet.front import Beside
    from tlt_server.fleet.start.run import Wanted, run

    wanted = Wanted(
        replicas=replicas,
        address=address,
        gpus=gpus,
        serve=context.args,
        members=member or (),
        host=host,
        port=port,
        min_ready=min_ready,
        state=state_dir,
        beside=Beside(router and router.rstrip("/"), keeper and keeper.rstrip("/")),
        insecure=insecure,
    )
    run(wanted, Keys.read(api_key_file, admin_api_key_file), lambda line: _out.print(line, markup=False))
