"""tlt-server as a rollout server of verl 0.9.1. Importing this module registers it, in every process of verl:

- `rollout.name=sglang`: verl starts `tlt-server serve` where it would start SGLang in a process of its own;
- `rollout.name=tlt`: verl attaches to servers that somebody else runs; `checkpoint_engine.backend=tlt` sends weights.
"""

from verl.checkpoint_engine.base import CheckpointEngineRegistry
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry

from tlt_verl.weights import ServerCheckpointEngine

__all__: list[str] = []


def _started() -> type[RolloutReplica]:
    """Calls verl's own loader first: it prepares the process for SGLang's import."""
    _load_sglang()
    from tlt_verl.replica import StartedReplica

    return StartedReplica


def _attached() -> type[RolloutReplica]:
    from tlt_verl.attached import AttachedReplica

    return AttachedReplica


_load_sglang = RolloutReplicaRegistry._registry["sglang"]
RolloutReplicaRegistry.register("sglang", _started)
RolloutReplicaRegistry.register("tlt", _attached)
CheckpointEngineRegistry.register("tlt")(ServerCheckpointEngine)
