"""`python -m tests.trainer.whole_loop FOLDER`: server, drafter trainer and a target that changes, by hand.

The server begins with a drafter that has learnt nothing. Rollouts go on all the time; after every so many the target
gets a little noise, by SGLang's route. Each round prints a line.
"""

import argparse
import json
import sys
from pathlib import Path

from tlt_client import Client, SamplingParams

from tests.server.trainer import Trainer, buckets, noisy, tensors_of
from tests.trainer.stand_in import Running
from tlt_server.demo import default_paths
from tlt_server.demo.task import problems
from tlt_server.process import running_module

SAMPLING = SamplingParams(temperature=1.0, max_new_tokens=256)


def main(folder: Path, rounds: int, every: int) -> None:
    trainer = Running(folder / "trainer", "passes = 30.0")
    flags = ["--drafter", "auto", "--trainer", trainer.control]
    with (
        trainer.process(),
        running_module(["tlt_server", "serve"], flags, folder / "server.log", start_timeout=180) as server,
        Client(server.url) as client,
    ):
        for number in range(rounds):
            if number and number % every == 0:
                publish(server.url, folder / f"target-{number}", number)
            show(client, trainer, number)


def publish(url: str, folder: Path, seed: int) -> None:
    target = Trainer(url)
    for part in buckets(tensors_of(noisy(default_paths()[0], folder, seed, scale=0.01)), 3):
        target.tensor(part, weight_version=f"step {seed}", flush_cache=False).raise_for_status()
    target.http.close()


def show(client: Client, trainer: Running, number: int) -> None:
    prompts = [problem.prompt for problem in problems(16, seed=number)]
    rollouts = client.generate_batch(prompts, SAMPLING)
    lengths = [each.accept_length for each in rollouts if each.accept_length]
    status, versions = trainer.status(), client.status().versions
    line = {
        "round": number,
        "target": versions and versions.target.version,
        "drafter": versions and versions.drafter and versions.drafter.live.version,
        "trained_on": versions and versions.drafter and versions.drafter.live.trained_on,
        "accept_length": round(sum(lengths) / len(lengths), 2) if lengths else None,
    }
    kept = ("state", "steps", "loss", "frozen", "published", "candidate", "live", "tokens_received", "tokens_dropped")
    sys.stdout.write(json.dumps(line | {name: status.get(name) for name in kept}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--every", type=int, default=6)
    arguments = parser.parse_args()
    main(arguments.folder, arguments.rounds, arguments.every)
