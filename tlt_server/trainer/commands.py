"""`tlt-server drafter`: make a drafter, look at one, write it for other engines."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tlt_server.config import DrafterForm, DrafterKind
from tlt_server.errors import ConfigError

Form = Annotated[DrafterForm, typer.Option(help="Whose names and config.")]
CardTarget = Annotated[str | None, typer.Option(help="For the model card; speculators' form needs it.")]
CardBench = Annotated[Path | None, typer.Option(help="What `tlt-server bench --json` found, for the model card.")]
app = typer.Typer(no_args_is_help=True, help="Make a drafter, look at one, or export one.")
_out = Console(highlight=False, soft_wrap=True)


@app.command("init")
def init(
    target: Annotated[str, typer.Option(help="Folder or hub name; docs/support.md has the families.")],
    out: Annotated[Path, typer.Option(help="The folder to make.")],
    kind: Annotated[DrafterKind, typer.Option(help="What to make.")] = DrafterKind.EAGLE,
    draft_vocab: Annotated[int | None, typer.Option(help="Tokens that an eagle3 knows; all by default.")] = None,
    token_counts: Annotated[Path | None, typer.Option(help='JSON, {"token id": count}, to choose them by.')] = None,
    seed: Annotated[int, typer.Option(help="Of the random weights.")] = 0,
) -> None:
    """Make a drafter of the right shape for a target, which has learnt nothing yet."""
    if (draft_vocab is None) != (token_counts is None):
        raise ConfigError("--draft-vocab and --token-counts: give both, or neither")
    from tlt_server.drafter.folder import create

    known = None if draft_vocab is None or token_counts is None else (draft_vocab, token_counts)
    config = create(target, out, kind, known, seed)
    _out.print(f"{out} made: {config.architectures[0]}, untrained")


@app.command("inspect")
def inspect(
    drafter: Annotated[str, typer.Argument(help="Folder or hub name.")],
    target: Annotated[str | None, typer.Option(help="Whether it fits this one: folder or hub name.")] = None,
    out: Annotated[Path | None, typer.Option(help="Writes it as SGLang names things, to this new folder.")] = None,
) -> None:
    """Say what a drafter's folder is, what of it is read otherwise than it lies there, whether it can be trained."""
    from tlt_server.drafter.folder import downloaded, write_as_served
    from tlt_server.drafter.published import read
    from tlt_server.preflight import check_fit, read_model_config
    from tlt_server.trainer.publish.folder import load_drafter

    found = read(downloaded(drafter))
    _out.print("\n".join(found.described()))
    if target is not None:
        check_fit(target, read_model_config("target", target), drafter, found.config)
        _out.print(f"target     fits {target}")
    try:
        load_drafter(found.folder)
        _out.print("training   can begin with it")
    except ConfigError as why:
        _out.print(f"training   cannot begin with it: {why}")
    if out is not None:
        write_as_served(found, out)
        _out.print(f"{out} made")


@app.command("export")
def export(
    drafter: Annotated[str, typer.Argument(help="Folder or hub name; in any form that `serve --drafter` takes.")],
    out: Annotated[Path, typer.Option(help="The folder to make.")],
    form: Form = DrafterForm.SGLANG,
    target: CardTarget = None,
    bench: CardBench = None,
) -> None:
    """Write a drafter for SGLang, vLLM or speculators, with a model card. `train export` writes a trainer's."""
    from tlt_server.drafter.card import from_bench
    from tlt_server.drafter.export import Exported
    from tlt_server.drafter.export import export as write
    from tlt_server.drafter.folder import downloaded
    from tlt_server.drafter.published import read

    found = read(downloaded(drafter))
    write(Exported.of(found), form, out, target, from_bench(bench) if bench else None)
    _out.print(f"{out} made, in {form}'s form")
