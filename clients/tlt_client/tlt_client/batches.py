"""Batches: what belongs to each sample, and what becomes of them all when one fails."""

from collections.abc import Sequence
from typing import Protocol

from tlt_client import errors
from tlt_client.rollouts import Rollout
from tlt_client.sampling import SamplingParams


class Job(Protocol):
    """What concurrent.futures.Future and asyncio.Task have in common."""

    def done(self) -> bool: ...
    def cancelled(self) -> bool: ...
    def exception(self) -> BaseException | None: ...
    def result(self) -> Rollout: ...


def harvest(jobs: Sequence[Job]) -> list[Rollout]:
    """The rollouts in order; or the first failure, which is given the rollouts that are complete."""
    over = {i: job for i, job in enumerate(jobs) if job.done() and not job.cancelled()}
    finished = {i: job.result() for i, job in over.items() if job.exception() is None}
    for i, job in over.items():
        if (error := job.exception()) is not None:
            if isinstance(error, errors.TltClientError):
                error.finished, error.index = finished, i
            raise error
    return [job.result() for job in jobs]


def one_for_each(sampling: SamplingParams | Sequence[SamplingParams] | None, n: int) -> Sequence[SamplingParams]:
    if sampling is None or isinstance(sampling, SamplingParams):
        return [sampling or SamplingParams()] * n
    if len(sampling) != n:
        raise errors.InvalidArgument(f"{len(sampling)} sampling parameters for {n} prompts: give one, or one for each")
    return sampling
