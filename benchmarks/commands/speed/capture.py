"""What does it cost to send the target's hidden states to a drafter trainer, and are they the right ones?

    python -m benchmarks capture --json benchmarks/results/capture.h200.json
    python -m benchmarks capture --eagle3 --json benchmarks/results/capture_eagle3.h200.json

Three servers of one arm stand side by side and follow a trainer that only counts: `untapped` sends nothing, `default`
what the default budget allows, `everything` all there is. An overhead is the share by which a step takes longer than
the untapped server's, taken round by round: what is accepted differs from wave to wave, and costs nothing. Before that,
every state that a server sends is compared with transformers' of the same tokens; next to it stands how near the state
of the next position is, which tells what the comparison can see.
"""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import torch

from benchmarks.lib import command, tables
from benchmarks.lib.command import Models
from benchmarks.lib.comparison import PLAIN, Measured, measure, totals
from benchmarks.lib.decoding import Load
from benchmarks.lib.servers import Answer
from benchmarks.lib.sides import Side, Site, awake, side_by_side
from benchmarks.lib.training.learner import Learner, states
from tlt_server.config import Arm
from tlt_server.demo.lossless import Tokens
from tlt_server.demo.reference import Reference
from tlt_server.launch import has_gpu
from tlt_server.preflight import read_config
from tlt_server.process import free_port
from tlt_server.results import Figures, Result

MEASURES = ("tlt_server/engine/features", "tlt_server/link", "tlt_server/wire")
ARM = Arm(3, 1, 4)
FEATURES = {PLAIN: "on = false", "default": "", "everything": "budget_mb_s = 1e9"}
"""Of each side; the one that others are compared with has the name that comparisons know."""
TOKENS = 256
NEXT = "cosine_of_next_median"
ALIKE = 0.98
"""Least cosine of a right state: bfloat16 adds up otherwise in a batch than alone."""


@contextmanager
def followed(logs: Path) -> Iterator[tuple[dict[str, Side], Learner]]:
    """The sides, by name, and who listens to them."""
    address = f"tcp://127.0.0.1:{free_port()}"
    sides = {}
    for name, features in FEATURES.items():
        config = logs / f"{name}.toml"
        trainer = f'address = "tcp://127.0.0.1:{free_port()}"\nfeatures = "{address}"\nserver = "{name}"\n'
        config.write_text(f"[trainer]\n{trainer}[features]\n{features}\n")
        sides[name] = Side(name, ARM, flags=("--tlt-config", str(config)))
    with Learner(address, keeps=False) as learner:
        yield sides, learner


def measured(models: Models, logs: Path, arguments: argparse.Namespace) -> Figures:
    """All figures of the table."""
    models = models.with_eagle3() if arguments.eagle3 else models
    batches = (1, 8) if arguments.smoke else (1, 32, 128) if has_gpu() else (1, 4, 8)
    prompts = models.prompts(max(batches))
    loads = [Load(f"batch_{batch}", prompts[:batch], 64 if arguments.smoke else TOKENS) for batch in batches]
    site = Site(models.target, models.drafter, logs, batches, max(batches) * (TOKENS + 64), context=2048)
    with followed(logs) as (sides, learner):
        figures = compared(models, sides["everything"], site, learner, prompts[: min(16, max(batches))])
        (found,) = measure([list(sides.values())], loads, site, rounds=1 if arguments.smoke else arguments.rounds)
        sent = {f"features_sent_{name}": learner.tokens[name] for name in FEATURES if name != PLAIN}
    return figures | overheads(found, loads) | sent | totals([found])


def overheads(found: Measured, loads: Sequence[Load]) -> Figures:
    """Of every side that sends, at every load; the rate of the one that does not."""
    figures: Figures = {}
    for load in loads:
        windows = [window for round_ in found.windows[PLAIN, load.name] for window in round_]
        if windows:
            figures[f"tokens_per_s_untapped_{load.name}"] = median(window.tokens_per_s for window in windows)
        for name in FEATURES:
            if name != PLAIN and (slower := found.slowdowns(name, load.name)):
                figures[f"capture_overhead_{name}_{load.name}"] = longer = median(slower)
                figures["capture_overhead_max"] = max(longer, figures.get("capture_overhead_max", longer))
                figures[f"capture_overhead_min_{name}_{load.name}"] = min(slower)
                figures[f"capture_overhead_max_{name}_{load.name}"] = max(slower)
    return figures


def compared(models: Models, side: Side, site: Site, learner: Learner, prompts: Sequence[Tokens]) -> Figures:
    """What a server sends of a batch of responses, beside what transformers computes."""
    learner.keeps = True
    with side_by_side([side], site) as servers, awake(servers[side.name]) as server:
        params = {"temperature": 1.0, "max_new_tokens": 96}
        answers = server.ask([(prompt, params) for prompt in prompts], at_once=len(prompts), together=len(prompts))
        given = [(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True) if answer is not None]
        for prompt, answer in given:
            learner.of(_rid(answer), set(range(len(prompt), len(prompt) + len(answer["output_ids"]) - 1)))
    learner.keeps = False
    gpu = has_gpu()
    reference = Reference(models.target, torch.bfloat16 if gpu else torch.float32, "cuda" if gpu else "cpu")
    own, next_, missing = [], [], 0
    for prompt, answer in given:
        tokens = [*prompt, *answer["output_ids"]]
        rows = {position: sent[0] for position, sent in learner.rows.get(_rid(answer), {}).items()}
        missing += len(set(range(answer["meta_info"]["cached_tokens"], len(tokens) - 1)) - rows.keys())
        final, lower = (each.float().cpu() for each in states(reference.model, tokens, _layers(models)))
        for position, row in rows.items():
            wanted = final if row.finals is None else lower
            own.append(_cosine(row.hidden, wanted[position]))
            own += [] if row.finals is None else [_cosine(row.finals, final[position])]
            next_.append(_cosine(row.hidden, wanted[(position + 1) % len(tokens)]))
    del reference
    if gpu:
        torch.cuda.empty_cache()  # the servers to come need it
    alike = {"cosine_min": min(own), NEXT: median(next_)} if own else {}
    return {"states": len(own), "missing_states": missing, "wrong_states": sum(each < ALIKE for each in own), **alike}


def _layers(models: Models) -> Sequence[int]:
    """Those that EAGLE-3's drafter reads."""
    known = read_config(models.drafter).get("eagle_config") or {}
    layers: Sequence[int] = known.get("eagle_aux_hidden_state_layer_ids", (0, 1, 2))
    return layers


def _rid(answer: Answer) -> str:
    return str(answer["meta_info"]["id"])


def _cosine(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(one.float(), other, dim=0))


def as_table(result: Result) -> str:
    """The figures as Markdown."""
    figures = result.figures
    loads = [name.removeprefix("tokens_per_s_untapped_") for name in figures if name.startswith("tokens_per_s_unt")]
    rows = [["untapped, tokens/s", *(f"{figures[f'tokens_per_s_untapped_{load}']:,.0f}" for load in loads)]]
    for side in (name for name in FEATURES if name != PLAIN):
        rows.append([f"longer: {side}", *(_longer(figures, f"{side}_{load}") for load in loads)])
    checked = (
        f"{figures['states']:,} states compared: {figures['wrong_states']} wrong, {figures['missing_states']} missing. "
        f"Least cosine {figures.get('cosine_min', 0):.4f}, the next position's {figures.get(NEXT, 0):.2f} (median)."
    )
    return "\n\n".join((tables.origin(result), tables.table(["", *loads], rows), checked))


def _longer(figures: Figures, cell: str) -> str:
    """An overhead, and the least and the most of a round; nothing where none was measured."""
    names = [f"capture_overhead_{end}{cell}" for end in ("", "min_", "max_")]
    if names[0] not in figures:
        return ""
    middle, least, most = (f"{100 * figures[name]:.1f}" for name in names)
    return f"{middle}% ({least} to {most})"


def main(argv: Sequence[str]) -> None:
    flags = command.parser("capture", __doc__)
    flags.add_argument("--eagle3", action="store_true", help="by the EAGLE-3 drafter, which reads three layers' states")
    command.main("capture", __doc__, argv, measured, as_table, flags)
