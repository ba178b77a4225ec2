"""`python -m tests.server.faults --json FILE`: what may befall a trainer, and its line to a server that decodes.

A real server, which begins without a drafter, follows a real trainer over a line that can be cut; rollouts go on all
the time, and are all that the trainer learns from. Whatever is not as it must be ends the command: the trainer resumes,
versions grow, no request fails, and what is in force is what was published.
"""

import argparse
import contextlib
import logging
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import torch
from tlt_client import Client, DrafterUpdate, SamplingParams, TltClientError
from tokenizers import Tokenizer

from benchmarks.lib.training.learner import Learner, states
from tests.server.conftest import PROMPTS
from tests.server.warm import warm_process
from tests.trainer.killed_trainers import Killer, kill_beside_a_stand_in
from tests.trainer.line import Line
from tests.trainer.stand_in import Running as Trainer
from tests.trainer.stand_in import contents, published, until
from tlt_server import results
from tlt_server.demo import default_paths
from tlt_server.demo.reference import Reference
from tlt_server.results import Figures

log = logging.getLogger(__name__)

SAMPLING = SamplingParams(temperature=1, max_new_tokens=64)
SLOW = 1e6
"""Bytes a second of the line while a drafter of 1.8 MB is on its way, so that it can be cut in the middle."""
IN_THE_MIDDLE = 600_000
ALIKE = 0.98
"""Least cosine of a right state, in float32 by other kernels."""
TARGET = default_paths()[0]
BEYOND = 10
"""Versions that the trainer will not publish meanwhile."""
GONE_S = 7.0
"""After which the server has lost its trainer, if the line is silent."""


@dataclass
class Rollouts:
    """Inside a `with`, a few at once go on all the time. done: when, and how many tokens. failed: why."""

    url: str
    done: list[tuple[float, int]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def __enter__(self) -> "Rollouts":
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def rate(self, since: float) -> float:
        """Tokens a second from a moment until now."""
        return sum(tokens for at, tokens in self.done if at > since) / (time.monotonic() - since)

    def _run(self) -> None:
        with Client(self.url) as client:
            while not self._over.is_set():
                try:
                    rollouts = client.generate_batch(PROMPTS[:4], SAMPLING)
                except TltClientError as error:
                    self.failed.append(str(error))
                    continue
                now = time.monotonic()
                self.failed += ["aborted" for each in rollouts if each.aborted]
                self.done += [(now, len(each.tokens)) for each in rollouts]


@dataclass(frozen=True)
class Scene:
    """A server that decodes, its trainer, which does not run yet, and the lines between them.

    wrong: of each drafter that was looked at while it was in force, whether it is another than the trainer published.
    """

    client: Client
    trainer: Trainer
    control: Line
    features: Line
    rollouts: Rollouts
    wrong: list[bool] = field(default_factory=list)

    @property
    def live(self) -> int:
        return self.client.drafter().live.version

    def swapped(self) -> list[int]:
        """Versions that took over, in order."""
        events = self.client.events()
        return [int(event.detail["version"]) for event in events if event.kind == "drafter_swapped"]  # type: ignore

    def connected(self) -> bool:
        trainer = self.client.status().trainer
        return trainer is not None and trainer.connected

    def forget(self) -> None:
        """Puts the drafter of the start in force, so that the trainer's is better, however little it learns now."""
        version = self.client.drafter().newest + BEYOND
        self.client.update_drafter(DrafterUpdate(str(self.trainer.folder / "start"), version))

    def grows(self, when: str) -> float:
        """Waits until a newer drafter than now is in force, for so many seconds."""
        before, began = self.live, time.monotonic()
        until(lambda: self.live > before, f"no drafter after {before} {when}: {self.trainer.log}")
        seconds = time.monotonic() - began
        self.look()
        log.info("drafter %d, %s", self.live, when)
        return seconds

    def look(self) -> None:
        """At the drafter in force."""
        live = self.client.drafter().live
        self.wrong.append(contents(published(self.trainer, live.version)) != contents(Path(live.path)))

    def check(self) -> None:
        """Nothing failed, versions grew, and what is in force is what was published; the trainer is not to run."""
        assert not self.rollouts.failed, self.rollouts.failed
        swapped = self.swapped()
        assert swapped == sorted(set(swapped)), swapped
        self.look()
        assert not any(self.wrong), self.wrong


@contextlib.contextmanager
def scene(folder: Path) -> Iterator[Scene]:
    trainer = Trainer(folder / "trainer", "passes = 1000.0", margin=0)  # one that has learnt all gains little
    settings = folder / "server.toml"
    ends = (address.removeprefix("ipc://") for address in (trainer.control, trainer.features))
    with contextlib.ExitStack() as stack:
        control, features = (stack.enter_context(Line(end)) for end in ends)
        settings.write_text(
            f'drafter = "auto"\n[trainer]\nserver = "a server"\naddress = "{control.address}"\n'
            f'features = "{features.address}"\n'
        )
        start = warm_process(["--tlt-config", str(settings)], folder / "server.log")
        url = stack.enter_context(start).url
        client = stack.enter_context(Client(url))
        client.set_watchdog("observe")  # it would go back from what `forget` puts in force
        yield Scene(client, trainer, control, features, stack.enter_context(Rollouts(url)))


def kill(scene: Scene, count: int, seed: int) -> Figures:
    """Kills the trainer at random moments, and starts it again."""
    killer = Killer(scene.trainer, lambda: None, scene.swapped, random.Random(seed))
    killer.kill(count)
    return {"trainer_kills": count, "checkpoint_step": killer.saved, "recovery_s_kill": killer.recovered_s}


def cut(scene: Scene, count: int) -> Figures:
    """Cuts the line in the middle of a drafter and while features flow, or lets nothing through, in turn."""
    recovered = []
    with scene.trainer.process() as process:
        until(scene.connected, "the link is not there")
        for turn in range(count):
            scene.control.rate = SLOW
            scene.control.after(IN_THE_MIDDLE, scene.control.silence if turn % 2 else scene.control.cut)
            scene.forget()
            until(lambda: not scene.control.is_whole, "no drafter is on its way")
            (scene.features.silence if turn % 2 else scene.features.cut)()
            time.sleep(GONE_S)
            assert not scene.connected()
            assert scene.live < scene.trainer.status()["published"]
            scene.control.rate = 0
            for line in (scene.control, scene.features):
                line.restore()
            recovered.append(scene.grows("after the line was silent" if turn % 2 else "after the line was cut"))
            received = scene.trainer.status()["tokens_received"]
            until(lambda before=received: scene.trainer.status()["tokens_received"] > before, "no features")
        scene.trainer.end(process)
    scene.check()
    return {"line_cuts": count, "recovery_s_cut": max(recovered)}


def mix(scene: Scene, count: int) -> Figures:
    """Cuts the line of features while they flow, or lets nothing through, in turn, and holds each state that arrives
    against transformers' of the same tokens. The trainer is not to run: the trainer's end of the line stands in for it.
    """
    reference = Reference(TARGET, torch.float32, "cpu")
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    prompts = [tuple(tokenizer.encode(prompt).ids) for prompt in PROMPTS[:4]]
    compared = mixed = 0
    with Learner(scene.trainer.features) as learner:
        scene.features.restore()
        until(lambda: learner.tokens, "no features")
        for turn in range(count):
            with ThreadPoolExecutor(1) as pool:
                asked = pool.submit(scene.client.generate_batch, prompts, SAMPLING)
                time.sleep(0.3)
                (scene.features.silence if turn % 2 else scene.features.cut)()
                time.sleep(0.5)
                scene.features.restore()
                rollouts = asked.result()
            for prompt, rollout in zip(prompts, rollouts, strict=True):
                tokens = (*prompt, *rollout.tokens)
                wanted = states(reference.model, tokens)[0]
                sent = learner.of(rollout.rid, {len(tokens) - 2}, seconds=3.0)
                for position, row in ((position, row) for position, rows in sent.items() for row in rows):
                    compared += 1
                    alike = torch.cosine_similarity(row.hidden.float(), wanted[position], dim=0)
                    mixed += bool(row.token != tokens[position] or alike < ALIKE)
    assert compared, "nothing came through"
    assert not mixed
    return {"feature_cuts": count, "features_compared": compared, "features_mixed": mixed}


def stop(scene: Scene, seconds: float) -> Figures:
    """Stops the trainer for a while, and lets it go on."""
    with scene.trainer.process() as process:
        until(scene.connected, "the link is not there")
        began = time.monotonic()
        time.sleep(seconds)
        before, began = scene.rollouts.rate(began), time.monotonic()
        process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        stopped = scene.rollouts.rate(began)  # in batches of a second or more
        process.send_signal(signal.SIGCONT)
        went_on = time.monotonic()
        assert stopped > before / 4, f"{stopped:.0f} tokens/s, {before:.0f} before"
        until(scene.connected, "the link is not there again")
        recovered = time.monotonic() - went_on
        scene.forget()
        scene.grows("after the trainer was stopped")
        scene.trainer.end(process)
    scene.check()
    rates = {"tokens_per_s_before_stop": before, "tokens_per_s_stopped": stopped}
    return {"stop_s": seconds, "recovery_s_stop": recovered} | rates


def measured(folder: Path, kills: int, cuts: int, stop_s: float, seed: int) -> Figures:
    """All faults, on one server."""
    with scene(folder) as at:
        figures: Figures = {"seed": seed} | kill(at, kills, seed) | cut(at, cuts) | stop(at, stop_s) | mix(at, cuts)
        swapped = at.swapped()
        return figures | {
            "drafters_compared": len(at.wrong),
            "wrong_drafters_live": sum(at.wrong),
            "drafters_live": len(swapped),
            "newest_drafter": max(swapped),
            "requests": len(at.rollouts.done),
            "failed_requests": len(at.rollouts.failed),
        }


def killed_alone(folder: Path, kills: int, seed: int) -> Figures:
    killer, server = kill_beside_a_stand_in(folder, kills, seed)
    counts = {"trainer_kills": kills, "checkpoint_step": killer.saved, "drafters_live": len(server.arrived)}
    return {"seed": seed} | counts | {"newest_drafter": server.newest}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.server.faults", description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--cuts", type=int, default=6)
    parser.add_argument("--stop", type=float, default=30.0, metavar="SECONDS")
    parser.add_argument("--stand-in", action="store_true", help="kills alone; the wire's own classes are the server")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    logging.info("seed %d", arguments.seed)
    with tempfile.TemporaryDirectory(prefix="tlt-faults-") as folder:
        if arguments.stand_in:
            figures = killed_alone(Path(folder), arguments.kills, arguments.seed)
        else:
            figures = measured(Path(folder), arguments.kills, arguments.cuts, arguments.stop, arguments.seed)
    result = results.measured_here("faults", ["python", "-m", "tests.server.faults", *sys.argv[1:]], figures)
    if arguments.json:
        results.write(result, arguments.json)
    for name, figure in figures.items():
        logging.info("%s %s", name, figure)


if __name__ == "__main__":
    main()
