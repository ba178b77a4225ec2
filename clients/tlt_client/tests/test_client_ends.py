"""Broadcasts by gloo are looked after: a process that gives up on one, and ends, is not aborted for its threads within
torch; and one that is received takes no longer for that."""

import subprocess
import sys

import pytest

from tlt_client.weights.group import LOOK_EVERY

NOBODY_JOINS = """
from tlt_client.errors import ConnectionLost
from tlt_client.weights.group import Opening
try:
    Opening("127.0.0.1", 2, "gloo", 0.5).group()
except ConnectionLost:
    print("gave up")
"""
JOINED = """
import threading
from datetime import timedelta
import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore
from tlt_client.weights.group import Opening
opening, there = Opening("127.0.0.1", 2, "gloo", 20.0), []
def join():
    store, name = TCPStore("127.0.0.1", opening.asked["master_port"], 2, is_master=False), opening.asked["group_name"]
    for prefix in (name, f"{name}/", "cpu/"):
        store = PrefixStore(prefix, store)
    there.append(ProcessGroupGloo(store, 1, 2, timedelta(seconds=20)))
rank = threading.Thread(target=join)
rank.start()
group = opening.group()
rank.join()
"""
NOBODY_RECEIVES = f"""{JOINED}
sending = group.broadcast(torch.zeros(2))
group.lose()
group.close()
print("gave up")
"""
ONE_BY_ONE = f"""{JOINED}
from statistics import median
from time import monotonic
def took():
    receiving, began = there[0].broadcast(torch.zeros(1000), 0), monotonic()
    group.broadcast(torch.ones(1000)).result()
    seconds = monotonic() - began
    receiving.wait()
    return seconds
print(min(median(took() for _ in range(40)) for _ in range(10)), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("gives_up", [NOBODY_JOINS, NOBODY_RECEIVES], ids=["nobody joins", "nobody receives"])
def test_who_gives_up_and_ends_is_not_aborted(gives_up: str) -> None:
    ended = subprocess.run([sys.executable, "-c", gives_up], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (0, "gave up\n"), ended.stderr


@pytest.mark.slow
def test_a_small_tensor_takes_less_than_the_longest_time_between_two_looks() -> None:
    """At its best of ten, for the sake of busy machines."""
    ended = subprocess.run([sys.executable, "-c", ONE_BY_ONE], capture_output=True, text=True, timeout=60, check=False)
    assert 0 < float(ended.stdout) < LOOK_EVERY, ended.stderr
