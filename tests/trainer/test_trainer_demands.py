"""Steps that are asked for: how many are left, when they are over, and who comes too early."""

import asyncio
from collections.abc import Callable, Iterator

from tlt_client.schemas import TrainedUntil

from tlt_server.trainer.learn.demands import Demands


async def never() -> bool:
    return False


async def at_once() -> bool:
    return True


def meet(demands: Demands, steps: int, within_s: float, train: Callable[[], Iterator[None]]) -> tuple[int, bool] | None:
    """What is met while `train` goes on, a turn of the trainer's loop at a time."""

    async def both() -> tuple[int, bool] | None:
        asking = asyncio.create_task(demands.meet(steps, within_s, never))
        for _ in train():
            await asyncio.sleep(0)
        return await asking

    return asyncio.run(both())


def test_steps_are_taken_then_judged_then_over() -> None:
    demands, lasts = Demands(), list[bool]()

    def train() -> Iterator[None]:
        yield
        while demands.left:
            lasts.append(demands.take())
            if not lasts[-1]:
                demands.settle()  # nothing is judged: some are left
            yield
        demands.settle()

    assert demands.left == 0
    assert meet(demands, 3, 60.0, train) == (3, True)
    assert lasts == [False, False, True]
    assert demands.left == 0


def test_steps_that_nobody_wants_judged_are_over_once_they_are_taken() -> None:
    demands, due = Demands(), list[bool]()

    async def both() -> tuple[int, bool] | None:
        asking = asyncio.create_task(demands.meet(2, 60.0, never, "taken"))
        await asyncio.sleep(0)
        while demands.left:
            due.append(demands.take())
        return await asking

    assert asyncio.run(both()) == (2, True)
    assert due == [False, False]


def test_a_judgement_may_be_asked_for_without_steps() -> None:
    async def over(until: TrainedUntil) -> list[bool]:
        demands, found = Demands(), list[bool]()
        asking = asyncio.create_task(demands.meet(0, 60.0, never, until))
        await asyncio.sleep(0)
        demands.settle()  # the loop was on its way there
        found += [asking.done(), demands.is_due(), demands.is_due(), demands.left > 0]
        demands.settle()
        assert await asking == (0, True)
        return found

    assert asyncio.run(over("judged")) == asyncio.run(over("active")) == [False, True, False, False]
    assert asyncio.run(over("taken")) == [False, False, False, False]
    assert not Demands().is_due()


def test_what_is_on_its_way_is_waited_for_unless_judged_suffices() -> None:
    async def over(until: TrainedUntil) -> tuple[int, bool] | None:
        demands = Demands()
        asking = asyncio.create_task(demands.meet(1, 0.02, never, until))
        await asyncio.sleep(0)
        assert demands.take(), "it is to be judged"
        demands.settle(on_its_way=True)
        return await asking

    assert asyncio.run(over("judged")) == (1, True)
    assert asyncio.run(over("active")) == (1, False)


def test_whoever_waits_no_longer_makes_way_for_others() -> None:
    demands = Demands()

    def train() -> Iterator[None]:
        yield
        demands.take()

    assert meet(demands, 2, 0.02, train) == (1, False)
    assert demands.take(), "a step that was under way is the last one"
    demands.settle()
    assert meet(demands, 1, 0.02, lambda: iter(())) == (0, False)


def test_nobody_wants_it_judged_once_who_asked_for_steps_alone_is_gone() -> None:
    demands = Demands()
    assert asyncio.run(demands.meet(5, 0.02, never, "taken")) == (0, False)
    assert not demands.take(), "a step that was under way"


def test_steps_of_who_is_gone_are_not_taken() -> None:
    demands = Demands()
    assert asyncio.run(demands.meet(5, 3600, at_once)) == (0, False)
    assert demands.left == 0


def test_one_is_met_at_a_time() -> None:
    async def both() -> list[tuple[int, bool] | None]:
        return await asyncio.gather(demands.meet(1, 0.05, never), demands.meet(1, 0.05, never))

    demands = Demands()
    assert asyncio.run(both()) == [(0, False), None]
