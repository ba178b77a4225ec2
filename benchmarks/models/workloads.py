"""What benchmarks serve and ask: embedded models, and problems of the task that they were made for."""

from dataclasses import dataclass
from pathlib import Path

from tlt_server.demo import default_paths
from tlt_server.demo.task import DEMO, LONG, Task

MODELS = ("target", "drafter", "drafter_eagle3")


@dataclass(frozen=True)
class Workload:
    """models: folder of MODELS. task: theirs. longest: tokens of a response; one that runs on ends there."""

    name: str
    models: Path
    task: Task
    longest: int

    @property
    def lengths(self) -> Path:
        """Of the target's own responses (`lib/training/lengths.py`)."""
        return _HERE / self.name / "lengths.json"


_HERE = Path(__file__).parent
WORKLOADS = {
    each.name: each
    for each in (
        Workload("demo", default_paths()[0].parent, DEMO, longest=1024),  # beyond it positions are new to the target
        Workload("long", _HERE / "long", LONG, longest=12_288),  # of 6,000 solutions, the longest has 11,464
    )
}
