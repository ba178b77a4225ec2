"""The gate at work: the drafter in training against the active one, on the same held-out features."""

import logging
from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

import torch

from tlt_server.errors import ConfigError
from tlt_server.trainer.config import Gate
from tlt_server.trainer.learn.loop import Trainer
from tlt_server.trainer.learn.memory import move
from tlt_server.trainer.learn.network import Network
from tlt_server.trainer.learn.packing import Pack, Run, pack
from tlt_server.trainer.publish.gate import accept_length
from tlt_server.trainer.publish.published import Published

log = logging.getLogger(__name__)


class Verdict(NamedTuple):
    """Expected accept lengths of candidate and active drafter; the candidate's network, which goes on learning."""

    candidate: float
    live: float
    network: Network


def candidate(trainer: Trainer, packs: Sequence[Pack], gate: Gate) -> tuple[float, Network]:
    """The drafter in training, averaged or as it is: the one whose expected accept length is longer, and that. Raises
    ValueError: no run is long enough to judge by."""
    both = (trainer.average, trainer.network)
    judged = [accept_length(each, trainer.frozen, packs, gate.depth, gate.temperature) for each in both]
    return max(zip(judged, both, strict=True), key=itemgetter(0))


class Judge:
    """Compares drafters. last: the last verdict. start: the drafter that training began with, taken for any active one
    that is not among `published`."""

    def __init__(self, gate: Gate, entries: int, start: Network, published: Published, device: torch.device) -> None:
        self._gate, self._entries, self._published, self._device = gate, entries, published, device
        self._start = start.to(device)
        self._live: tuple[int, Network] = (0, self._start)
        self.last: Verdict | None = None

    def compare(self, trainer: Trainer, held_out: Sequence[Run], active: int) -> Verdict | None:
        """None where no run is long enough to judge by. held_out: of the target whose embedding and head the trainer
        has. active: version of the servers' drafter."""
        packs = pack(held_out, self._entries, self._device)
        try:
            live = accept_length(self._network(active), trainer.frozen, packs, self._gate.depth, self._gate.temperature)
            expected, network = candidate(trainer, packs, self._gate)
        except ValueError as error:
            log.debug("the drafter cannot be judged yet: %s", error)
            return None
        self.last = Verdict(expected, live, network)
        return self.last

    def rehearse(self, trainer: Trainer, packs: Sequence[Pack]) -> None:
        """Compiles what a judgement runs."""
        accept_length(self._start, trainer.frozen, packs, self._gate.depth)

    def move(self, device: torch.device) -> None:
        """To another device, as `Trainer.move`."""
        if device != self._device:
            self._device = device
            for network in {self._start, self._live[1]}:
                move(network, device)

    def _network(self, version: int) -> Network:
        if version != self._live[0]:
            known = None
            try:
                known = self._published.network(version)
                if known is None and version:
                    log.warning("the active drafter %d is not of this trainer: judged as the first one", version)
            except ConfigError as error:
                log.warning("the active drafter %d is judged as the first one: %s", version, error)
            self._live = version, self._start if known is None else known.to(self._device)
        return self._live[1]
