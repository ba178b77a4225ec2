"""What a run shows: a line that moves, a line for each step, and a picture at the end."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tlt_grpo.log import PHASES, HeldOut, Line, Step


class View:
    """Says each line of the log; on a terminal, how far the run is below them."""

    def __init__(self, console: Console, steps: int, done: int = 0) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._progress.add_task("GRPO", total=steps, completed=done)

    def tell(self, line: Line) -> None:
        self._progress.console.print(str(line), highlight=False, soft_wrap=True)
        if isinstance(line, Step):
            said = f"reward {line.reward:.3f}, {line.step_s:.1f} s a step"
            self._progress.update(self._task, completed=line.step, description=said)

    def __enter__(self) -> "View":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


def draw(lines: Sequence[Line], file: Path) -> None:
    """Reward and accuracy; lengths; and where the time of each step went."""
    from matplotlib.figure import Figure  # without a window, and without pyplot's state

    steps = [line for line in lines if isinstance(line, Step)]
    numbers = [step.step for step in steps]
    figure = Figure(figsize=(7, 8), layout="constrained")
    rewards, lengths, seconds = figure.subplots(3, 1, sharex=True)
    rewards.plot(numbers, [step.reward for step in steps], label="reward")
    held_out = [line for line in lines if isinstance(line, HeldOut)]
    rewards.plot([line.step for line in held_out], [line.accuracy for line in held_out], "o", label="held-out accuracy")
    rewards.legend()
    lengths.plot(numbers, [step.length_mean for step in steps], label="mean")
    lengths.plot(numbers, [step.length_max for step in steps], label="longest")
    lengths.set_ylabel("tokens of a response")
    lengths.legend()
    seconds.stackplot(numbers, *([getattr(step, f"{phase}_s") for step in steps] for phase in PHASES), labels=PHASES)
    seconds.set_ylabel("s")
    seconds.set_xlabel("step")
    seconds.legend()
    figure.savefig(file)
