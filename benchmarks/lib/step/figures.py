"""What runs of one seed say, as figures of that seed; and of all seeds together, what is claimed."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median

from tlt_grpo.log import Step

from benchmarks.lib.step.plan import (
    FROZEN,
    MODES,
    MUTED,
    OFF,
    ON_POLICY,
    ONLINE,
    PLAIN,
    Plan,
    rollouts,
)
from benchmarks.lib.step.policy import Learner
from benchmarks.lib.step.replay import ACCEPT_LENGTHS, Replay
from benchmarks.lib.step.running import Run, Taken
from benchmarks.lib.step.same import same
from tlt_server.results import Figures

PHASES = ("rollout", "grade", "learn", "offload", "draft", "publish")
_STEP = re.compile(r"step_sum_s_([a-z]+)_(\w+)_seed_(\d+)")

Steps = Mapping[int, float]
"""Seconds, by a step's number."""


def of_run(run: Run, plan: Plan, learner: Learner, end: str) -> Figures:
    """Medians over the counted steps of an arm; rewards and times of all of them. end: batch and seed, in the names."""
    counted = run.steps[min(plan.uncounted, len(run.steps) - 1) :]
    name, steps = f"{run.arm}_{end}", [taken.step for taken in counted]
    took = {phase: [getattr(step, f"{phase}_s") for step in steps] for phase in PHASES}
    figures: Figures = {f"{phase}_s_{name}": median(each) for phase, each in took.items() if any(each)}
    whole = [taken.whole_s for taken in counted]
    figures |= {f"step_s_{name}": median(whole), f"step_sum_s_{name}": sum(whole), f"counted_steps_{name}": len(whole)}
    figures |= {f"step_min_s_{name}": min(whole), f"step_max_s_{name}": max(whole)}
    figures[f"rollout_share_{name}"] = sum(took["rollout"]) / sum(whole)
    figures[f"bubble_{name}"] = 1 - sum(map(sum, took.values())) / sum(whole)
    tokens = figures[f"tokens_{name}"] = sum(step.tokens for step in steps)
    figures[f"throughput_{name}"] = tokens / sum(whole)
    figures[f"accept_length_{name}"] = fmean(step.accept_length or 1.0 for step in steps)
    for number, taken in enumerate(run.steps, 1):
        figures |= {f"reward_{name}_step_{number}": taken.step.reward, f"whole_s_{name}_step_{number}": taken.whole_s}
    figures |= (
        _ages(steps, name)
        if rollouts(run.mode) != ON_POLICY
        else {f"tokens_per_s_{name}": tokens / sum(took["rollout"])}
    )
    if run.held_out:
        figures |= {f"accuracy_{name}": fmean(run.held_out), f"held_out_{name}": len(run.held_out)}
    return figures | _learning(counted, learner, name) | _training(counted, name)


def _ages(steps: Sequence[Step], name: str) -> Figures:
    """Of tokens, in publications."""
    return {
        f"age_mean_{name}": fmean(step.age_mean for step in steps),
        f"age_max_{name}": max(step.age_max for step in steps),
        f"too_old_{name}": fmean(step.too_old for step in steps),
    }


def _learning(counted: Sequence[Taken], learner: Learner, name: str) -> Figures:
    """What the update took, at which rate, and what the self-checks found."""
    learnt = [(taken.step.learnt, taken.check_s) for taken in counted if taken.step.learnt is not None]
    if not learnt:
        return {}
    operations = 6 * learner.multiplied * sum(each.tokens for each, _ in learnt)
    figures: Figures = {
        f"passes_s_{name}": median(each.passes_s - check_s for each, check_s in learnt),
        f"check_s_{name}": median(check_s for _, check_s in learnt),
        f"optimiser_s_{name}": median(each.optimiser_s for each, _ in learnt),
        f"update_tflops_{name}": operations / sum(each.passes_s - check_s for each, check_s in learnt) / 1e12,
        f"mismatch_{name}": median(each.mismatch for each, _ in learnt),
    }
    if cosines := [cosine for taken in counted for cosine in taken.cosines]:
        figures[f"cosine_min_{name}"] = min(cosines)
    return figures


def _training(counted: Sequence[Taken], name: str) -> Figures:
    """What the drafter learnt from, which drafters were in force, and what was used of the card."""
    figures: Figures = {
        f"packs_{name}": sum(taken.step.drafter_steps for taken in counted),
        f"drafters_{name}": len({version for taken in counted for version in taken.step.drafter_versions}),
    }
    if used := max(taken.used_gb for taken in counted):
        figures[f"used_gb_{name}"] = used
    return figures


def requests(runs: Iterable[Run]) -> Figures:
    """Of all steps."""
    steps = [taken.step for run in runs for taken in run.steps]
    failed = sum(step.failed_requests for step in steps)
    return {"requests": sum(step.responses for step in steps) + failed, "failed_requests": failed}


def replayed(replay: Replay, plan: Plan, end: str) -> Figures:
    """Steps that nobody took, and how well those are told that somebody did."""
    figures: Figures = {f"replay_ratio_{arm}_{end}": ratio for arm, ratio in replay.ratios.items()}
    for prompts in plan.replayed:
        name = f"replayed_{prompts}x{plan.group}_from_{end}"
        times = {arm: replay.steps(arm, prompts, plan.group) for arm in replay.ratios}
        figures |= {f"step_s_{arm}_{name}": median(each) for arm, each in times.items()}
        if FROZEN in times:
            figures[f"step_speedup_{name}"] = sum(times[OFF]) / sum(times[FROZEN])
    for accept_length in ACCEPT_LENGTHS:
        figures[f"step_speedup_accept_{accept_length}_{end}"] = replay.speedup_at(accept_length)
    return figures


def summary(figures: Figures) -> Figures:
    """Over all seeds that are there: the median of their speed-ups, and the worst of what must be small or large."""
    arms_of: dict[str, dict[str, dict[str, Steps]]] = defaultdict(lambda: defaultdict(dict))
    for name in figures:
        if match := _STEP.fullmatch(name):
            arm, what, seed = match.groups()
            arms_of[what][arm][seed] = _counted(figures, f"{arm}_{what}_seed_{seed}")
    made: Figures = {}
    for what, arms in arms_of.items():
        made |= _ratios("step_speedup", what, arms, OFF, FROZEN)
        made |= _ratios("step_speedup_static", what, arms, OFF, "static")
        made |= _ratios("step_speedup_online", what, arms, OFF, ONLINE)
        made |= _ratios("muted_over_frozen", what, arms, MUTED, FROZEN)
        made |= _ratios("off_ratio_to_plain", what, arms, PLAIN, OFF)
        made |= same(figures, what) | _over_on_policy(figures, what)
        if what.endswith("_change"):
            made |= _ratios("online_over_frozen_after_change", what.removesuffix("_change"), arms, FROZEN, ONLINE)
    shares = [value for name, value in figures.items() if name.startswith("bubble_") and name != "bubble_max"]
    rates = [value for name, value in figures.items() if re.match(r"update_tflops_[a-z]+_", name)]
    made |= {"bubble_max": max(shares)} if shares else {}
    made |= {"update_tflops": median(rates)} if rates else {}
    return made


def _counted(figures: Figures, name: str) -> Steps:
    """What the counted steps of an arm took, by their number; they are its last ones."""
    form = re.compile(rf"whole_s_{re.escape(name)}_step_(\d+)")
    took = {int(match[1]): value for key, value in figures.items() if (match := form.fullmatch(key))}
    return {number: took[number] for number in sorted(took)[-int(figures[f"counted_steps_{name}"]) :]}


def _ratios(name: str, what: str, arms: Mapping[str, Mapping[str, Steps]], above: str, below: str) -> Figures:
    """By seed, of the mean step; seeds that have both arms, and steps that both took: they have the same prompts."""
    over = []
    for seed, took in arms.get(above, {}).items():
        other = arms.get(below, {}).get(seed, {})
        if both := took.keys() & other.keys():
            over.append(sum(took[number] for number in both) / sum(other[number] for number in both))
    if not over:
        return {}
    return {f"{name}_{what}": median(over), f"{name}_min_{what}": min(over), f"{name}_max_{what}": max(over)}


def _over_on_policy(figures: Figures, what: str) -> Figures:
    """By arm, a mode's tokens a second of whole steps over those on policy; seeds that have both."""
    base = next((what.removesuffix(f"_{mode}") for mode in MODES if what.endswith(f"_{mode}")), what)
    made: Figures = {}
    for arm in (OFF, FROZEN) if base != what else ():
        form = re.compile(rf"throughput_{arm}_{re.escape(what)}_(seed_\d+)")
        over = [
            value / figures[other]
            for name, value in figures.items()
            if (match := form.fullmatch(name)) and (other := f"throughput_{arm}_{base}_{match[1]}") in figures
        ]
        if over:
            made[f"over_on_policy_{arm}_{what}"] = median(over)
    return made
