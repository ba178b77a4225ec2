"""Requests share a cached prefix only with those of their own era, by SGLang's namespaces of the prefix cache.

An era ends with each write to the target, and with a drafter that nobody trusted (engine/weights/drafter.py). A request
is of the era in which it is prefilled: one that waits takes the name of each new era; one that runs, or is prefilled in
chunks, keeps its own, and what it adds to the cache stays in that.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tlt_server.engine.requests.continued import begin_grammar


def name_era(scheduler: Any, req: Any) -> None:
    """A request begins to wait for a prefill, its first one or, retracted, another one."""
    if "own_extra_key" not in vars(req):
        begin_grammar(req)  # here, for here all pass once their grammars are compiled
    own = vars(req).setdefault("own_extra_key", req.extra_key)
    era = scheduler.weight_updater.state.era
    # the era first, even where it is empty: whatever a client calls its namespace, it is in no other era's
    req.extra_key = f"{era}|{own or ''}" if era or own else None


@contextmanager
def renaming_waiting(scheduler: Any) -> Iterator[None]:
    """Whatever begins another era inside: those who wait are of the new one. (A grammar's queue leads to this one.)"""
    before = scheduler.weight_updater.state.era
    yield
    if scheduler.weight_updater.state.era != before:
        for req in scheduler.waiting_queue:
            name_era(scheduler, req)
