"""Settings that a client sends, judged as a whole: every fault is named, or all of them are taken."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from tlt_client import schemas

from tlt_server.config.arm import Arm, Source, sizes
from tlt_server.errors import ConfigError
from tlt_server.strategy.arms import Bucket, Choice

MODES = ("bandit", "paper", "pinned", "off")


def to_client(arm: Choice) -> schemas.Arm | None:
    """An arm as the client knows it."""
    return None if arm is None else schemas.Arm(*sizes(arm), arm.source.value)


def from_client(arm: schemas.Arm | None) -> Choice:
    """An arm that a client wrote; ConfigError where it is none."""
    if arm is None:
        return None
    if arm.source not in list(Source):
        raise ConfigError(f"source {arm.source!r}: one of {', '.join(Source)}")
    return Arm(arm.num_steps, arm.topk, arm.num_draft_tokens, Source(arm.source))


def to_buckets(buckets: Sequence[schemas.SelectionBucket]) -> list[Bucket]:
    """Buckets without a fault."""
    return [Bucket(bucket.first, tuple(map(from_client, bucket.arms))) for bucket in buckets]


def faults(update: schemas.StrategyUpdate, captured: Mapping[Arm, int], largest: int) -> list[str]:
    """What is wrong with settings, one line each.

    captured: the largest batch size that each arm has CUDA graphs for. largest: that the server runs.
    """
    found = []
    if update.mode not in MODES:
        found.append(f"mode {update.mode!r}: one of {', '.join(MODES)}")
    if not 0 <= update.epsilon <= 1:
        found.append(f"epsilon {update.epsilon}: must lie between 0 and 1")
    if update.window < 1:
        found.append(f"window {update.window}: must be at least 1")
    if not 0 <= update.exploration <= 0.5:
        found.append(f"exploration {update.exploration}: must lie between 0 and 0.5, as a share of decoding time")
    if update.mode == "pinned" and update.pinned is None:
        found.append("pinned: mode pinned needs an arm; for plain decoding, ask for mode off")
    found += [f"pinned: {fault}" for fault in _arm(update.pinned, captured, 1)]
    return found + list(_buckets(update.buckets, captured, largest) if update.buckets is not None else ())


def _arm(arm: schemas.Arm | None, captured: Mapping[Arm, int], batch: int) -> Iterator[str]:
    """What is wrong with an arm at batches up to this size."""
    try:
        known = from_client(arm)
    except ConfigError as error:
        yield str(error)
        return
    if known is not None and known not in captured:
        yield f"arm {known} was not captured: choose from {', '.join(map(str, captured)) or 'off alone'}"
    elif known is not None and captured[known] < batch:
        yield f"arm {known} was captured for batches up to {captured[known]}, not {batch}: leave it to smaller ones"


def _buckets(buckets: Sequence[schemas.SelectionBucket], captured: Mapping[Arm, int], largest: int) -> Iterator[str]:
    if not buckets or buckets[0].first != 1:
        yield "buckets: the first must begin at batch size 1"
    for before, after in pairwise(buckets):
        if after.first <= before.first:
            yield f"bucket from {after.first}: must begin above the one before it, which begins at {before.first}"
    for bucket, last in zip(buckets, [*(bucket.first - 1 for bucket in buckets[1:]), largest], strict=True):
        found = [fault for arm in bucket.arms for fault in _arm(arm, captured, last)]
        if bucket.first > largest:
            found.append(f"this server runs batches up to {largest}")
        if not bucket.arms:
            found.append("needs an arm; null is off")
        if len(set(bucket.arms)) < len(bucket.arms):
            found.append("names an arm twice")
        yield from (f"bucket from {bucket.first}: {fault}" for fault in found)
