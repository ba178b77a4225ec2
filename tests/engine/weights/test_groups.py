"""Meeting others: on loopback, and no longer than is said."""

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import psutil
import pytest
import torch.distributed as dist

from tlt_server.engine.rendezvous import loopback_store
from tlt_server.engine.weights import groups
from tlt_server.errors import UpdateRefused
from tlt_server.process import free_port


def asked(**fields: object) -> SimpleNamespace:
    plain = {"master_address": "127.0.0.1", "master_port": free_port(), "rank_offset": 1, "world_size": 2}
    return SimpleNamespace(**plain | {"group_name": "g", "backend": "gloo"} | fields)


@pytest.mark.slow
def test_a_trainer_that_never_comes_is_waited_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "JOIN", timedelta(seconds=1))
    began, updater = time.monotonic(), SimpleNamespace(tp_rank=0, _model_update_group={})
    with pytest.raises(UpdateRefused, match=r"no group with a trainer at 127\.0\.0\.1:\d+ within 1 s"):
        groups.join(updater, asked())
    assert time.monotonic() - began < 20
    assert not updater._model_update_group


@pytest.mark.parametrize("fields", [{"rank_offset": 0}, {"rank_offset": 2}, {"rank_offset": -1}, {"group_name": ""}])
def test_what_cannot_be_joined_is_refused_at_once(fields: dict[str, object]) -> None:
    for tp_rank in (0, 1):
        with pytest.raises(UpdateRefused):
            groups.join(SimpleNamespace(tp_rank=tp_rank, _model_update_group={}), asked(**fields))


def test_ranks_meet_on_loopback() -> None:
    address = loopback_store(port := free_port())
    with ThreadPoolExecutor(2) as pool:
        meet = [pool.submit(next, dist.rendezvous(address, rank, 2, timeout=timedelta(seconds=20))) for rank in (0, 1)]
        (first, *_), (second, *_) = (each.result() for each in meet)
    first.set("a", "b")
    assert second.get("a") == b"b"
    listening = {
        c.laddr.ip for c in psutil.Process().net_connections() if c.status == "LISTEN" and c.laddr.port == port
    }
    assert listening == {"127.0.0.1"}


def test_one_rank_alone_opens_nothing() -> None:
    address = loopback_store(port := free_port())
    next(dist.rendezvous(address, 0, 1))
    assert port not in {c.laddr.port for c in psutil.Process().net_connections() if c.status == "LISTEN"}
