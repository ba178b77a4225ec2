"""A drafter trainer as a server sees it: publishes drafters, and hears what becomes of them."""

import json
import multiprocessing
import threading
from collections.abc import Mapping
from functools import cache
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save

from tests.link.processes import until
from tests.wire.children import CountingLink
from tlt_server.demo import default_paths
from tlt_server.wire.messages import Hello, ModelIdentity
from tlt_server.wire.trainer import Sender


@cache
def target() -> ModelIdentity:
    return ModelIdentity.of(json.loads((default_paths()[0] / "config.json").read_text()))


class DrafterTrainer:
    """Inside a `with`, it listens. tree: of its tree. heard: what its servers said. sent: chunks."""

    def __init__(self, address: str, **tree: int) -> None:
        self.heard: list[Hello] = []
        self.sent = multiprocessing.get_context("spawn").Value("i", 0)
        link = CountingLink(address, self.sent, pause=0.0)
        self._sender = Sender(link, target(), lambda _, hello: self.heard.append(hello), **tree)
        self._thread = threading.Thread(target=self._sender.run)

    def publish(self, version: int, tensors: Mapping[str, torch.Tensor], trained_on: int = 0) -> None:
        self._sender.publish(version, trained_on, save(dict(tensors)))

    def said(self, **state: object) -> list[Hello]:
        """The hellos that say so."""
        return [hello for hello in list(self.heard) if state.items() <= msgspec.structs.asdict(hello).items()]

    def hears(self, seconds: float = 20, **state: object) -> Hello:
        """The first hello that says so."""
        until(lambda: self.said(**state), seconds)
        return self.said(**state)[0]

    def __enter__(self) -> "DrafterTrainer":
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._sender.stop()
        self._thread.join()


def slow_trainer(address: str, version: int, drafter: Path, sent: "Synchronized[int]") -> None:
    """The main function of a process that takes seconds to send a drafter. sent: chunks."""
    link = CountingLink(address, sent, pause=0.02)
    sender = Sender(link, target(), lambda *_: None, chunk_bytes=16 << 10)
    sender.publish(version, 0, (drafter / "model.safetensors").read_bytes())
    sender.run()
