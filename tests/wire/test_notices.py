"""What a server tells its trainer, and what it is told of the link."""

import pytest
from tlt_client import DrafterTrainer

from tests.wire.ends import (
    Hands,
    NewServer,
    NewTrainer,
    drafter,
    step_for,
    step_until,
)
from tlt_server.wire.server import HELLO_EVERY, SILENCE
from tlt_server.wire.trainer import SILENCE as FORGET_AFTER


def test_every_change_is_told_at_once_and_in_order(
    new_trainer: NewTrainer, new_server: NewServer, hands: Hands
) -> None:
    server = new_server(trainer := new_trainer(), clock=hands)
    step_until(lambda: server.is_connected, trainer, server)
    before = len(trainer.said())
    for version in (1, 2):
        server.change(target_version=version, weight_version=f"step-{version}", shared="")
    server.receiver.settle(4, drafter_version=4, newest_drafter=4)
    server.receiver.settle(5, "rolled back: accept length fell", newest_drafter=5)
    server.receiver.settle(3, "too late")
    server.change(shared="/shared", load=8)
    step_until(lambda: trainer.is_told(shared="/shared"), trainer)
    told = trainer.said()[before:]
    assert [hello.target_version for hello in told] == [1, 2, 2, 2, 2, 2]
    assert [(hello.drafter_version, hello.settled_drafter) for hello in told[2:5]] == [(4, 4), (4, 5), (4, 5)]
    assert [hello.reason for hello in told[2:5]] == [
        "",
        "drafter 5: rolled back: accept length fell",
        "drafter 3: too late",
    ]
    hello = told[-1]
    assert (hello.target_version, hello.weight_version) == (2, "step-2")
    assert (hello.drafter_version, hello.newest_drafter) == (4, 5)


@pytest.mark.slow
def test_what_a_trainer_that_was_away_missed_is_in_the_next_hello_but_for_the_load(
    new_trainer: NewTrainer, new_server: NewServer
) -> None:
    server = new_server(trainer := new_trainer())
    step_until(trainer.said, trainer, server)
    address = trainer.link.address
    trainer.close()
    step_for(0.3, server)
    server.change(target_version=4, load=2)
    step_for(0.2, server)
    trainer = new_trainer(address)
    step_until(trainer.said, trainer, server)
    hello = trainer.said()[0]
    assert (hello.target_version, hello.load) == (4, None)


def test_a_load_is_told_once(new_trainer: NewTrainer, new_server: NewServer, hands: Hands) -> None:
    server = new_server(trainer := new_trainer(), clock=hands)
    step_until(trainer.said, trainer, server)
    server.change(load=7, lent=True)
    step_until(lambda: trainer.is_told(load=7, lent=True), trainer, server)
    hands.now += HELLO_EVERY
    step_until(lambda: trainer.is_told(load=None, lent=True), trainer, server)


def test_the_server_is_told_whether_a_trainer_answers(new_trainer: NewTrainer, new_server: NewServer) -> None:
    hands = Hands()
    server = new_server(trainer := new_trainer(), clock=hands)
    step_until(lambda: server.is_connected, trainer, server)
    hands.now += SILENCE
    step_for(0.05, server)
    step_until(lambda: len(server.heard) == 3, trainer, server)
    assert [message.connected for message in server.said(DrafterTrainer)] == [True, False, True]


@pytest.mark.slow
def test_a_silent_server_is_forgotten(new_trainer: NewTrainer, new_server: NewServer) -> None:
    hands = Hands()
    server = new_server(trainer := new_trainer(clock=hands))
    step_until(trainer.said, trainer, server)
    trainer.publish(1, 0, drafter(1))
    step_until(lambda: trainer.is_told(newest_drafter=1), trainer, server)
    [peer] = trainer.sender._tree.members
    hands.now += FORGET_AFTER
    trainer.step()
    assert not trainer.sender._tree.members
    step_until(lambda: peer in trainer.sender._tree.members, trainer, server)
    assert server.drafters() == [1]
