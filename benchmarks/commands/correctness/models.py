"""Which families of models are drafted for; which published forms of drafters are served, exchanged, trained, exported?

    python -m benchmarks models --json benchmarks/results/models.cpu2.json

Of each family (models/families.py, models/heads.py) a tiny checkpoint is served, plainly and with each kind of drafter;
greedy answers to 20 prompts must be transformers' before and after updates of target and drafter.

The embedded drafters are written as others would publish them (models/formats.py). Each is served, and must answer as a
server without a drafter does, token for token at temperature 0; is exchanged for itself while the server runs, and must
again; is what a trainer could begin with, and is exported by; and is exported for vLLM and speculators, and read again.
One that is refused must be told why. A drafter that could guess, and whose tokens a verify pass are fewer than 1.2, is
silently useless.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import httpx
from rich.markdown import Markdown

from benchmarks.lib.command import Models, out, run
from benchmarks.lib.servers import Request, Server, tokens_of
from benchmarks.lib.tables import table
from benchmarks.models.families import DRAFTED, FAMILIES, draft_and_update, serve_and_update
from benchmarks.models.formats import FORMATS, REFUSED, TARGET, UNTRAINED
from benchmarks.models.heads import GLM, MIMO, follow
from tlt_server import results
from tlt_server.config import DrafterForm, DrafterKind
from tlt_server.demo.lossless import Tokens
from tlt_server.drafter.export import Exported, export
from tlt_server.drafter.published import read
from tlt_server.errors import ConfigError, ServerFailed
from tlt_server.process import running_server, tail
from tlt_server.results import Figures, Result
from tlt_server.trainer.publish.folder import load_drafter

MEASURES = ("tlt_server/drafter", "tlt_server/trainer/publish", "tlt_server/engine/weights")
PROMPTS, TOKENS, SMOKE = 20, 48, 3
LEAST = 1.2
"""Tokens a verify pass of chain 3: a drafter that guesses wrong always has 1."""
WORKS, REFUSES, CRASH, USELESS, DIFFERS = "works", "refused", "crash", "useless", "differs"
FORMS = (DrafterForm.VLLM, DrafterForm.SPECULATORS)
CELLS = ("served", "exchanged", "trained", "exported", *FORMS)


class Served(NamedTuple):
    """What became of a form: of being served and exchanged, in words, and tokens a verify pass."""

    served: str
    exchanged: str
    accept_length: float | None = None


def serve(folder: Path, wanted: Sequence[Tokens], requests: Sequence[Request], log: Path, *, guesses: bool) -> Served:
    """One server with the drafter in a folder; `wanted`: the answers without one."""
    try:
        with running_server(["--model-path", str(TARGET), "--drafter", str(folder), "--arm", "3,1,4"], log) as url:
            server = Server(url, 0.0)
            with server.http:
                first, accept_length = _asked(server, wanted, requests, guesses=guesses)
                answer = server.http.post(f"{url}/tlt/v1/drafter/update", json={"path": str(folder)})
                if answer.is_error:
                    return Served(first, REFUSES if answer.status_code < 500 else CRASH, accept_length)
                return Served(first, _asked(server, wanted, requests, guesses=guesses)[0], accept_length)
    except ServerFailed:
        refused = "Traceback" not in tail(log)
        return Served(REFUSES if refused else CRASH, "")


def _asked(
    server: Server, wanted: Sequence[Tokens], requests: Sequence[Request], *, guesses: bool
) -> tuple[str, float | None]:
    answers = server.ask(requests, at_once=4)
    if server.failed:
        return CRASH, None
    made = [each["meta_info"] for each in answers if each]
    if [tokens_of(each) for each in answers if each] != list(wanted):
        return DIFFERS, None
    accept_length = sum(each["completion_tokens"] - 1 for each in made) / sum(each["spec_verify_ct"] for each in made)
    return USELESS if guesses and accept_length < LEAST else WORKS, accept_length


def train(folder: Path, scratch: Path) -> tuple[str, str]:
    """Whether a trainer can begin with a drafter; whether what it writes is read as it lies there, and is the same."""
    try:
        drafter = load_drafter(folder)
    except ConfigError:
        return REFUSES, ""
    drafter.export(scratch, {"target": "embedded"})
    again = read(scratch)
    same = not again.changed and all(
        again.tensors()[name].equal(each) for name, each in drafter.weights().items() if name in again.names
    )
    return WORKS, WORKS if same else DIFFERS


def export_as(form: DrafterForm, folder: Path, scratch: Path) -> str:
    """Whether what a drafter is exported to is read as the same drafter."""
    try:
        drafter = Exported.of(read(folder))
        export(drafter, form, scratch, str(TARGET))
    except ConfigError:
        return REFUSES
    again = read(scratch).tensors()
    return WORKS if all(again[name].equal(each) for name, each in drafter.tensors.items()) else DIFFERS


def family_rows(scratch: Path, *, smoke: bool) -> dict[str, dict[str, str]]:
    """Cells by family. plain: without a drafter, or one that has learnt nothing; then by kind of drafter."""
    rows: dict[str, dict[str, str]] = {}
    for family in FAMILIES[: SMOKE if smoke else None]:
        plain = _made(partial(serve_and_update, family), scratch / family)
        rows[family] = {"plain": plain} | dict.fromkeys(DrafterKind, REFUSES if plain == WORKS else "")
        out.print(f"{family}: {', '.join(rows[family].values())}")
    for family, kind in DRAFTED[: SMOKE if smoke else None]:
        cell = _made(partial(draft_and_update, family, kind), scratch / f"{family}-{len(kind)}")
        others = [each for each in DrafterKind if (family, each) not in DRAFTED]
        row = rows.setdefault(family, {"plain": cell} | dict.fromkeys(others, REFUSES if cell == WORKS else ""))
        row[kind] = cell
        out.print(f"{family}, {kind}: {cell}")
    for family in (MIMO, GLM)[: 1 if smoke else None]:
        rows.setdefault(family, {})["mtp"] = _made(partial(follow, family), scratch / f"{family}-mtp")
        out.print(f"{family}, mtp: {rows[family]['mtp']}")
    return rows


def _made(work: Callable[[Path], None], folder: Path) -> str:
    folder.mkdir()
    try:
        work(folder)
    except AssertionError as error:
        out.print(f"{folder.name}: {str(error).partition(chr(10))[0] or 'not what transformers says'}")
        return DIFFERS
    except (ServerFailed, httpx.HTTPError) as error:
        out.print(f"{folder.name}: {str(error).partition(chr(10))[0]}")
        return CRASH
    return WORKS


def family_figures(rows: Mapping[str, Mapping[str, str]]) -> Figures:
    """Counts over all families."""
    kinds = ("plain", *DrafterKind, "mtp")
    return {"families": len(rows)} | {
        f"families_{kind}": sum(row.get(kind) == WORKS for row in rows.values()) for kind in kinds
    }


def figures(
    found: Mapping[str, Mapping[str, str]],
    accepted: Mapping[str, float | None],
    families: Mapping[str, Mapping[str, str]],
) -> Figures:
    """Counts over all forms, and over all families."""
    cells = [cell for row in (*found.values(), *families.values()) for cell in row.values()]
    made: Figures = {f"formats_{what}": sum(row[what] == WORKS for row in found.values()) for what in CELLS}
    made |= {"formats": len(found), "formats_refused": sum(row["served"] == REFUSES for row in found.values())}
    made |= {"crashes": cells.count(CRASH), "silently_useless": cells.count(USELESS), "differs": cells.count(DIFFERS)}
    made |= family_figures(families)
    lengths = [each for each in accepted.values() if each is not None]
    return made | {"accept_length_min": min(lengths), "accept_length_max": max(lengths)} if lengths else made


def formats(scratch: Path, *, smoke: bool) -> tuple[dict[str, dict[str, str]], dict[str, float | None]]:
    """Cells by form, and tokens a verify pass of those whose numbers can guess."""
    params = {"temperature": 0.0, "max_new_tokens": TOKENS, "ignore_eos": True}
    requests: list[Request] = [(prompt, params) for prompt in Models(TARGET, TARGET).prompts(PROMPTS)]
    found: dict[str, dict[str, str]] = {}
    accepted: dict[str, float | None] = {}
    with running_server(["--model-path", str(TARGET), "--no-speculation"], scratch / "plain.log") as url:
        server = Server(url, 0.0)
        with server.http:
            wanted = [tokens_of(each) for each in server.ask(requests, at_once=4) if each]
    for number, name in enumerate(list(FORMATS)[: SMOKE if smoke else None]):
        folder = scratch / f"published-{number}"
        FORMATS[name](folder)
        guesses = name not in UNTRAINED
        served = serve(folder, wanted, requests, scratch / f"{number}.log", guesses=guesses)
        trained, exported = train(folder, scratch / f"exported-{number}")
        others = [export_as(form, folder, scratch / f"{form}-{number}") for form in FORMS]
        cells = (served.served, served.exchanged, trained, exported, *others)
        found[name] = dict(zip(CELLS, cells, strict=True))
        accepted[name] = served.accept_length if guesses else None
        out.print(f"{name}: {', '.join(filter(None, cells))}")
    return found, accepted


def measure(arguments: argparse.Namespace, argv: Sequence[str]) -> Result:
    with TemporaryDirectory(prefix="tlt-models-") as place:
        families = family_rows(Path(place), smoke=arguments.smoke)
        found, accepted = formats(Path(place), smoke=arguments.smoke)
    made = figures(found, accepted, families)
    result = results.measured_here("models", ["python", "-m", "benchmarks", "models", *argv], made)
    kinds = ("plain", *DrafterKind, "mtp")
    drafted = [[family, *(row.get(kind, "") for kind in kinds)] for family, row in families.items()]
    out.print(Markdown(table(["family", *kinds], drafted)))
    rows = [
        [name, *row.values(), "" if (length := accepted[name]) is None else f"{length:.2f}"]
        for name, row in found.items()
    ]
    out.print(Markdown(table(["published as", *CELLS, "tokens a pass"], rows)))
    if surprising := [name for name, row in found.items() if (row["served"] == REFUSES) != (name in REFUSED)]:
        raise ServerFailed(f"{surprising[0]}: {found[surprising[0]]['served']}, which is not what is said of it")
    if wrong := [name for name, row in families.items() if {CRASH, DIFFERS} & {*row.values()}]:
        raise ServerFailed(f"{wrong[0]}: {', '.join(families[wrong[0]].values())}")
    return result


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks models", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="keeps the figures")
    parser.add_argument("--smoke", action="store_true", help="the first families and forms alone")
    arguments = parser.parse_args(argv)
    run("models", arguments, lambda: measure(arguments, argv))
