"""Every command of a page is one that CI runs, or one that its program's own parser takes, by routes that exist.

What only another machine can run says so above its block, `<!-- needs: gpu -->`; what can be parsed there is, too.
"""

import ast
import re
import shlex
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec
import pytest
import tlt_client
import typer
from typer.exceptions import TyperException

from benchmarks.lib.project.catalogue import commands
from tlt_server import cli
from tlt_server.config import ServerConfig
from tlt_server.trainer.config import TrainConfig

TOP = Path(__file__).parents[1]
PLACES = (
    "README.md",
    "benchmarks/README.md",
    "docs/**/*.md",
    "deploy/README.md",
    "examples/*/README.md",
    "patches/README.md",
    "tlt_server/*/*.md",
)
PAGES = sorted(page for place in PLACES for page in TOP.glob(place))
NEEDS = ("gpu", "docker", "kubernetes", "slurm", "the pristine wheel")
"""What a machine of CI has not."""
BLOCK = re.compile(
    r"(?:<!-- needs: (?P<needs>[^\n]+) -->\n)?^```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
LOOKS_LIKE_SHELL = re.compile(r"^(\$ |make |curl |docker |pip |pytest |python|tlt-|torchrun |\.venv/)", re.MULTILINE)
TRAINER_PORT = 30502
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Duplicate Operation ID"),
]  # it imports SGLang's routes


class Block(NamedTuple):
    """A fenced part of a page."""

    needs: str | None
    kind: str
    text: str


def blocks(page: str) -> list[Block]:
    return [Block(found["needs"], found["kind"], found["text"]) for found in BLOCK.finditer(page)]


def faults(block: Block) -> list[str]:
    """What is wrong with a block, a line each."""
    if block.needs is not None and block.needs not in NEEDS:
        return [f"needs: {block.needs}: one of {', '.join(NEEDS)}"]
    if block.kind == "sh":
        lines = block.text.replace("\\\n", " ").splitlines()
        found = [fault(shlex.split(line, comments=True), elsewhere=block.needs is not None) for line in lines]
        return [each for each in found if each]
    if block.kind == "python":
        return python_faults(block.text)
    if block.kind == "toml":
        return toml_faults(block.text)
    return ["commands in a block that is not `sh`"] if LOOKS_LIKE_SHELL.search(block.text) else []


def fault(words: Sequence[str], *, elsewhere: bool = False) -> str:
    """What is wrong with one command; empty if nothing is. elsewhere: this machine need not have its program."""
    words = [
        word for at, word in enumerate(words) if any("=" not in each for each in words[: at + 1])
    ]  # VARIABLE=value
    if not words:
        return ""
    name, args = Path(words[0]).name, list(words[1:])
    if name in ("python", "python3", "torchrun") and "-m" in args:
        return module_fault(args[args.index("-m") + 1], args[args.index("-m") + 2 :])
    check = {"make": make_fault, "curl": curl_fault, "tlt-server": tlt_server_fault, "tlt-grpo": tlt_grpo_fault}.get(
        name
    )
    if check is not None:
        return check(args)
    if name == "pytest":
        return next((f"pytest {each}: not there" for each in args if not (TOP / each).exists()), "")
    return "" if elsewhere else f"{name}: nothing here knows this command; say above its block what it needs"


def make_fault(args: Sequence[str]) -> str:
    targets = set(re.findall(r"^make (\w+)", (TOP / ".ci/run").read_text(), re.MULTILINE))
    variables = re.findall(r"^(\w+) \?=|\$\((?:if \$\()?(\w+)\)", (TOP / "Makefile").read_text(), re.MULTILINE)
    known = targets | {name for pair in variables for name in pair}
    return next((f"make {each}: not of CI" for each in args if each.partition("=")[0] not in known), "")


def module_fault(name: str, args: Sequence[str]) -> str:
    if name == "benchmarks":
        return f"python -m benchmarks {args[0]}: there is none" if args and args[0] not in commands() else ""
    if name == "tlt_server":
        return tlt_server_fault(args)
    if name in ("venv", "pip") or find_spec(name) is not None:
        return ""
    return f"python -m {name}: there is none"


def tlt_server_fault(args: Sequence[str]) -> str:
    command: Any = typer.main.get_command(cli.app)
    rest = list(args)
    while rest and rest[0] in getattr(command, "commands", {}):
        command = command.commands[rest.pop(0)]
    if rest and hasattr(command, "commands") and not rest[0].startswith("-"):
        return f"{command.name}: no command {rest[0]}"
    return parsing_fault(command, rest)


def tlt_grpo_fault(args: Sequence[str]) -> str:
    from tlt_grpo.cli import app

    return parsing_fault(typer.main.get_command(app), args)


def parsing_fault(command: Any, args: Sequence[str]) -> str:
    """What a command's own parser, and SGLang's of what that leaves over, say of arguments."""
    try:
        left = command.make_context(command.name, list(args)).args
    except TyperException as error:
        return f"{command.name}: {error}"
    if command.name == "fleet":  # the rest are its servers'
        return tlt_server_fault(["serve", *left])
    unknown = sglang_flags().parse_known_args(["--model-path", "m", *left])[1]
    return f"{command.name}: nobody knows {' '.join(unknown)}" if unknown else ""


@cache
def sglang_flags() -> Any:
    from argparse import ArgumentParser

    from sglang.srt.server_args import ServerArgs

    parser = ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    return parser


def curl_fault(args: Sequence[str]) -> str:
    given = dict(pairwise(args))
    url = next(urlsplit(f"//{each}" if "//" not in each else each) for each in args if "localhost" in each)
    method = given.get("-X", "POST" if "-d" in given else "GET")
    routes = trainer_routes() if url.port == TRAINER_PORT else server_routes()
    if method not in routes.get(url.path, ()):
        return f"curl: {method} {url.path}: no such route"
    try:
        msgspec.json.decode(given.get("-d", "{}"))
    except msgspec.DecodeError as error:
        return f"curl {url.path}: {error}"
    return ""


@cache
def server_routes() -> Mapping[str, set[str]]:
    """Methods by path."""
    from fastapi import FastAPI
    from sglang.srt.entrypoints.http_server import app

    from tlt_server.api.app import add_routes

    ours = FastAPI()
    add_routes(ours)
    return {path: {method.upper() for method in of} for path, of in app.openapi()["paths"].items()} | methods(ours)


@cache
def trainer_routes() -> Mapping[str, set[str]]:
    from tlt_server.trainer.status import _app

    return methods(_app(lambda: pytest.fail("nobody asks"), None))


def methods(app: Any) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for route in app.routes:
        found.setdefault(route.path, set()).update(route.methods)
    return found


def python_faults(text: str) -> list[str]:
    imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    names = [alias.name for node in imports if node.module == "tlt_client" for alias in node.names]
    return [f"tlt_client has no {name}" for name in names if not hasattr(tlt_client, name)]


def toml_faults(text: str) -> list[str]:
    found = []
    for settings in (TrainConfig, ServerConfig):
        try:
            msgspec.toml.decode(
                f'target = "t"\nfolder = "f"\n{text}' if settings is TrainConfig else text, type=settings
            )
        except msgspec.DecodeError as error:
            found.append(f"{settings.__name__}: {error}")
        else:
            return []
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(TOP)))
def test_what_a_page_says_to_run_can_be_run(page: Path) -> None:
    assert not [fault for block in blocks(page.read_text()) for fault in faults(block)]


def test_pages_have_commands() -> None:
    found = [block for page in PAGES for block in blocks(page.read_text())]
    assert sum(block.kind == "sh" for block in found) > 15
    assert {block.needs for block in found} == {None, *NEEDS}


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("make tea", "make tea: not of CI"),
        ("make demo TASTE=sweet", "make TASTE=sweet: not of CI"),
        (".venv/bin/tlt-server serve --armm 3,1,4", "nobody knows --armm 3,1,4"),
        (".venv/bin/tlt-server train --lossless", "No such option"),
        (".venv/bin/tlt-server fly", "no command fly"),
        ("python -m tlt_server drafter init --out x", "target"),
        ("OMP_NUM_THREADS=1 tlt-grpo --url u --model m", "out"),
        ("python -m benchmarks nothing", "there is none"),
        ("python -m tlt_server.gone", "there is none"),
        ("curl localhost:30000/tlt/v1/nothing", "GET /tlt/v1/nothing: no such route"),
        ("curl localhost:30502/tlt/v1/status", "no such route"),
        ("curl -X DELETE localhost:30000/tlt/v1/strategy", "DELETE /tlt/v1/strategy: no such route"),
        ("curl localhost:30000/generate -d '{'", "truncated"),
        ("pytest tests/gone", "not there"),
        ("brew install it", "nothing here knows this command"),
    ],
)
def test_a_command_that_cannot_be_run_is_found(command: str, said: str) -> None:
    [found] = faults(Block(None, "sh", f"{command}   # as it is\n"))
    assert said in found


def test_blocks_that_hide_commands_are_found() -> None:
    texts = [("", "make demo"), ("python", "from tlt_client import Gone"), ("toml", "nonsense = 1")]
    page = "<!-- needs: luck -->\n```sh\nmake demo\n```\n<!-- needs: gpu -->\n```sh\nbrew install it\n```\n"
    page += "".join(f"\n```{kind}\n{text}\n```\n" for kind, text in texts)
    assert [bool(faults(block)) for block in blocks(page)] == [True, False, True, True, True]
