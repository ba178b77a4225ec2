"""Is speculation lossless here? Sampled laws, greedy output and logprobs of plain, chain and tree servers.

    python -m benchmarks lossless --json benchmarks/results/lossless.h200.json

1. a target of 151,936 tokens whose law can be enumerated (models/peaked.py), and its drafter; three servers of them
2.   each sampling case alone, then all in the same batches: chi-squared tests against the law
3. three servers of the embedded target and drafter
4.   problems answered greedily, 32 at a time, by each: against plain decoding one by one
5.   logprobs of sampled responses against the plain server's scores of the same tokens
"""

import argparse
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from tokenizers import Tokenizer

from benchmarks.lib.command import run
from benchmarks.lib.divergences import TIE_ULPS, divergence_figures, divergences
from benchmarks.lib.laws import LENGTHS, Case, Law, cases, law, moved_mass, p_values, rounding_shift
from benchmarks.lib.servers import Answer, Request, Server, graph_figures, on_each_arm, serving, tokens_of
from benchmarks.models import peaked
from tlt_server import results
from tlt_server.demo import default_paths
from tlt_server.demo.lossless import Tokens
from tlt_server.demo.reference import Reference
from tlt_server.demo.task import problems
from tlt_server.launch import has_gpu
from tlt_server.results import Figures

MEASURES = ("tlt_server/engine/decode", "tlt_server/engine/graphs")
ByCase = dict[str, list[Tokens]]
SEED = 2026
PROMPT = 4  # tokens: few, so that each ancestor in a draft weighs in attention
IN_FLIGHT, TOGETHER = 1536, 256
_out = Console(highlight=False, soft_wrap=True)


class Size(NamedTuple):
    """How much to measure.

    vocab, common: of the target with an enumerable law.
    candidates: prompts of which each case takes the one that rounding touches least.
    samples: of each case, half of them alone, half in batches with all other cases; drawn in `rounds`.
    seconds: a server that would need longer for them samples fewer rounds.
    problems, rollouts: answered greedily; sampled for their logprobs. `longest` bounds a response, in tokens.
    """

    vocab: int = 151_936
    common: int = 256
    candidates: int = 4
    samples: int = 20_000
    rounds: int = 5
    seconds: float = 300
    problems: int = 256
    rollouts: int = 256
    longest: int = 256


SMOKE = Size(vocab=1_024, common=64, candidates=2, samples=600, rounds=1, problems=4, rollouts=4, longest=96)


@dataclass(frozen=True)
class Trial:
    """A case, the prompt it is tested with, and the laws of what follows, by length."""

    case: Case
    prompt: Tokens
    laws: Mapping[int, Law]
    rounding: float


@dataclass
class Round:
    """What one server gave."""

    server: Server
    figures: Figures = field(default_factory=dict)
    alone: ByCase = field(default_factory=lambda: defaultdict(list))
    mixed: ByCase = field(default_factory=lambda: defaultdict(list))
    greedy: list[Tokens] = field(default_factory=list)
    one_by_one: list[Tokens] = field(default_factory=list)
    logprob_gaps: dict[str, list[float]] = field(default_factory=dict)
    rollouts: list[tuple[Tokens, Answer]] = field(default_factory=list)


def plan(made: peaked.Peaked, size: Size) -> list[Trial]:
    """The trials: for each case, of some prompts the one whose law depends least on the server's dtype.

    Chosen by the target alone, before anything is sampled. A filter's edge may lie so near to a token's probability
    that rounding moves the token across; no test of the law could then tell rounding from a wrong sampler.
    """
    device = "cuda" if has_gpu() else "cpu"
    dtype = torch.bfloat16 if has_gpu() else torch.float32
    used, finer = (Reference(made.target, each, device) for each in (dtype, torch.float32))
    draw = random.Random(SEED)
    prompts = [tuple(draw.choices(made.common, k=PROMPT)) for _ in range(size.candidates)]
    with torch.device(device):
        tried = [
            [_trial(case, prompt, used, finer, size) for case in cases(_likely(used, prompt))] for prompt in prompts
        ]
    return [min(of_case, key=lambda trial: trial.rounding) for of_case in zip(*tried, strict=True)]


def _likely(target: Reference, prompt: Tokens) -> list[int]:
    likely: list[int] = target.logits([prompt])[0].topk(64).indices.tolist()
    return likely


def _trial(case: Case, prompt: Tokens, used: Reference, finer: Reference, size: Size) -> Trial:
    rarest = 10 / size.samples  # what is expected less often, the test counts with the rest
    laws = {length: law(case, prompt, used.logits, length, rarest) for length in LENGTHS}
    finely = {length: law(case, prompt, finer.logits, length, rarest / 2) for length in LENGTHS}
    return Trial(case, prompt, laws, max(rounding_shift(laws[n], finely[n], size.samples // 2) for n in LENGTHS))


def sample(round_: Round, trials: Sequence[Trial], size: Size) -> None:
    """Responses of each case, alone and in batches with all others."""
    each = size.samples // size.rounds // 2
    shuffled = [trial for trial in trials for _ in range(each)]
    random.Random(SEED).shuffle(shuffled)
    began = time.monotonic()
    for done in range(size.rounds):
        if (time.monotonic() - began) * (done + 1) > size.seconds * max(1, done):
            break
        for trial in trials:
            _sample(round_.server, [trial] * each, round_.alone)
        _sample(round_.server, shuffled, round_.mixed)


def _sample(server: Server, chosen: Sequence[Trial], into: ByCase) -> None:
    requests = [(trial.prompt, trial.case.params(max(LENGTHS))) for trial in chosen]
    for trial, answer in zip(chosen, server.ask(requests, at_once=IN_FLIGHT, together=TOGETHER), strict=True):
        if answer:
            into[trial.case.name].append(tokens_of(answer))


def sampling_figures(arm: str, round_: Round, trials: Sequence[Trial]) -> Figures:
    """The least p-value of all of an arm's tests, and how probable one as small is among so many (Sidak's bound)."""
    found = {}
    for kind, by_case in (("alone", round_.alone), ("mixed", round_.mixed)):
        for trial in trials:
            for length, p in p_values(trial.case, by_case[trial.case.name], trial.laws).items():
                found[f"{kind}, {trial.case.name}, {length} tokens"] = p
                _out.print(f"{arm:6} {kind:6} {trial.case.name:16} {length} tokens: p = {p:.4f}")
    return {
        f"sampling_tests_{arm}": len(found),
        f"sampling_p_value_min_{arm}": (least := min(found.values())),
        f"sampling_p_value_{arm}": 1 - (1 - least) ** len(found),
        f"samples_per_case_{arm}": min(len(round_.alone[t.case.name]) + len(round_.mixed[t.case.name]) for t in trials),
    }


def speculation_figures(arm: str, server: Server) -> Figures:
    """Accept length, and the share of verify passes that accepted a draft of each depth."""
    counts = server.counts()
    if not counts.drafts:
        return {}
    depths = {f"accept_rate_depth_{d}_{arm}": n / counts.drafts for d, n in enumerate(counts.accepted_per_position, 1)}
    return {f"accept_length_{arm}": 1 + counts.accepted_tokens / counts.drafts, **depths}


def greedy(server: Server, prompts: Sequence[Tokens], size: Size, at_once: int) -> list[Tokens]:
    """Every problem's greedy answer; none is empty but a failed request's."""
    requests: list[Request] = [(prompt, {"temperature": 0, "max_new_tokens": size.longest}) for prompt in prompts]
    return [tokens_of(answer) if answer else () for answer in server.ask(requests, at_once=at_once)]


def rescored_gaps(plain: Server, rollouts: Sequence[tuple[Tokens, Answer]]) -> list[float]:
    """How far each returned logprob lies from the plain server's for the same token, which it reads in one prefill."""
    params = {"max_new_tokens": 0, "temperature": 1}
    texts: list[Request] = [(prompt + tokens_of(rollout), params) for prompt, rollout in rollouts]
    gaps = []
    scored = plain.ask(texts, at_once=16, return_logprob=True, logprob_start_len=0)
    for (_, rollout), answer in zip(rollouts, scored, strict=True):
        returned = [entry[0] for entry in rollout["meta_info"]["output_token_logprobs"]]
        if answer:
            read = [entry[0] for entry in answer["meta_info"]["input_token_logprobs"]][-len(returned) :]
            gaps += [abs(a - b) for a, b in zip(returned, read, strict=True)]
    return gaps


def measure_laws(folder: Path, size: Size) -> Figures:
    """Parts 1 and 2."""
    made = peaked.make(folder / "peaked", size.vocab, size.common)
    with ThreadPoolExecutor(1) as aside:
        planned = aside.submit(plan, made, size)
        device = "cuda" if has_gpu() else "cpu"

        def visit(arm: str, others: Mapping[str, Future[Round]]) -> Round:
            del others
            with serving(arm, made.target, made.drafter, folder / f"peaked-{arm}.log") as server:
                round_ = Round(server)
                sample(round_, planned.result(), size)
                round_.figures = speculation_figures(arm, server)
                return round_

        rounds, trials = on_each_arm(visit), planned.result()
    figures: Figures = {"vocab": size.vocab}
    figures |= {"sampling_cases": len(trials), "filter_moved_mass": moved_mass(size.vocab, device)}
    figures["rounding_shift_max"] = max(trial.rounding for trial in trials)
    for arm, round_ in rounds.items():
        figures |= sampling_figures(arm, round_, trials) | round_.figures
        figures |= {f"server_start_s_{arm}": round_.server.start_seconds}
        figures |= graph_figures(arm, folder / f"peaked-{arm}.log")
    return figures | _totals(rounds)


def measure_embedded(folder: Path, size: Size, target: Path, drafter: Path, after: Future[Figures]) -> Figures:
    """Parts 3 to 5. The servers start at once, and wait for `after` with their work: they would disturb each other."""
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    prompts = [tuple(tokenizer.encode(problem.prompt).ids) for problem in problems(size.problems, SEED)]
    sampled: list[Tokens] = (prompts * size.rollouts)[: size.rollouts]
    params = {"temperature": 1, "max_new_tokens": size.longest}

    def visit(arm: str, others: Mapping[str, Future[Round]]) -> Round:
        with serving(arm, target, drafter, folder / f"embedded-{arm}.log") as server:
            after.result()
            round_ = Round(server)
            round_.greedy = greedy(server, prompts, size, at_once=32)
            if arm == "plain":
                round_.one_by_one = greedy(server, prompts, size, at_once=1)
            answers = server.ask([(prompt, params) for prompt in sampled], at_once=32, return_logprob=True)
            round_.rollouts = [(prompt, answer) for prompt, answer in zip(sampled, answers, strict=True) if answer]
            round_.figures = speculation_figures(f"{arm}_embedded", server)
            if arm == "plain":
                for name, other in {**{name: done.result() for name, done in others.items()}, arm: round_}.items():
                    round_.logprob_gaps[name] = rescored_gaps(server, other.rollouts)
            return round_

    rounds = on_each_arm(visit)
    plain = rounds["plain"]
    figures: Figures = {
        "greedy_responses": size.problems,
        "tie_tolerance_ulps": TIE_ULPS,
        "logprob_rollouts": size.rollouts,
    }
    float32 = Reference(target, torch.float32, "cuda" if has_gpu() else "cpu")
    for arm, round_ in rounds.items():
        found = divergences(float32, prompts, plain.one_by_one, round_.greedy)
        figures |= divergence_figures("control" if arm == "plain" else arm, found)
    dtype = "bfloat16" if has_gpu() else "float32"
    for name, gaps in plain.logprob_gaps.items():
        figures[f"logprob_difference_max_{name}_{dtype}"] = max(gaps)
        figures[f"logprob_difference_rms_{name}_{dtype}"] = (sum(gap * gap for gap in gaps) / len(gaps)) ** 0.5
    for round_ in rounds.values():
        figures |= round_.figures
    return figures | _totals(rounds)


def _totals(rounds: Mapping[str, Round]) -> Figures:
    servers = [round_.server for round_ in rounds.values()]
    return {"requests": sum(each.requests for each in servers), "failed_requests": sum(each.failed for each in servers)}


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks lossless", description=__doc__)
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--logs", type=Path, help="folder for the servers' logs")
    parser.add_argument("--smoke", action="store_true", help="small enough for a CPU; proves that the script runs")
    parser.add_argument(
        "--seconds", type=float, default=Size().seconds, help="for sampling; 20,000 a case need 250 on an H200"
    )
    arguments = parser.parse_args(argv)
    size = (SMOKE if arguments.smoke else Size())._replace(seconds=arguments.seconds)

    def measure() -> results.Result:
        with tempfile.TemporaryDirectory(prefix="tlt-lossless-") as scratch:
            folder = arguments.logs or Path(scratch)
            folder.mkdir(parents=True, exist_ok=True)
            with ThreadPoolExecutor(2 if has_gpu() else 1) as pool:
                first = pool.submit(measure_laws, folder, size)
                second = pool.submit(measure_embedded, folder, size, *default_paths(), first)
            laws, embedded = first.result(), second.result()
        figures = laws | embedded | {name: laws[name] + embedded[name] for name in ("requests", "failed_requests")}
        for name, value in figures.items():
            _out.print(f"{name:44} {value:.6g}")
        return results.measured_here("lossless", ["python", "-m", "benchmarks", "lossless", *argv], figures)

    run("lossless", arguments, measure)
