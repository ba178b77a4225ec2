"""The trainer's end of a weight transfer: rank 0, which opens the store; gloo where vLLM has NCCL."""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

TIMEOUT = timedelta(seconds=60)


def trainer_init(init_info: dict[str, Any]) -> Any:
    """Returns once the server's ranks are there. `group` is what TRL closes."""
    host, port, world = init_info["master_address"], init_info["master_port"], init_info["world_size"]
    store = TCPStore(host, port, world, True, TIMEOUT, use_libuv=False)
    gloo = ProcessGroupGloo(PrefixStore("tlt-gloo", store), 0, world, TIMEOUT)
    return SimpleNamespace(gloo=gloo, group=SimpleNamespace(store=store, socket=None))
