"""Figures of a target and a drafter on held-out problems: accuracy, lengths, entropy, accept lengths."""

from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Tokenizer

from tlt_server.demo.ngram import prompt_lookup_accept_length
from tlt_server.demo.task import DEMO, Task, grade, problems
from tlt_server.demo.training.corpus import Sequence, cut
from tlt_server.demo.training.model import Target
from tlt_server.demo.training.sampling import sample, with_states
from tlt_server.drafter.hits import hit_probability
from tlt_server.engine.sampling.filters import filter_probs
from tlt_server.trainer.learn.chains import Frozen, draft, drafter_law, target_law
from tlt_server.trainer.learn.network import Network
from tlt_server.trainer.learn.packing import join

STEPS = 3
GROUP = 8
SEED = 2024
# tokens judged at once, at least those of the longest sequence
BUDGET = 32_768
# a target with a longer context is judged there, too: after so many tokens of solved problems
CONTEXTS = (1024, 16_384)
IN_CONTEXT = 64


@dataclass(frozen=True)
class Judged:
    """One rollout under target and drafter; the response's tokens but the first, which no drafter proposes."""

    top1: np.ndarray
    entropy: np.ndarray
    hits: np.ndarray  # [sharpness, steps, tokens]: how likely a chain's k-th draft, had it fallen on it, was that token


def evaluate(
    target: Target,
    drafters: dict[str, Network],
    tokenizer: Tokenizer,
    count: int,
    task: Task = DEMO,
    longest: int | None = None,
) -> dict[str, float]:
    """Sample `count` held-out problems in groups of `GROUP`, and judge; the figures are named in the demo's README."""
    drawn = [problem for problem in problems(count // GROUP, SEED, task) for _ in range(GROUP)]
    prompts = [encoding.ids for encoding in tokenizer.encode_batch([problem.prompt for problem in drawn])]
    rollouts = sample(target, prompts, SEED, longest or target.shape.context)
    outputs = [sequence.tokens[sequence.prompt_length :].tolist() for sequence in rollouts]
    texts = tokenizer.decode_batch(outputs)
    figures = {"rollouts": float(len(rollouts))}
    figures["accuracy"] = float(np.mean([grade(problem, text) for problem, text in zip(drawn, texts, strict=True)]))
    figures |= _length_figures(np.array([len(output) for output in outputs]).reshape(-1, GROUP))
    figures["distinct_pairs"] = float(np.mean([a != b for a, b in zip(texts[::2], texts[1::2], strict=True)]))
    figures["accept_length_ngram"] = prompt_lookup_accept_length(zip(prompts, outputs, strict=True))
    for name, drafter in drafters.items():
        figures |= _draft_figures(name, judge(target, drafter, rollouts))
        for context in CONTEXTS:
            if 2 * context <= target.shape.context and task is not DEMO:
                figures |= _in_context(name, context, target, drafter, rollouts)
    return figures


def _in_context(
    name: str, context: int, target: Target, drafter: Network, rollouts: list[Sequence]
) -> dict[str, float]:
    """Of `IN_CONTEXT` rollouts, each after `context` tokens of others."""
    others = np.concatenate([rollout.tokens for rollout in rollouts[IN_CONTEXT:]])
    starts = np.random.default_rng(SEED).integers(len(others) - context, size=IN_CONTEXT)
    judged = judge(
        target,
        drafter,
        [
            Sequence(
                np.concatenate([others[start : start + context], one.tokens])[:BUDGET], context + one.prompt_length
            )
            for start, one in zip(starts, rollouts[::GROUP], strict=False)
        ],
    )
    return {
        f"{figure}_at_{context}": value
        for figure, value in _draft_figures(name, judged).items()
        if figure.startswith(("accept_length", "entropy"))
    }


def _length_figures(lengths: np.ndarray) -> dict[str, float]:
    median, tail = np.percentile(lengths, (50, 90))
    in_group = np.percentile(lengths, 90, axis=1) / np.median(lengths, axis=1)
    return {
        "length_mean": float(lengths.mean()),
        "length_median": float(median),
        "length_p90": float(tail),
        "length_max": float(lengths.max()),
        "length_p90_over_median": float(tail / median),
        "length_p90_over_median_in_group": float(in_group.mean()),
    }


def _draft_figures(name: str, judged: list[Judged]) -> dict[str, float]:
    top1 = np.concatenate([one.top1 for one in judged])
    accepted = accepted_drafts(judged)
    figures = {
        "entropy_nats": float(np.concatenate([one.entropy for one in judged]).mean()),
        "top1_mean": float(top1.mean()),
        "top1_below_0.9": float((top1 < 0.9).mean()),
        f"accept_length_{name}": len(top1) / float(accepted[0]),
    }
    rates = accepted[1:] / accepted[:-1].clip(min=1)
    return figures | {f"acceptance_{name}_{step}": float(rate) for step, rate in enumerate(rates, 1)}


def accepted_drafts(judged: list[Judged]) -> np.ndarray:
    """Expected target passes that accept the first k drafts or more, [steps + 1]: the first is all passes, and the
    fewest of any sharpness."""
    found = np.array([sum(walk(hits) for hits in each) for each in zip(*(one.hits for one in judged), strict=True)])
    fewest: np.ndarray = found[found[:, 0].argmin()]
    return fewest


def walk(hits: np.ndarray) -> np.ndarray:
    """Expected target passes over one rollout that accept the first k drafts or more, [steps + 1].

    hits: [steps, tokens], of `Judged` at one sharpness. A pass begins at the token after those that the last one gave.
    """
    steps, length = hits.shape
    begins, accepted = np.zeros(length + steps + 1), np.zeros(steps + 1)
    begins[0] = 1
    for first in range(length):
        chain = np.diagonal(hits, first)[:steps]  # shorter at the end: nothing is accepted past it
        reached = begins[first] * np.cumprod([1, *chain])
        accepted[: len(reached)] += reached
        begins[first + 1 : first + 1 + len(reached)] += reached - np.append(reached[1:], 0)
    return accepted


@dataclass(frozen=True)
class Asked:
    """steps: of a chain. temperature: both laws'. top_p: of the target's law; a drafter proposes from its whole one."""

    steps: int = STEPS
    temperature: float = 1.0
    top_p: float = 1.0


def judge(target: Target, drafter: Network, rollouts: list[Sequence], asked: Asked = Asked()) -> list[Judged]:
    """Run both models over `rollouts`, sorted by length to waste little on padding; the order is kept."""
    lengths = np.array([len(rollout.tokens) for rollout in rollouts])
    order = np.argsort(lengths, kind="stable")
    judged: dict[int, Judged] = {}
    for first, last in cut(lengths[order], BUDGET):
        rows = order[first:last]
        judged |= zip(rows, _judge(target, drafter, [rollouts[index] for index in rows], asked), strict=True)
    return [judged[index] for index in range(len(rollouts))]


@torch.no_grad()
def _judge(target: Target, drafter: Network, rollouts: list[Sequence], asked: Asked) -> list[Judged]:
    runs, device = with_states(target, drafter.aux_layers, rollouts), target.lm_head.weight.device
    fill = BUDGET if device.type == "cuda" else 0  # a kernel is compiled for every length
    pack, frozen = join(runs, fill).to(device), Frozen(target.model.embed_tokens.weight, target.lm_head.weight)
    reads = [step.reads for step in draft(drafter, frozen, pack, asked.steps)]
    judged = []
    for run, (first, _) in zip(runs, pack.bounds, strict=False):
        at = torch.arange(run.prompt + 1, len(run.tokens), device=device)
        p = target_law(frozen, run.finals[at - 1], asked.temperature)
        p = filter_probs(p, top_ps=p.new_full((len(p),), asked.top_p)) if asked.top_p < 1 else p
        # a chain that begins at entry i predicts token i + 2 first
        rows = (each[first + at - 2 - step] for step, each in enumerate(reads))
        laws = (drafter_law(drafter, frozen, each, asked.temperature) for each in rows)
        hits = torch.stack([hit_probability(p, q, run.tokens[at]) for q in laws])
        parts = (p.max(-1).values, torch.special.entr(p).sum(-1), hits.movedim(-1, 0))
        judged.append(Judged(*(part.cpu().numpy() for part in parts)))
    return judged
