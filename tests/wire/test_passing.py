"""Drafters from server to server."""

import msgspec

from tests.wire.ends import HELLO, NewServer, NewTrainer, Server, drafter, holds, step_until


def named(number: int) -> object:
    return msgspec.structs.replace(HELLO, server=f"host{number}:30000")


def test_few_fetch_from_the_trainer(new_trainer: NewTrainer, new_server: NewServer) -> None:
    trainer = new_trainer(pays=0)
    servers: list[Server] = [new_server(trainer, hello=named(number)) for number in range(7)]
    members = trainer.sender._tree.members
    step_until(lambda: sum(bool(each.door) for each in members.values()) == 7, trainer, *servers)
    trainer.publish(1, 0, drafter(1, 100))
    step_until(lambda: all(each.drafters() for each in servers), trainer, *servers)
    for each in servers:
        assert holds(each.folder / "drafter-1.safetensors", drafter(1, 100))
    print(trainer.sender._tree._places)
    assert trainer.link.read < 500
