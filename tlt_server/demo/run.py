"""The demo's first part: the main job, small. Rollouts with speculation off and on, and the lossless check.

1. start the server without its drafter; then again, with it; each time
2.   sample groups of 8 responses to each problem at temperature 1, as GRPO does
3.   answer other problems greedily
4.   sample the beginning of one response many times, for the chi-squared test against the target's exact law
5. compare, print, write
"""

import asyncio
import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from tlt_client import AsyncClient, Rollout, SamplingParams
from tlt_client.errors import TltClientError

from tlt_server.demo import default_paths
from tlt_server.demo.lossless import Tokens, enumerate_law, greedy_mismatches, p_value
from tlt_server.demo.ngram import prompt_lookup_accept_length
from tlt_server.demo.reference import Reference
from tlt_server.demo.task import Problem, grade, problems
from tlt_server.process import running_server

GROUP = 8
GREEDY = 16
LAW_SAMPLES, LAW_TOKENS, LAW_RAREST = 600, 12, 2e-4
SEED = 2026
ALARM = 1e-4  # a lossless server falls below this p-value once in 10,000 demos
TIES = 2  # sampled responses that rounding may change: of some 20,000 tokens it decides one once in fifty demos
AT_ONCE = 16  # requests in flight: what two cores of a laptop serve comfortably
LONGEST = 1024  # tokens: longer than any worked solution that the model was trained on


class Answers(NamedTuple):
    """What one server gave back; a failed request is missing, or empty in `greedy`."""

    rollouts: list[tuple[Problem, Rollout]]
    greedy: list[Tokens]
    starts: list[Tokens]
    seconds: float  # that the rollouts took
    requests: int
    failed: int


def run(count: int, console: Console) -> dict[str, float | int]:
    """Runs the demo with `count` problems; prints a table and returns the figures that docs/results defines."""
    rounds = {}
    with tempfile.TemporaryDirectory(prefix="tlt-demo-") as folder:
        for name, flags in (("plain", ["--no-speculation"]), ("spec", [])):
            console.print(f"starting the server, speculation {'on' if name == 'spec' else 'off'} …")
            with running_server([*flags, "--random-seed", str(SEED)], Path(folder) / f"{name}.log") as url:
                rounds[name] = asyncio.run(_exercise(url, problems(count, SEED), console))
    figures = compare(rounds["plain"], rounds["spec"])
    show(figures, console)
    return figures


def faults(f: dict[str, float | int]) -> list[str]:
    """What went wrong, a line each; nothing where every request was answered and speculation was lossless."""
    found = {
        f"{f['failed_requests']} of {f['requests']} requests failed": f["failed_requests"] > 0,
        f"{f['greedy_mismatches']} greedy responses changed with speculation": f["greedy_mismatches"] > 0,
        f"{f['sampled_mismatches']} sampled responses changed with speculation": f["sampled_mismatches"] > TIES,
    }
    said = [line for line, wrong in found.items() if wrong]
    if f["sampling_p_value"] < ALARM:
        said.append(f"sampled tokens do not follow the target's law (p = {f['sampling_p_value']:.1e})")
    return said


def show(figures: dict[str, float | int], console: Console) -> None:
    """Prints the table and the explanation."""
    console.print(as_table(figures))
    console.print(explain(figures))


async def _exercise(url: str, tasks: Sequence[Problem], console: Console) -> Answers:
    law_problem, *greedy_problems = problems(GREEDY + 1, SEED + 1)
    greedy = SamplingParams(temperature=0, max_new_tokens=LONGEST)
    start = SamplingParams(max_new_tokens=LAW_TOKENS, ignore_eos=True)
    columns = (TextColumn("{task.description:>10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    async with AsyncClient(url, max_concurrency=AT_ONCE) as client:
        with Progress(*columns, console=console) as progress:
            warm = await _sample(client, [law_problem.prompt] * AT_ONCE, start, "warm up", progress)
            began = time.monotonic()
            grouped = [task for task in tasks for _ in range(GROUP)]
            sampled = [SamplingParams(max_new_tokens=LONGEST, sampling_seed=seed) for seed in range(len(grouped))]
            rollouts = await _sample(client, [task.prompt for task in grouped], sampled, "rollouts", progress)
            seconds = time.monotonic() - began
            answers = await _sample(client, [p.prompt for p in greedy_problems], greedy, "greedy", progress)
            starts = await _sample(client, [law_problem.prompt] * LAW_SAMPLES, start, "law", progress)
    everything = [*warm, *rollouts, *answers, *starts]
    return Answers(
        rollouts=[(task, rollout) for task, rollout in zip(grouped, rollouts, strict=True) if rollout],
        greedy=[rollout.tokens if rollout else () for rollout in answers],
        starts=[rollout.tokens for rollout in starts if rollout],
        seconds=seconds,
        requests=len(everything),
        failed=sum(rollout is None for rollout in everything),
    )


async def _sample(
    client: AsyncClient,
    prompts: Sequence[str],
    params: SamplingParams | Sequence[SamplingParams],
    what: str,
    progress: Progress,
) -> list[Rollout | None]:
    bar = progress.add_task(what, total=len(prompts))
    gate = asyncio.Semaphore(AT_ONCE)

    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params

    async def one(prompt: str, params: SamplingParams) -> Rollout | None:
        async with gate:
            try:
                return await client.generate(prompt, params)
            except TltClientError as error:  # the network's edge: counted, shown, and the demo goes on
                progress.console.print(f"a request failed: {error}", markup=False)
                return None
            finally:
                progress.advance(bar)

    return list(await asyncio.gather(*map(one, prompts, each)))


def compare(plain: Answers, spec: Answers) -> dict[str, float | int]:
    """The figures of both rounds."""
    reference = Reference(default_paths()[0])
    prompt = reference.tokens(problems(1, SEED + 1)[0].prompt)
    law = enumerate_law(reference.next_probs, prompt, LAW_TOKENS, LAW_RAREST)
    lengths = sorted(rollout.completion_tokens for _, rollout in plain.rollouts + spec.rollouts)
    deciles = statistics.quantiles(lengths, n=10)
    counts = [rollout.spec for _, rollout in spec.rollouts if rollout.spec]
    return {
        "requests": plain.requests + spec.requests,
        "failed_requests": plain.failed + spec.failed,
        "rollouts": len(spec.rollouts),
        "tokens_per_s_plain": _tokens_per_s(plain),
        "tokens_per_s_spec": _tokens_per_s(spec),
        "accept_length": 1 + sum(c.accepted_drafts for c in counts) / sum(c.verify_calls for c in counts),
        "accept_length_ngram": prompt_lookup_accept_length(
            [(reference.tokens(task.prompt), rollout.tokens) for task, rollout in spec.rollouts]
        ),
        "accuracy_plain": _accuracy(plain),
        "accuracy_spec": _accuracy(spec),
        "response_length_p50": statistics.median(lengths),
        "response_length_p90": deciles[8],
        "response_length_max": lengths[-1],
        "sampled_mismatches": _mismatches(plain, spec),
        "greedy_responses": len(spec.greedy),
        "greedy_mismatches": greedy_mismatches(plain.greedy, spec.greedy),
        "sampling_p_value_plain": p_value(plain.starts, law),
        "sampling_p_value": p_value(spec.starts, law),
    }


def _tokens_per_s(answers: Answers) -> float:
    return sum(rollout.completion_tokens for _, rollout in answers.rollouts) / answers.seconds


def _mismatches(plain: Answers, spec: Answers) -> int:
    """Rollouts of one seed that differ in any token."""
    tokens = {rollout.seed: rollout.tokens for _, rollout in plain.rollouts}
    return sum(tokens.get(rollout.seed) != rollout.tokens for _, rollout in spec.rollouts)


def _accuracy(answers: Answers) -> float:
    return statistics.mean(grade(task, rollout.text) for task, rollout in answers.rollouts)


def _share(share: float, count: float) -> str:
    """A share of `count` independent rollouts, with its standard error."""
    return f"{share:.0%} ± {math.sqrt(share * (1 - share) / count):.0%}"


def as_table(f: dict[str, float | int]) -> Table:
    """The figures for a person."""
    table = Table("", "speculation off", "on", title="Rollouts of the embedded model")
    table.add_row("tokens/s", f"{f['tokens_per_s_plain']:.0f}", f"{f['tokens_per_s_spec']:.0f}")
    table.add_row("accept length (most: 4)", "1", f"{f['accept_length']:.2f}")
    table.add_row("accept length of n-gram lookup", "", f"{f['accept_length_ngram']:.2f}")
    table.add_row(
        "accuracy, ± one standard error", *(_share(f[f"accuracy_{x}"], f["rollouts"]) for x in ("plain", "spec"))
    )
    lengths = " / ".join(f"{f[f'response_length_{q}']:.0f}" for q in ("p50", "p90", "max"))
    table.add_row("response tokens: median / p90 / longest", lengths, "")
    table.add_row("sampled responses that differ", "", f"{f['sampled_mismatches']} of {f['rollouts']}")
    table.add_row("greedy responses that differ", "", f"{f['greedy_mismatches']} of {f['greedy_responses']}")
    table.add_row(
        "p-value: sampled as the target's law says",
        f"{f['sampling_p_value_plain']:.2f}",
        f"{f['sampling_p_value']:.2f}",
    )
    table.add_row("requests failed", "", f"{f['failed_requests']} of {f['requests']}")
    return table


def explain(f: dict[str, float | int]) -> str:
    """Whether speculation pays on this machine, and why not where it does not."""
    ratio = f["tokens_per_s_spec"] / f["tokens_per_s_plain"]
    if ratio >= 1.05:
        return f"Speculation makes rollouts {ratio:.2f} times as fast on this machine."
    cost = f["accept_length"] / ratio
    return (
        f"A pass gives {f['accept_length']:.2f} tokens, yet costs {cost:.1f} times a plain one, so speculation runs at "
        f"{ratio:.2f} of plain speed on this machine. The model is so small that the time of a step is Python's, not "
        "the target's: drafting and verifying are several times the Python. Speculation pays where a target pass costs "
        "well over 5 ms."
    )
