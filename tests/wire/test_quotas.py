"""What a peer may ask of the other end: a trainer's server, and a server's trainer."""

import random

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.lib.safety import hostile
from tests.wire.ends import HELLO, Hands, NewTrainer, Open, drafter, say, step_for, step_until
from tlt_server.errors import WireError
from tlt_server.wire.features import FeatureBatch
from tlt_server.wire.messages import READS_TO_SERVER, READS_TO_TRAINER, ChunksWanted, decode, short
from tlt_server.wire.trainer import HELLOS_A_SECOND


@given(st.randoms(use_true_random=False))
def test_hostile_frames_are_messages_or_wire_errors(draw: random.Random) -> None:
    for _ in range(20):
        for reads in (READS_TO_TRAINER, READS_TO_SERVER):
            try:
                decode(hostile.control(draw), reads)
            except WireError:
                continue
        try:
            FeatureBatch.decode(hostile.features(draw))
        except WireError:
            continue


def test_chunks_are_for_servers_that_have_said_who_they_are(new_trainer: NewTrainer, opened: Open) -> None:
    trainer = new_trainer()
    trainer.publish(1, 0, drafter(0))
    stranger = opened(trainer.link.address, READS_TO_SERVER, "stranger")
    step_until(lambda: trainer.sender._update, trainer)
    update = trainer.sender._update
    assert update is not None
    say(stranger, ChunksWanted(digest=update.digest, start=0, stop=1))
    step_for(0.3, trainer)
    assert stranger.receive() is None


def test_a_server_that_speaks_for_another_is_turned_away(new_trainer: NewTrainer, opened: Open) -> None:
    trainer = new_trainer()
    other = opened(trainer.link.address, READS_TO_SERVER, "other")
    say(other, HELLO)
    step_until(trainer.link.rejected.total, trainer)
    assert not trainer.heard


def test_a_flood_of_messages_is_cut_short(new_trainer: NewTrainer, opened: Open, hands: Hands) -> None:
    trainer = new_trainer(clock=hands)
    server = opened(trainer.link.address, READS_TO_SERVER, HELLO.server)
    say(server, HELLO)
    step_until(lambda: trainer.heard, trainer)
    for _ in range(2 * HELLOS_A_SECOND):
        say(server, HELLO)
        trainer.step()
    step_for(0.2, trainer)
    assert len(trainer.said()) == HELLOS_A_SECOND
    hands.now += 1
    said = len(trainer.heard)
    say(server, HELLO)
    step_until(lambda: len(trainer.heard) > said, trainer)


def test_a_long_name_is_told_by_its_digest() -> None:
    assert short("step-1") == "step-1"
    assert len(short("x" * 257)) == 64
    assert short("x" * 257) != short("x" * 258)
