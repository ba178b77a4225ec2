"""The gate at work: the drafter in training against the active one, on the same held-out features."""

import copy
import logging
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from tlt_server.errors import ConfigError
from tlt_server.trainer.config import Gate
from tlt_server.trainer.learn.loop import Trainer
from tlt_server.trainer.learn.memory import move
from tlt_server.trainer.learn.network import Network
from tlt_server.trainer.learn.packing import Pack, Run, pack
from tlt_server.trainer.publish.folder import Drafter
from tlt_server.trainer.publish.gate import Judged, Sum, accept_length, by_position, by_request, mean, sure_gain
from tlt_server.trainer.publish.published import Published

log = logging.getLogger(__name__)


KNOWN = 2
"""Drafters that are not read again: the active one, and one that is to be, or was not kept."""


class Verdict(NamedTuple):
    """network: the candidate's, which goes on learning."""

    judged: Judged
    network: Network


def candidate(trainer: Trainer, packs: Sequence[Pack], gate: Gate) -> tuple[dict[str, Sum], Network]:
    """The drafter in training, averaged or as it is: the one whose expected accept length is longer, and that by
    request. Raises ValueError: no run is long enough to judge by."""
    both = (trainer.average, trainer.network)
    sums = [by_request(each, trainer.frozen, packs, gate.depth, gate.temperature) for each in both]
    return max(zip(sums, both, strict=True), key=lambda each: mean(each[0]))


class Judge:
    """Compares drafters. last: the last verdict. start: the drafter that training began with, taken for any active one
    that is not among `published`."""

    def __init__(self, gate: Gate, entries: int, start: Network, published: Published, device: torch.device) -> None:
        self._gate, self._entries, self._published, self._device = gate, entries, published, device
        self._start: Network = start.to(device)
        self._known: dict[int, Network] = {}  # by version, the one asked for last at the end
        self.last: Verdict | None = None

    def compare(
        self, trainer: Trainer, held_out: Sequence[Run], active: int, rejected: int | None = None
    ) -> Verdict | None:
        """None where no run is long enough to judge by. held_out: of the target whose embedding and head the trainer
        has. active: version of the servers' drafter. rejected: of a drafter that looked better here and was not kept by
        the servers, which the candidate must be better than as well."""
        began, packs = time.monotonic(), pack(held_out, self._entries, self._device)
        try:
            rivals = [
                by_request(self._network(each), trainer.frozen, packs, self._gate.depth, self._gate.temperature)
                for each in (rejected, active)  # the active one last, which stays known longest
                if each is not None
            ]
            sums, network = candidate(trainer, packs, self._gate)
        except ValueError as error:
            log.debug("the drafter cannot be judged yet: %s", error)
            return None
        surely = min(sure_gain(sums, each) for each in rivals)
        reaches = by_position(sums), by_position(rivals[-1])
        judged = Judged(mean(sums), mean(rivals[-1]), surely, len(sums), *reaches)
        took = time.monotonic() - began
        told = "judged in %.2f s by %d requests: accept length %.3f, the active drafter's %.3f, surely %+.1f %%"
        log.info(told, took, judged.requests, judged.candidate, judged.live, 100 * surely)
        self.last = Verdict(judged, network)
        return self.last

    def rehearse(self, trainer: Trainer, packs: Sequence[Pack]) -> None:
        """Compiles what a judgement runs."""
        accept_length(self._start, trainer.frozen, packs, self._gate.depth)

    def move(self, device: torch.device) -> None:
        """To another device, as `Trainer.move`."""
        if device != self._device:
            self._device = device
            for network in {self._start, *self._known.values()}:
                move(network, device)

    def publish(self, version: int, drafter: Drafter) -> None:
        """It is active soon, and is judged by then as it is served; to read it takes longer than to judge."""
        served = copy.deepcopy(drafter.network).requires_grad_(False)
        for weight in served.parameters():
            weight.copy_(weight.to(drafter.dtype))
        self._know(version, served)

    def _network(self, version: int) -> Network:
        network: Network = self._known.pop(version) if version in self._known else self._read(version)
        self._know(version, network)
        return network

    def _know(self, version: int, network: Network) -> None:
        self._known[version] = network
        if len(self._known) > KNOWN:
            del self._known[next(iter(self._known))]

    def _read(self, version: int) -> Network:
        known: Network | None = None
        try:
            known = self._published.network(version)
            if known is None and version:
                log.warning("the servers' drafter %d was not published here: judged as the one begun with", version)
        except ConfigError as error:
            log.warning("the servers' drafter %d is judged as the first one: %s", version, error)
        return self._start if known is None else known.to(self._device)
