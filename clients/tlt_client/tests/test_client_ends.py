"""A process that gives up on a weight-update group by gloo, and ends, is not aborted for its threads within torch."""

import subprocess
import sys

import pytest

NOBODY_JOINS = """
from tlt_client.errors import ConnectionLost
from tlt_client.weights.group import Opening
try:
    Opening("127.0.0.1", 2, "gloo", 0.5).group()
except ConnectionLost:
    print("gave up")
"""
NOBODY_RECEIVES = """
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
sending = group.broadcast(torch.zeros(2))
group.lose()
group.close()
print("gave up")
"""


@pytest.mark.slow
@pytest.mark.parametrize("gives_up", [NOBODY_JOINS, NOBODY_RECEIVES], ids=["nobody joins", "nobody receives"])
def test_who_gives_up_and_ends_is_not_aborted(gives_up: str) -> None:
    ended = subprocess.run([sys.executable, "-c", gives_up], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (0, "gave up\n"), ended.stderr
