"""`tlt-server fork`: what its commands take, and say."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(no_args_is_help=True, help="Make, install and check our build of SGLang.")
_out = Console(highlight=False, soft_wrap=True)


@app.command("build")
def build(
    out: Annotated[Path, typer.Option(help="Folder for the wheel.")],
    python: Annotated[str | None, typer.Option(help="Python version to build for, as in 3.12.")] = None,
    wheel: Annotated[Path | None, typer.Option(help="The pristine wheel, instead of downloading it.")] = None,
) -> None:
    """Build the fork's wheel from the pristine SGLang and our patches."""
    from tlt_server.fork.build import build_fork

    built = build_fork(out, python, wheel)
    _out.print(f"{built.wheel} {'built' if built.fresh else 'was there already'}")


@app.command("install")
def install(
    extra: Annotated[str | None, typer.Option(help="gpu: with everything that SGLang needs on a GPU.")] = None,
    wheel: Annotated[Path | None, typer.Option(help="The pristine wheel, instead of downloading it.")] = None,
) -> None:
    """Build the fork for this Python and install it into this environment."""
    from tlt_server.fork.install import install_fork
    from tlt_server.fork.status import check as installed

    done = install_fork(extra, pristine=wheel)
    _out.print(installed().message + ("" if done else " already"))


@app.command("check")
def check() -> None:
    """Say which SGLang is installed; exit with 0 only for the fork."""
    from tlt_server.fork.status import require_fork

    _out.print(require_fork().message)
