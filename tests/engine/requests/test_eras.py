"""Who waits is of the era in which it will be prefilled; who runs, of that in which it was."""

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.sampling.sampling_params import SamplingParams

from tlt_server.engine.requests.eras import name_era, renaming_waiting


def a_scheduler(era: str = "") -> Any:
    state = SimpleNamespace(era=era)
    return SimpleNamespace(weight_updater=SimpleNamespace(state=state), waiting_queue=[])


class Req:
    """Of upstream's `Req`, what is used here."""

    def __init__(self, extra_key: str | None) -> None:
        self.extra_key, self.sampling_params = extra_key, SamplingParams()
        self.grammar = None


KEYS = st.one_of(st.none(), st.text("era 1|", min_size=1, max_size=8))
ERAS = st.sampled_from(["", "target era 1", "target era 2", "drafter era 1 target era 1", "drafter era 1"])


@given(KEYS, KEYS, ERAS, ERAS)
def test_no_two_eras_and_no_two_namespaces_share_a_prefix(one: str | None, other: str | None, a: str, b: str) -> None:
    """Whatever clients call theirs."""
    reqs = [Req(one), Req(other)]
    for req, era in zip(reqs, (a, b), strict=True):
        name_era(a_scheduler(era), req)
    assert (reqs[0].extra_key == reqs[1].extra_key) == ((one, a) == (other, b))


def test_who_waits_is_renamed_and_who_runs_is_not() -> None:
    scheduler = a_scheduler()
    running, waiting = Req("mine"), Req(None)
    for req in (running, waiting):
        name_era(scheduler, req)
    scheduler.waiting_queue.append(waiting)
    with renaming_waiting(scheduler):
        scheduler.weight_updater.state.era = "target era 1"
    assert (running.extra_key, waiting.extra_key) == ("|mine", "target era 1|")
    name_era(scheduler, running)  # retracted: it will be prefilled anew
    assert running.extra_key == "target era 1|mine"


def test_in_the_first_era_a_prefix_is_keyed_as_upstream_keys_it() -> None:
    req = Req(None)
    name_era(a_scheduler(), req)
    assert req.extra_key is None
