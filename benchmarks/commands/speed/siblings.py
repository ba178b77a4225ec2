"""What do siblings give each other as drafts on a running server, and an earlier epoch? With a drafter and without.

    python -m benchmarks siblings --json benchmarks/results/siblings.cpu2.json

Groups of 16 responses to the embedded target's problems, to natural ends, two epochs with other seeds: by history alone
in every step; by history alone where the bandit takes it; by the embedded drafter; and by whichever of the two the
bandit takes. The responses are held against plain decoding's.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.markdown import Markdown
from tlt_client import Client, Rollout, SamplingParams
from tlt_client.schemas import Arm, StrategyUpdate

from benchmarks.lib.command import SEED, out, parser_of_one, run
from benchmarks.lib.tables import origin, table
from tlt_server import results
from tlt_server.demo.task import problems
from tlt_server.process import running_server
from tlt_server.results import Figures, Result

MEASURES = ("tlt_server/history", "tlt_server/engine", "tlt_server/strategy")
PLAIN, BANDIT = StrategyUpdate("off"), StrategyUpdate("bandit")
CHAINS = ("--arm", "3,1,4", "--arm", "7,1,8")
HISTORY = ("--arm", "history:7")
ALONE = ("--drafter", "none", *HISTORY)
GROUP = 16


class Side(NamedTuple):
    """How a server decodes both epochs."""

    name: str
    words: str
    flags: Sequence[str]
    strategy: StrategyUpdate


SIDES = (
    Side("plain", "plain decoding", ALONE, PLAIN),
    Side(
        "pinned", "history in every step, no drafter", ALONE, StrategyUpdate("pinned", pinned=Arm(7, 1, 8, "history"))
    ),
    Side("alone", "history or off, no drafter", ALONE, BANDIT),
    Side("drafter", "the drafter or off", CHAINS, BANDIT),
    Side("both", "history, the drafter or off", (*CHAINS, *HISTORY), BANDIT),
)
EPOCHS = ("first", "second")


def epoch(client: Client, prompts: Sequence[str], number: int) -> list[Rollout]:
    """A group's responses to each prompt, by seeds of the epoch."""
    asked = [prompt for prompt in prompts for _ in range(GROUP)]
    sampling = SamplingParams(temperature=1.0, max_new_tokens=1024, sampling_seed=SEED + number)
    return client.generate_batch(asked, sampling)


def passes(rollouts: Sequence[Rollout]) -> float:
    """Tokens that a pass over drafts gave a request, the bonus token counted."""
    counts = [rollout.spec for rollout in rollouts if rollout.spec]
    verified = sum(each.verify_calls for each in counts)
    return 1 + sum(each.accepted_drafts for each in counts) / verified if verified else 1.0


def measured(prompts: Sequence[str], logs: Path) -> Figures:
    """Of all sides, one server after another."""
    figures: Figures = {"prompts": len(prompts), "responses": len(prompts) * GROUP}
    plain: dict[str, list[tuple[int, ...]]] = {}
    for flags in dict.fromkeys(side.flags for side in SIDES):
        with running_server([*flags, "--random-seed", "7"], logs / f"{len(figures)}.log") as url, Client(url) as client:
            for side in (each for each in SIDES if each.flags == flags):
                client.set_strategy(side.strategy)
                if HISTORY[1] in flags:
                    client.forget_history()
                for number, name in enumerate(EPOCHS):
                    rollouts = epoch(client, prompts, number)
                    said = [rollout.tokens for rollout in rollouts]
                    equal = [a == b for a, b in zip(said, plain.setdefault(name, said), strict=True)]
                    figures[f"{name}_tokens_a_pass_{side.name}"] = passes(rollouts)
                    figures[f"{name}_differ_{side.name}"] = len(equal) - sum(equal)
                out.print(
                    f"{side.words}: {figures[f'first_tokens_a_pass_{side.name}']:.2f}, then {passes(rollouts):.2f}"
                )
    return figures


def as_table(result: Result) -> str:
    """As Markdown."""
    found = result.figures
    rows = []
    for side in SIDES[1:]:
        given = (f"{found[f'{name}_tokens_a_pass_{side.name}']:.2f}" for name in EPOCHS)
        differ = sum(int(found[f"{name}_differ_{side.name}"]) for name in EPOCHS)
        rows.append([side.words, *given, str(differ)])
    heads = ["tokens a pass over drafts", "first epoch", "second", f"differ, of {2 * int(found['responses'])}"]
    return f"{origin(result)}\n\n{table(heads, rows)}"


def main(argv: Sequence[str]) -> None:
    parser = parser_of_one("siblings", __doc__)
    arguments = parser.parse_args(argv)

    def measure() -> Result:
        prompts = [problem.prompt for problem in problems(1 if arguments.smoke else 8, SEED)]
        with tempfile.TemporaryDirectory(prefix="tlt-bench-") as logs:
            figures = measured(prompts, Path(logs))
        result = results.measured_here("siblings", [*parser.prog.split(), *argv], figures)
        out.print(Markdown(as_table(result)))
        return result

    run("siblings", arguments, measure)
