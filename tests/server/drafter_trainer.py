"""A drafter trainer as a server sees it: publishes drafters, and hears what becomes of them."""

import json
import threading
from collections.abc import Mapping
from functools import cache
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import save

from tests.link.processes import until
from tests.wire.children import CountingLink
from tlt_server.demo import default_paths
from tlt_server.wire.messages import READS_TO_TRAINER, Message, ModelIdentity
from tlt_server.wire.sockets import Link
from tlt_server.wire.trainer import Sender

M = TypeVar("M", bound=Message)


@cache
def target() -> ModelIdentity:
    return ModelIdentity.of(json.loads((default_paths()[0] / "config.json").read_text()))


class DrafterTrainer:
    """Inside a `with`, it listens. heard: what its servers said."""

    def __init__(self, address: str) -> None:
        self.heard: list[Message] = []
        self._sender = Sender(Link(address, READS_TO_TRAINER), target(), lambda _, message: self.heard.append(message))
        self._thread = threading.Thread(target=self._sender.run)

    def publish(self, version: int, tensors: Mapping[str, torch.Tensor], trained_on: int = 0) -> None:
        self._sender.publish(version, trained_on, save(dict(tensors)))

    def said(self, kind: type[M]) -> list[M]:
        return [message for message in self.heard if isinstance(message, kind)]

    def hears(self, wanted: Message, seconds: float = 20) -> None:
        until(lambda: wanted in self.heard, seconds)

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
