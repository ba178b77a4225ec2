"""What a rank other than 0 does: for each step that it is asked to, the gradients of the packs that it is sent."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from tlt_server.trainer.learn.chains import Frozen
from tlt_server.trainer.learn.loop import learn
from tlt_server.trainer.learn.losses import Objective
from tlt_server.trainer.learn.memory import release
from tlt_server.trainer.learn.network import Network, network
from tlt_server.trainer.learn.packing import Pack
from tlt_server.trainer.learn.team import End, Free, Join, Learn, Line


def assist(leader: Line, objective_of: Callable[[Mapping[str, Any]], Objective]) -> None:
    """Until the leader says that training is over. objective_of: what a drafter with this config learns by. Raises
    RankLost: the leader is gone."""
    helper: Helper | None = None
    while not isinstance(order := leader.hear(), End):
        match order:
            case Join(config):
                helper = Helper(leader, config, objective_of(config))
            case Learn():
                assert helper is not None
                helper.learn(order)
            case Free():
                assert helper is not None
                helper.free()
                leader.tell(order)


class Helper:
    """config: of the drafter."""

    def __init__(self, leader: Line, config: Mapping[str, Any], objective: Objective) -> None:
        self._leader, self._config, self._objective = leader, config, objective
        self._network: Network | None = None
        self._frozen: Frozen | None = None

    def learn(self, order: Learn) -> None:
        """Its part of a step, into the weights that the leader sends, from the packs that follow, and back."""
        leader = self._leader
        if self._network is None:
            with leader.device:
                self._network = network(self._config)
        leader.receive(self._network.state_dict().values())
        if order.frozen is not None:
            embedding, head = leader.receive_like((order.frozen.embedding, order.frozen.head))
            self._frozen = Frozen(embedding, head, order.frozen.version)
        assert self._frozen is not None
        packs = [self._receive(pack) for pack in order.packs]
        self._network.zero_grad()
        loss = learn(self._network, self._frozen, self._objective, packs, order.chains)
        weights = list(self._network.parameters())
        leader.send((loss, *(torch.zeros_like(each) if each.grad is None else each.grad for each in weights)))

    def _receive(self, pack: Pack) -> Pack:
        received = self._leader.receive_like(pack.tensors.values())
        return replace(pack, **dict(zip(pack.tensors, received, strict=True)))

    def free(self) -> None:
        """Leaves the GPU to others, but for what CUDA and NCCL hold themselves."""
        self._network = self._frozen = None
        release(self._leader.device)
