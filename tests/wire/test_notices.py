"""What a server tells its trainer, and what it is told of the link."""

from tests.wire.ends import (
    Hands,
    NewServer,
    NewTrainer,
    drafter,
    step_for,
    step_until,
)
from tlt_server.wire.messages import (
    DrafterReceived,
    DrafterSwapped,
    Hello,
    Load,
    TargetPublished,
    TargetShared,
)
from tlt_server.wire.server import SILENCE, TrainerLink
from tlt_server.wire.trainer import SILENCE as FORGET_AFTER


def test_notices_go_through_at_once_in_order_and_the_hello_follows(
    new_trainer: NewTrainer, new_server: NewServer, hands: Hands
) -> None:
    server = new_server(trainer := new_trainer(), clock=hands)
    step_until(lambda: trainer.said(Hello), trainer, server)
    notices = [
        TargetPublished(target_version=1, weight_version="step-1"),
        DrafterSwapped(version=4, outcome="live", drafter_version=4),
        DrafterSwapped(version=5, outcome="rolled_back", drafter_version=4, reason="accept length fell"),
        DrafterSwapped(version=3, outcome="refused", drafter_version=4, reason="too late"),
        TargetPublished(target_version=2, weight_version="step-2"),
        TargetShared(target_version=1, path="/late"),
        TargetShared(target_version=2, path="/shared"),
    ]
    server.tell(*notices, Load(running=7, waiting=1))
    step_until(lambda: trainer.said(Load), trainer, server)
    step_until(lambda: len(trainer.said(TargetShared)) == 2, trainer, server)
    assert [message for _, message in trainer.heard if message in notices] == notices
    hello = trainer.said(Hello)[-1]
    assert (hello.target_version, hello.weight_version) == (2, "step-2")
    assert (hello.drafter_version, hello.newest_drafter) == (4, 5)
    assert hello.shared == "/shared"
    server.tell(TargetPublished(target_version=3, weight_version="step-3"))
    step_until(lambda: trainer.said(Hello)[-1].target_version == 3, trainer, server)
    assert trainer.said(Hello)[-1].shared == ""


def test_notices_wait_for_a_trainer_that_is_away_but_load_does_not(
    new_trainer: NewTrainer, new_server: NewServer
) -> None:
    server = new_server(trainer := new_trainer())
    step_until(lambda: trainer.said(Hello), trainer, server)
    address = trainer.link.address
    trainer.close()
    step_for(0.3, server)
    notices = [TargetPublished(target_version=n, weight_version="") for n in range(1, 5)]
    server.tell(Load(running=1, waiting=1), *notices)
    step_for(0.2, server)
    trainer = new_trainer(address)
    step_until(lambda: len(trainer.said(TargetPublished)) == 4, trainer, server)
    assert trainer.said(TargetPublished) == notices
    assert isinstance(trainer.heard[0][1], Hello)
    assert not trainer.said(Load)


def test_the_server_is_told_whether_a_trainer_answers(new_trainer: NewTrainer, new_server: NewServer) -> None:
    hands = Hands()
    server = new_server(trainer := new_trainer(), clock=hands)
    step_until(lambda: TrainerLink(connected=True, rejected=0) in server.heard, trainer, server)
    hands.now += SILENCE
    step_for(0.05, server)
    step_until(lambda: len(server.heard) == 4, trainer, server)
    assert [message.connected for message in server.said(TrainerLink)] == [False, True, False, True]


def test_a_silent_server_is_forgotten(new_trainer: NewTrainer, new_server: NewServer) -> None:
    hands = Hands()
    server = new_server(trainer := new_trainer(clock=hands))
    step_until(lambda: trainer.said(Hello), trainer, server)
    trainer.publish(1, 0, drafter(1))
    step_until(lambda: trainer.said(DrafterReceived), trainer, server)
    hands.now += FORGET_AFTER
    trainer.step()
    step_until(lambda: len(trainer.said(DrafterReceived)) == 2, trainer, server)  # offered as to a new one
    assert server.drafters() == [1]
