"""Does a server with several arms answer as one without, whatever arm each step has, and what does each arm cost?

    python -m benchmarks switching --models models/7b --logs logs/switching --json switching.json

One server with four arms. Greedy problems are answered with speculation off, then with an arm drawn for each step, then
by the bandit; where two answers part, the target in float32 says whether it was a tie. Then each arm is pinned, and
off, at several batch sizes. Then each step draws one of two arms: what all steps take, over those in a row with one
arm, tells what switching costs. The server's log says what graphs take, and which steps ran without them.
With --ranks 2 it is one server on two GPUs, and --steps 10000 goes on drawing arms for so many steps: were the ranks a
step apart, they would wait for each other for ever.
"""

import argparse
import itertools
import re
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import torch
from msgspec import to_builtins
from rich.console import Console

from benchmarks.lib import command, tables
from benchmarks.lib.command import Models, parser, positive
from benchmarks.lib.divergences import divergence_figures, divergences
from benchmarks.lib.draining import DecodeStep, decode_steps, switching_ms
from benchmarks.lib.servers import GPU_FLAGS, GRAPH_SIZES, Request, Server, logging_steps, tokens_of
from benchmarks.lib.sides import name_of, on_ranks
from benchmarks.lib.strategies import any_arm, strategy
from tlt_server.config import Arm
from tlt_server.demo.lossless import Tokens
from tlt_server.demo.reference import Reference
from tlt_server.engine.decode.steplog import read_steps
from tlt_server.engine.graphs.capture import sizes_of
from tlt_server.launch import has_gpu
from tlt_server.process import running_server
from tlt_server.results import Figures, Result

MEASURES = ("tlt_server/engine/decode", "tlt_server/engine/graphs", "tlt_server/strategy")
ARMS = (Arm(3, 1, 4), Arm(7, 1, 8), Arm(5, 4, 16), Arm(8, 4, 48))
BATCHES = (1, 4, 8, 32, 128)
PAIRS = (
    ("switching_ms", ARMS[:2]),
    ("switching_ms", ARMS[1:3]),
    ("switching_ms_off", (None, ARMS[0])),
    ("switching_ms_off", (None, ARMS[1])),
)
PAIRED = 8  # requests at once, while one of two arms is drawn for each step
_out = Console(highlight=False, soft_wrap=True)


def described(arm: Arm | None) -> dict[str, int] | None:
    """An arm as HTTP knows it."""
    names = ("num_steps", "topk", "num_draft_tokens")
    return None if arm is None else {name: getattr(arm, name) for name in names}


def limits() -> dict[Arm, int]:
    """The largest batch that each arm is captured for; on a CPU, that the server runs."""
    return {arm: sizes_of(arm, GRAPH_SIZES)[-1] if has_gpu() else 32 for arm in ARMS}


def lottery(server: Server) -> None:
    """From now on each step draws its arm among those that were captured for its batch size."""
    strategy(server, **to_builtins(any_arm(limits(), GRAPH_SIZES[-1] if has_gpu() else 32)))


def pulls(server: Server) -> dict[str, int]:
    """Steps that counted, by arm."""
    selection = server.http.get(f"{server.url}/tlt/v1/strategy").raise_for_status().json()["selection"]
    found: dict[str, int] = {}
    for bucket in selection["buckets"]:
        for each in bucket["arms"]:
            arm = "off" if each["arm"] is None else "{num_steps},{topk},{num_draft_tokens}".format(**each["arm"])
            found[f"{arm} from {bucket['first']}"] = each["pulls"]
    return found


def answers(server: Server, prompts: Sequence[Tokens], length: int, at_once: int) -> list[Tokens]:
    requests: list[Request] = [(prompt, {"temperature": 0, "max_new_tokens": length}) for prompt in prompts]
    return [tokens_of(each) if each else () for each in server.ask(requests, at_once=at_once)]


def compare(server: Server, models: Models, prompts: Sequence[Tokens], length: int) -> Figures:
    """Greedy answers with speculation off, one by one and at once; with arms drawn; by the bandit."""
    at_once = min(32, len(prompts))
    strategy(server, mode="off")
    truth = answers(server, prompts, length, at_once)
    given = {"control": answers(server, prompts, length, max(1, at_once // 2))}
    lottery(server)
    given["lottery"] = answers(server, prompts, length, at_once)
    _out.print(f"lottery: pulls {pulls(server)}")
    strategy(server, mode="bandit")
    given["bandit"] = answers(server, prompts, length, at_once)
    _out.print(f"bandit: pulls {pulls(server)}")
    target = Reference(models.target, torch.float32, "cuda" if has_gpu() else "cpu")
    figures: Figures = {"greedy_responses": len(prompts)}
    for name, each in given.items():
        found = divergences(target, prompts, truth, each)
        figures |= divergence_figures(name, found)
        _out.print(f"{name}: {len(found)} of {len(prompts)} part, {sum(not one.tie for one in found)} of them no tie")
    return figures


def cost(server: Server, prompts: Sequence[Tokens], batch: int, arm: Arm | None, length: int) -> Figures:
    """Milliseconds of a step and accept length, of an arm alone at one batch size."""
    if arm is None:
        strategy(server, mode="off")
    else:
        strategy(server, mode="pinned", pinned=described(arm))
    before = server.counts()
    params = {"temperature": 1, "max_new_tokens": length, "ignore_eos": True}
    began = time.perf_counter()
    server.ask([(prompt, params) for prompt in prompts[:batch]], at_once=batch, together=batch)
    took, after = time.perf_counter() - began, server.counts()
    drafts = after.drafts - before.drafts
    accept = 1 + (after.accepted_tokens - before.accepted_tokens) / drafts if drafts else 1.0
    name = f"{'off' if arm is None else name_of(arm)}_batch_{batch}"
    tokens_s = batch * length / took
    return {
        f"tokens_s_{name}": tokens_s,
        f"accept_length_{name}": accept,
        f"step_ms_{name}": 1e3 * accept * batch / tokens_s,
    }


def costs(server: Server, prompts: Sequence[Tokens], smoke: bool) -> Figures:
    """Of each arm where it was captured, and of off."""
    figures: Figures = {}
    for batch, arm in itertools.product((1, 4) if smoke else BATCHES, (None, *ARMS)):
        if arm is None or batch <= limits()[arm]:
            found = cost(server, prompts, batch, arm, 32 if smoke else 256)
            _out.print("  ".join(f"{name} {value:.2f}" for name, value in found.items()))
            figures |= found
    return figures


def drawn_of_two(server: Server, prompts: Sequence[Tokens], step_log: Path, length: int) -> Figures:
    """What a switch adds between two arms; and to off or from it, what the drafter reads then included."""
    params = {"temperature": 1, "max_new_tokens": length, "ignore_eos": True}
    found: dict[str, list[DecodeStep]] = {}
    for name, pair in PAIRS:
        drawn = {"first": 1, "arms": [described(arm) for arm in pair]}
        strategy(server, mode="paper", epsilon=1.0, buckets=[drawn, {"first": PAIRED + 1, "arms": [None]}])
        since = step_log.stat().st_size
        server.ask([(prompt, params) for prompt in prompts[:PAIRED]], at_once=PAIRED, together=PAIRED)
        found.setdefault(name, []).extend(decode_steps(read_steps(step_log, since)))
    taken = {name: switching_ms(steps) for name, steps in found.items()}
    return {name: value for name, value in taken.items() if value is not None}


def endure(server: Server, prompts: Sequence[Tokens], steps: int, step_log: Path) -> Figures:
    """Batches drain with an arm drawn for each step, for so many decode steps.

    Raises:
        RuntimeError: a request failed.
    """
    lottery(server)
    params = [{"temperature": 1, "max_new_tokens": 16 + 8 * i, "ignore_eos": True} for i in range(len(prompts))]
    done = switched = 0
    while done < steps:
        since = step_log.stat().st_size
        server.ask(list(zip(prompts, params, strict=True)), at_once=len(prompts))
        arms = [step.arm for step in read_steps(step_log, since) if step.decode]
        done, switched = done + len(arms), switched + sum(one != other for one, other in itertools.pairwise(arms))
        _out.print(f"{done} of {steps} steps, {switched} of them with another arm than the one before")
        if server.failed:
            raise RuntimeError(f"{server.failed} of {server.requests} requests failed after {done} steps")
    return {"drawn_steps": done, "switched_steps": switched}


def said(log: Path) -> Figures:
    """What the log tells: memory of graphs, decode lines without a graph, tracebacks."""
    text = log.read_text(errors="replace")
    for line in text.splitlines():
        if "captured " in line or "Capture " in line:
            _out.print(line[-160:])
    gib = [float(found) for found in re.findall(r"captured .*?: ([\d.]+) GiB", text)]
    lines = [line for line in text.splitlines() if "Decode batch" in line]
    for start in [found.start() for found in re.finditer("Traceback", text)][:2]:
        _out.print(text[start : start + 4000])
    without = sum("graph: True" not in line for line in lines)
    return {"graphs_gib": sum(gib), "logged_batches": len(lines), "logged_batches_without_graph": without}


def measured(models: Models, logs: Path, arguments: argparse.Namespace) -> Figures:
    """All figures."""
    prompts = models.prompts(16 if arguments.smoke else 128)
    log, figures = logs / "switching.log", Figures()
    step_log = logs / "steps.jsonl"
    flags = ["--model-path", str(models.target), "--drafter", str(models.drafter), "--decode-log-interval", "10"]
    flags += [*logging_steps(step_log), *on_ranks(arguments.ranks)]
    for arm in ARMS:
        flags += ["--arm", f"{arm.num_steps},{arm.topk},{arm.num_draft_tokens}"]
    began = time.monotonic()
    try:
        with running_server([*flags, *(GPU_FLAGS if has_gpu() else [])], log, start_timeout=500) as url:
            server = Server(url, time.monotonic() - began)
            figures["server_start_s"] = server.start_seconds
            figures |= compare(server, models, prompts[: 16 if arguments.smoke else 64], 48 if arguments.smoke else 256)
            figures |= costs(server, prompts, arguments.smoke)
            figures |= drawn_of_two(server, prompts, step_log, 192 if arguments.smoke else 768)
            figures |= endure(server, prompts[:64], arguments.steps, step_log) if arguments.steps else {}
            figures |= {"requests": server.requests, "failed_requests": server.failed}
    except (httpx.HTTPError, RuntimeError) as error:
        _out.print(f"the server failed: {error}")
        raise
    finally:
        if log.exists():
            figures |= said(log)
    return figures


def table(result: Result) -> str:
    """Milliseconds of a step by arm and batch size; then every figure that is of no arm."""
    figures = result.figures
    sizes = [size for size in BATCHES if f"step_ms_off_batch_{size}" in figures]
    steps = []
    for side in ("off", *map(name_of, ARMS)):
        steps.append(
            [tables.label(side), *tables.cells(figures, f"step_ms_{side}", [f"batch_{size}" for size in sizes])]
        )
    whole = [[name, f"{value:.6g}"] for name, value in figures.items() if "_batch_" not in name]
    shown = tables.table(["a step, ms", *(f"batch {size}" for size in sizes)], steps)
    return "\n\n".join((tables.origin(result), shown, tables.table(["figure", ""], whole)))


def main(argv: Sequence[str]) -> None:
    flags = parser("switching", __doc__, compares=False)
    flags.add_argument("--ranks", type=positive, default=1, metavar="N", help="GPUs of the server (default: 1)")
    flags.add_argument("--steps", type=positive, metavar="N", help="draws arms for so many steps more")
    command.main("switching", None, argv, measured, table, flags)
