"""Which ranks may train, by what servers say of devices and load; the clock is moved by hand."""

import msgspec
import pytest

from tests.wire.ends import HELLO, Hands
from tlt_server.drafter.target import CPU
from tlt_server.trainer.config import SpotSettings
from tlt_server.trainer.workers import Workers

SETTINGS = SpotSettings(on=True, settle_s=2.0, silence_s=5.0, within_s=3.0)


class Scene:
    """Ranks on devices a and b; what is overdue."""

    def __init__(self, settings: SpotSettings = SETTINGS) -> None:
        self.hands, self.overdue = Hands(), list[int]()
        self.devices: dict[str, tuple[str, ...]] = {}
        self.workers = Workers(("a", "b"), settings, self.overdue.append, self.hands)

    def hello(self, server: str, *devices: str) -> None:
        self.devices[server] = devices
        self.workers.hear(f"{server}/1", msgspec.structs.replace(HELLO, devices=devices))

    def load(self, running: int, *servers: str, seconds: float = 0.0, lent: bool = False) -> None:
        """Reports of the servers, after so many seconds."""
        self.hands.now += seconds
        for server in servers:
            told = msgspec.structs.replace(HELLO, devices=self.devices.get(server, ()), load=running, lent=lent)
            self.workers.hear(f"{server}/1", told)

    def states(self) -> list[str]:
        return [worker.state for worker in self.workers.status()]


def test_on_devices_of_its_own_it_trains_always() -> None:
    for settings, devices in ((SETTINGS, ("c",)), (SpotSettings(), ("a", "b"))):
        scene = Scene(settings)
        scene.hello("one", *devices)
        scene.load(3, "one")
        assert scene.workers.training() == (0, 1)
        assert scene.workers.asked() == ()


def test_without_spot_training_no_load_asks_for_a_device() -> None:
    scene = Scene(SpotSettings())
    scene.hello("one", "a", "b")
    scene.load(0, "one")
    scene.load(0, "one", seconds=3)  # it has drained
    scene.load(3, "one", seconds=1)
    scene.hands.now += 60
    scene.workers.tick()
    assert scene.workers.asked() == ()
    assert scene.workers.training() == (0, 1)
    assert not scene.overdue, "nobody is to end it for what it need not give back"


def test_each_rank_by_the_load_on_its_own_device() -> None:
    scene = Scene()
    scene.hello("one", "a")
    assert scene.workers.asked() == (0,)  # until now it was its own, and may hold memory of it
    scene.workers.yielded(0)
    assert scene.states() == ["busy", "training"]
    scene.hello("two", "b")
    scene.workers.yielded(1)
    scene.load(0, "one")
    scene.load(1, "two")
    scene.load(0, "one", seconds=2)
    assert scene.states() == ["training", "busy"]
    scene.load(0, "two", seconds=1)
    scene.load(0, "one", "two", seconds=2)
    assert scene.workers.training() == (0, 1)
    scene.load(1, "one", seconds=1)
    assert (scene.workers.asked(), scene.workers.training()) == ((0,), (1,))
    assert scene.states() == ["training", "training"]  # it has not given its device back
    scene.hands.now += 1
    scene.workers.yielded(0)
    assert scene.states() == ["busy", "training"]


def test_servers_on_one_device_are_all_to_be_drained() -> None:
    scene = Scene()
    scene.hello("one", "a")
    scene.hello("two", "a")
    scene.workers.yielded(0)
    scene.load(0, "one", "two")
    scene.load(1, "two", seconds=1)
    scene.load(0, "one", seconds=2)
    assert scene.states()[0] == "busy"
    for _ in range(2):  # the other one is silent: it is gone
        scene.load(0, "one", seconds=2)
    assert scene.states()[0] == "busy"
    scene.load(0, "one", seconds=2)
    assert scene.states()[0] == "training"


def test_memory_that_is_lent_to_others_is_not_idle() -> None:
    scene = Scene()
    scene.hello("one", "a")
    scene.workers.yielded(0)
    for _ in range(3):
        scene.load(0, "one", seconds=2, lent=True)
    assert scene.states()[0] == "busy"


def test_with_a_slowdown_that_is_allowed_load_makes_a_rank_rest_and_no_more() -> None:
    scene = Scene(msgspec.structs.replace(SETTINGS, slowdown=0.05))
    assert (Scene().workers.paced, scene.workers.paced) == ((), ("a", "b"))
    scene.hello("one", "a")
    scene.workers.yielded(0)
    scene.load(5, "one")
    scene.load(5, "one", seconds=2)
    assert scene.workers.training() == (0, 1), "it has what it needs there, though the server is loaded"
    scene.load(5, "one", seconds=1)
    scene.load(5, "one", seconds=1)
    assert scene.workers.training()
    with scene.workers.computing(CPU):
        scene.hands.now += 0.1
    assert not scene.workers.training()
    scene.hands.now += 1.5
    assert not scene.workers.training(), "it said nothing since, and has its load still"
    scene.load(0, "one")
    assert not scene.workers.training(), "it has not drained yet"
    scene.load(5, "one", seconds=1.6)
    assert scene.workers.training(), "0.1 s are a 20th of what has passed since"
    with scene.workers.computing(CPU):
        scene.hands.now += 1
    scene.load(0, "one")
    scene.load(0, "one", seconds=2.1)
    assert scene.workers.training(), "there is nothing to slow down"
    scene.load(1, "one", lent=True)
    assert scene.workers.asked() == (0,), "whose memory it is has the GPU to itself"


def test_what_was_trained_while_rollouts_had_drained_is_not_held_against_it() -> None:
    scene = Scene(msgspec.structs.replace(SETTINGS, slowdown=0.05))
    scene.hello("one", "a")
    scene.workers.yielded(0)
    scene.load(0, "one")
    scene.load(0, "one", seconds=3)
    for _ in range(20):
        with scene.workers.computing(CPU, 4096):
            scene.load(0, "one", seconds=1)
    scene.load(5, "one", seconds=1)
    assert scene.workers.training() == (0, 1), "no rollout has lost anything yet"
    with scene.workers.computing(CPU, 4096):
        scene.hands.now += 1
    scene.load(5, "one", seconds=1)
    assert not scene.workers.training()


@pytest.mark.parametrize("then", [0, 5])
def test_a_step_that_load_comes_to_or_leaves_is_held_against_it(then: int) -> None:
    scene = Scene(msgspec.structs.replace(SETTINGS, slowdown=0.05))
    scene.hello("one", "a")
    scene.workers.yielded(0)
    scene.load(5 - then, "one")
    scene.load(5 - then, "one", seconds=3)
    with scene.workers.computing(CPU):
        scene.load(then, "one", seconds=3)
    scene.load(5, "one", seconds=1)
    assert not scene.workers.training()


def test_servers_of_other_devices_do_not_make_it_rest() -> None:
    scene = Scene(msgspec.structs.replace(SETTINGS, slowdown=0.05))
    scene.hello("one", "c")
    scene.load(5, "one")
    with scene.workers.computing(CPU):
        scene.hands.now += 0.1
    assert scene.workers.training()


@pytest.mark.parametrize("why", ["load", "silence"])
def test_a_rank_that_does_not_yield_is_overdue_once(why: str) -> None:
    scene = Scene()
    scene.hello("one", "a")
    scene.workers.yielded(0)
    scene.load(0, "one")
    scene.load(0, "one", seconds=2)
    assert scene.workers.training() == (0, 1)
    if why == "load":
        scene.load(1, "one")
    else:
        scene.hands.now += 5.1
        scene.workers.tick()
    assert scene.workers.asked() == (0,)
    for seconds, overdue in ((2.9, []), (0.2, [0]), (9.0, [0])):
        scene.hands.now += seconds
        scene.workers.tick()
        assert scene.overdue == overdue


def test_time_in_each_state_is_counted() -> None:
    scene = Scene()
    scene.hello("one", "a")
    scene.workers.yielded(0)
    scene.load(0, "one", seconds=4)  # busy
    scene.load(0, "one", seconds=2)  # busy, then training
    scene.load(1, "one", seconds=3)
    scene.hands.now += 0.5
    scene.workers.yielded(0)
    scene.hands.now += 7  # busy
    (first, second), began = scene.workers.status(), 16.5
    assert first.seconds == {"busy": 13.0, "idle": 0.0, "training": 3.5}
    assert second.seconds == {"busy": 0.0, "idle": 0.0, "training": began}
    assert (first.yields, first.slowest_yield_s) == (2, 0.5)
