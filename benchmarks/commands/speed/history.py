"""What do earlier responses give as drafts, and what does it cost to keep and look them up? No server, no GPU.

    python -m benchmarks history --json benchmarks/results/history.cpu2.json
    python -m benchmarks history --rollouts FILE    # JSON lines of prompt, tokens, epoch (0 or 1), as token ids
    python -m benchmarks history --drain --workload long --json benchmarks/results/history.h200.json

Costs are of the compiled index once its ring is full, in time of the processor, and of the plain one beside it. Values
are tokens that a target's pass would have given, by replaying responses of the embedded targets, or of a dump.

With --drain servers are started: groups of 16 responses, 128 at once and to natural ends, drain in two epochs by other
seeds. Plain decoding; history alone on a server without a drafter; and the bandit without history and with it, on one
whose drafter is fresh, then one that has lost much of what it knew; and with prompts that nobody else is asked. Who has
history begins with none. Times are held against plain decoding of the same lengths.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.markdown import Markdown
from tokenizers import Tokenizer

from benchmarks.lib import command
from benchmarks.lib.command import SEED, out, parser, run
from benchmarks.lib.history.costs import times
from benchmarks.lib.history.drained import STATES, as_table
from benchmarks.lib.history.drains import measured
from benchmarks.lib.history.host import host_figures
from benchmarks.lib.history.value import FORESEEN, Group, read_groups, value
from benchmarks.lib.tables import origin, table
from benchmarks.models.workloads import WORKLOADS, Workload
from tlt_server import results
from tlt_server.demo.checkpoint import load_target
from tlt_server.demo.task import problems
from tlt_server.demo.training.sampling import sample
from tlt_server.history.compiled import CompiledIndex
from tlt_server.history.index import History
from tlt_server.history.reference import PlainIndex
from tlt_server.launch import has_gpu
from tlt_server.results import Figures, Result

MEASURES = ("tlt_server/history", "tlt_server/engine/decode")
TRAFFIC = 10
"""Times its capacity that is written to an index."""
WORDS = {"together": "all running together", "epoch": "an epoch before", "together_epoch": "both"}


class Plan(NamedTuple):
    """capacity, of the plain index a 64th: tokens. length: of the responses that costs are of. problems: of each
    embedded target. longest: tokens of a response to them, prompt included. finished: siblings. widths: tokens verified
    in a pass. batches, steps: of an engine's steps, whose time on the host is taken."""

    capacity: int
    length: int
    problems: int
    group: int
    longest: int
    finished: Sequence[int] = (0, 1, 3, 7, 15)
    widths: Sequence[int] = (4, 8, 16)
    batches: Sequence[int] = (1, 32, 128)
    steps: int = 500


FULL = Plan(1 << 22, 1024, 12, 16, 1536)
SMOKE = Plan(1 << 16, 256, 1, 3, 48, finished=(0, 1), widths=(4,), batches=(1, 32), steps=40)


def costs(plan: Plan) -> Figures:
    """Of both forms of the index."""
    fast, plain = CompiledIndex(plan.capacity), PlainIndex(plan.capacity // 64)
    made = _costs(fast, plan) | {
        "bytes_a_token": fast.bytes / fast.capacity,
        "bytes_a_token_kept": fast.bytes / fast.tokens,
        "kept_over_capacity": fast.tokens / fast.capacity,
        "traffic_over_capacity": TRAFFIC,
    }
    return made | {f"plain_{name}": figure for name, figure in _costs(plain, plan).items()}


def _costs(index: History, plan: Plan) -> Figures:
    found = times(index, TRAFFIC * index.capacity, plan.length)
    median, p99 = np.percentile(found.lookup, [50, 99])
    return {
        "add_us": float(np.mean(found.add)),
        "lookup_us_median": float(median),
        "lookup_us_p99": float(p99),
        "lookup_nothing_us_p99": float(np.percentile(found.empty, 99)),
    }


def rolled_out(workload: Workload, plan: Plan) -> list[Group]:
    """Responses of its target at temperature 1 to problems that training never saw, of two epochs by equal weights."""
    tokenizer = Tokenizer.from_file(str(workload.models / "target" / "tokenizer.json"))
    target = load_target(workload.models / "target").to("cuda" if has_gpu() else "cpu")
    asked = [tokenizer.encode(each.prompt).ids for each in problems(plan.problems, SEED, workload.task)]
    rows = [prompt for prompt in asked for _ in range(2 * plan.group)]
    said = [each.tokens[each.prompt_length :].tolist() for each in sample(target, rows, SEED, plan.longest)]
    each = [said[first : first + 2 * plan.group] for first in range(0, len(said), 2 * plan.group)]
    return [Group(prompt, both[: plan.group], both[plan.group :]) for prompt, both in zip(asked, each, strict=True)]


def values(name: str, groups: Sequence[Group], plan: Plan) -> Figures:
    """Of one source of rollouts."""
    responses = [response for group in groups for response in group.responses]
    out.print(f"{name}: {len(responses)} responses, {sum(map(len, responses))} tokens")
    found = value(groups, plan.finished, plan.widths)
    figures: Figures = {
        f"responses_{name}": len(responses),
        f"mean_tokens_{name}": float(np.mean([*map(len, responses)])),
    }
    for key, figure in found.items():
        begin = "foreseen_over_given" if key.startswith(FORESEEN) else "tokens_a_pass"
        figures[f"{begin}_{name}_{key.removeprefix(FORESEEN)}"] = figure
    return figures


def shown(result: Result) -> str:
    """Both tables, as Markdown."""
    found = result.figures
    costs = table(
        ["64 requests", "compiled", "plain"],
        [
            [words, f"{found[name]:.2f}", f"{found[f'plain_{name}']:.1f}"]
            for name, words in (
                ("add_us", "us to add a token"),
                ("lookup_us_median", "us of a batch's lookups, median"),
                ("lookup_us_p99", "p99"),
                ("lookup_nothing_us_p99", "p99 where nothing is found"),
            )
        ],
    )
    memory = f"{found['bytes_a_token']:.1f} bytes a token of capacity, {found['bytes_a_token_kept']:.1f} of one kept."
    return "\n\n".join(
        (origin(result), costs, memory, _host(found), *(_worth(found, name) for name in _sources(found)))
    )


def _host(found: Figures) -> str:
    begin = "host_us_drafted_batch_"
    rows = []
    for batch in (name.removeprefix(begin) for name in found if name.startswith(begin)):
        kinds = (f"host_us_{p99}{kind}_batch_{batch}" for kind in ("drafted", "other") for p99 in ("", "p99_"))
        rows.append([batch, *(f"{found[kind]:.0f}" for kind in kinds)])
    return table(["requests", "us of a step that history drafts for", "p99", "us of another step", "p99"], rows)


def _sources(found: Figures) -> list[str]:
    return [name.removeprefix("responses_") for name in found if name.startswith("responses_")]


def _worth(found: Figures, source: str) -> str:
    prefix = f"tokens_a_pass_{source}_"
    keys = [name.removeprefix(prefix).rsplit("_width_", 1) for name in found if name.startswith(prefix)]
    widths = sorted({int(width) for _, width in keys})
    rows = []
    for situation in dict.fromkeys(name for name, _ in keys):
        words = WORDS.get(situation) or f"siblings finished: {situation.removeprefix('finished_')}"
        rows.append([words, *(f"{found[f'{prefix}{situation}_width_{width}']:.2f}" for width in widths)])
    return table([f"{source}: tokens a pass, verifying", *map(str, widths)], rows)


def main(argv: Sequence[str]) -> None:
    flags = parser("history", __doc__)
    flags.set_defaults(rounds=1)
    flags.add_argument("--rollouts", type=Path, metavar="FILE", help="values of this dump, too")
    flags.add_argument("--drain", action="store_true", help="servers drain batches; nothing else is measured")
    flags.add_argument("--states", choices=STATES, nargs="+", default=STATES, help="of the drafter (default: all)")
    arguments = flags.parse_args(argv)
    if arguments.drain:
        command.main("history", __doc__, argv, measured, as_table, flags)
        return

    def measure() -> Result:
        plan = SMOKE if arguments.smoke else FULL
        dump = {"dump": read_groups(arguments.rollouts)} if arguments.rollouts else {}
        figures = costs(plan) | host_figures(plan.capacity, plan.batches, plan.steps)
        for name, workload in WORKLOADS.items():
            figures |= values(name, rolled_out(workload, plan), plan)
        for name, groups in dump.items():
            figures |= values(name, groups, plan)
        result = results.measured_here("history", [*flags.prog.split(), *argv], figures)
        out.print(Markdown(shown(result)))
        return result

    run("history", arguments, measure)
