"""Responses from the server: every one that was asked for, or an error."""

from collections.abc import Sequence
from typing import NamedTuple

from tlt_client import Client, Rollout, SamplingParams
from tlt_client.errors import RequestUnserved
from tlt_server.demo.task import Problem

from tlt_grpo.errors import GrpoError

PATIENCE = 3
"""Failures that a batch survives."""


class Rollouts(NamedTuple):
    """In the order of their prompts."""

    all: list[Rollout]
    failed: int
    """Requests that were answered by nothing, or by a part, and were sent again."""


class Batch(NamedTuple):
    """What a step learns from: for each response, group by group, its problem and its prompt."""

    problems: list[Problem]
    prompts: list[tuple[int, ...]]
    sampled: Rollouts


def sampling(temperature: float, max_new_tokens: int, seed: int | None = None) -> SamplingParams:
    """The policy's own law: nothing cut off it by the model's generation config, or its logprobs would be another's.

    seed: of a response; None: the server draws one.
    """
    return SamplingParams(
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        top_p=1.0,
        top_k=-1,
        min_p=0.0,
        repetition_penalty=1.0,
        sampling_seed=seed,
    )


def roll_out(
    client: Client, prompts: Sequence[tuple[int, ...]], params: Sequence[SamplingParams], weight_version: str
) -> Rollouts:
    """One response for each prompt, by its parameters, with logprobs, all of them by the weights of that name.

    Raises:
        tlt_client.errors.VersionConflict: these weights are not in force: the server was restarted, say.
        tlt_client.errors.RequestUnserved: too many requests failed.
    """
    done: dict[int, Rollout] = {}
    failed = 0
    while missing := [i for i in range(len(prompts)) if i not in done]:
        try:
            answered = client.generate_batch(
                [prompts[i] for i in missing], [params[i] for i in missing], logprobs=True, version=weight_version
            )
            finished = dict(enumerate(answered))
        except RequestUnserved as error:
            failed += 1
            if failed > PATIENCE:
                raise
            finished = dict(error.finished)
        whole = {missing[i]: rollout for i, rollout in finished.items() if not rollout.aborted}
        failed += len(finished) - len(whole)
        done |= whole
    return Rollouts([done[i] for i in range(len(prompts))], failed)


def ages(rollout: Rollout, newest: int) -> tuple[int, ...]:
    """Of each token, how many publications the weights that sampled it are behind the newest; they are named by number.

    Raises:
        GrpoError: the server does not say which weights those were, or they are none of ours.
    """
    told = [(span.version, span.end - span.start) for span in rollout.weight_versions]
    if sum(count for _, count in told) != len(rollout.tokens):
        raise GrpoError("rollouts: the server does not say which weights sampled which tokens. Take on_policy")
    if other := [version for version, _ in told if not version.isdecimal()]:
        raise GrpoError(f"weights {other[0]!r} have sampled, not ours: was the server restarted? Go on by --resume")
    return tuple(newest - int(version) for version, count in told for _ in range(count))


def accept_length(rollouts: Sequence[Rollout]) -> float | None:
    """Tokens per verifying target pass of all rollouts together, the bonus token counted; None without speculation."""
    counts = [each.spec for each in rollouts if each.spec is not None]
    passes = sum(each.verify_calls for each in counts)
    return 1 + sum(each.accepted_drafts for each in counts) / passes if passes else None
