"""Which weights sampled which token: noted when a step's result is settled, from what was active at its launch.

Under overlap a step is settled after the next one was launched. Nothing is noted at a launch; where weights change in
between, the results that are still under way are stamped with what was active before.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tlt_server.engine.decode.history import tokens_of
from tlt_server.engine.weights.state import Stamp
from tlt_server.metrics import count_history, drafted_of

KEY = "weight_versions"
"""One `Stamp` a token, in a request's `customized_info`: upstream cuts it as it cuts the tokens, for streams too."""


@contextmanager
def stamping_launched(scheduler: Any) -> Iterator[None]:
    """Whatever changes the active weights inside: the steps under way keep the stamp of before."""
    state = scheduler.weight_updater.state
    before = state.stamp
    try:
        yield
    finally:
        if (now := state.stamp) != before:
            if (now.target_version, now.drafter_version) != (before.target_version, before.drafter_version):
                state.speculation.weights_changed()
            for _, result in getattr(scheduler, "result_queue", ()):
                if not hasattr(result, "stamp"):
                    result.stamp = before


def credit_tokens(scheduler: Any, batch: Any, result: Any) -> None:
    """Notes for each live request of a result who sampled its tokens, before they are appended to it, and whose its
    features are; and tells the drafter, on every rank, what was accepted of its drafts.

    result: the batch's `GenerationBatchResult`; the tokens need not have arrived on the CPU.
    """
    state = scheduler.weight_updater.state
    if not scheduler.is_generation:
        return
    stamp = getattr(result, "stamp", None) or state.stamp
    late = result.copy_done is not None and result.copy_done.query()
    if result.copy_done is not None:
        result.copy_done.synchronize()
    arm = getattr(result, "arm", None)
    decode = state.speculation.there and batch.forward_mode.is_decode()
    sampled = zip(batch.reqs, _sampled(batch, result), strict=True)
    live = [(req, count) for req, count in sampled if not (req.finished() or req.is_retracted)]
    if state.history is not None:
        state.history.credited(live, result)
    if decode and state.vocabulary is not None:
        state.vocabulary.sampled(*tokens_of(result, len(batch.reqs)))
    if scheduler.ps.attn_tp_rank == 0:  # the one that speaks to clients
        for req, count in live:
            _credit(req, count, stamp)
        if decode:
            _count_passes(batch.reqs, live, result, arm)
    if (tapped := getattr(result, "tapped", None)) is not None:
        tapped.credit(live, stamp)
    if state.step_log is not None:
        tokens = {req.rid: count for req, count in live}
        state.step_log.note(batch.forward_mode.is_decode(), stamp.drafter_version, tokens, arm)
    with stamping_launched(scheduler):
        state.publications.tick()
        if state.history is not None and state.show_history:
            count_history(*state.history.untold())
        if decode:
            accepted = [(req.rid, count - 1) for req, count in live]
            state.settled(stamp.drafter_version, arm, len(batch.reqs), accepted, late)


def _sampled(batch: Any, result: Any) -> list[int]:
    """How many tokens a result gives each request, as long as its grammar and its end take none back."""
    if batch.forward_mode.is_extend():
        return [int(req.inflight_middle_chunks <= 0) for req in batch.reqs]
    if not batch.forward_mode.is_decode():
        return [0] * len(batch.reqs)
    accepted = result.accept_lens
    return [1] * len(batch.reqs) if accepted is None else accepted.tolist()


def _count_passes(reqs: list[Any], live: list[tuple[Any, int]], result: Any, arm: Any) -> None:
    """Counts the drafts that a pass verified, in a field of upstream's that no EAGLE worker uses and that reaches the
    response (api/rollouts/requests.py). What upstream is about to count of a pass that verified none, it takes back."""
    if arm is not None:
        drafted = dict(zip(map(id, reqs), drafted_of(result, len(reqs)), strict=True))
    for req, _ in live:
        if arm is not None:
            req.spec_num_cap_tokens += drafted[id(req)]
            continue
        req.spec_verify_ct -= 1
        req.update_spec_correct_drafts_histogram(0)
        req.spec_correct_drafts_histogram[0] -= 2


def _credit(req: Any, count: int, stamp: Stamp) -> None:
    if req.customized_info is None:
        req.customized_info = {}
    stamps = req.customized_info.setdefault(KEY, [])
    del stamps[len(req.output_ids) :]  # a grammar may have taken back what the step before gave
    stamps += [stamp] * count
