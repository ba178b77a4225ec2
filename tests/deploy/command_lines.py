"""Command lines as the programs themselves read them: what a manifest says is what the parser takes."""

import argparse
import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import typer

from tlt_server import cli
from tlt_server.config import ServerConfig
from tlt_server.trainer.config import TrainConfig


class Serve(NamedTuple):
    """config: ours. sglang: SGLang's flags, parsed. insecure: whether others may get in."""

    config: ServerConfig
    sglang: argparse.Namespace
    insecure: bool


class Fleet(NamedTuple):
    """own: its options, by name; a list of members. serve: what is left for each server."""

    own: dict[str, Any]
    serve: Serve


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


@functools.cache
def _sglang() -> argparse.ArgumentParser:
    from sglang.srt.server_args import ServerArgs

    parser = _Parser(allow_abbrev=False, add_help=False)
    ServerArgs.add_cli_args(parser)
    return parser


def _commands() -> dict[str, Any]:
    commands: dict[str, Any] = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
    return commands


def interpolated(text: str, variables: Mapping[str, str]) -> str:
    """What Compose makes of ${NAME}, ${NAME:-default}; nothing else of it is used here."""
    return re.sub(r"\$\{(\w+)(?::-([^}]*))?\}", lambda found: variables.get(found[1]) or found[2] or "", text)


def parsed(words: Sequence[str], files: Mapping[str, Path]) -> Serve | TrainConfig | Fleet:
    """Of `tlt-server ...`. files: what lies at paths of the container. Raises what the parser raises, ValueError for
    an unknown flag, ConfigError for a value that cannot be."""
    program, command, *rest = words
    assert program == "tlt-server", words
    return {"serve": serve, "train": train, "fleet": fleet}[command](rest, files)


def serve(words: Sequence[str], files: Mapping[str, Path]) -> Serve:
    context = _commands()["serve"].make_context("serve", list(words))
    given = dict(context.params)
    path, insecure = given.pop("tlt_config"), given.pop("insecure")
    assert not given.pop("api_key_file"), "by TLT_API_KEY: a file must be its reader's alone"
    assert not given.pop("admin_api_key_file"), "likewise"
    config = cli.read_config(
        path and files[str(path)], given.pop("drafter"), given.pop("arm"), given.pop("trainer"), **given
    )
    return Serve(config, _sglang().parse_args(["--model-path", "embedded", *context.args]), insecure)


def train(words: Sequence[str], files: Mapping[str, Path]) -> TrainConfig:
    given = dict(_commands()["train"].make_context("train", list(words)).params)
    path = given.pop("tlt_config")
    return TrainConfig.read(path and files[str(path)], given, {"target": "embedded"})


def fleet(words: Sequence[str], files: Mapping[str, Path]) -> Fleet:
    context = _commands()["fleet"].make_context("fleet", list(words))
    own = {**context.params, "member": list(context.params["member"] or ())}
    return Fleet(own, serve(context.args, files))
