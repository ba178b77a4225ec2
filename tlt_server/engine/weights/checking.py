"""`/weights_checker`: snapshots, resets and checksums of what is in memory, of the target and of the drafter.

reset_tensors            of the target alone, as trainers ask for it before they publish: nothing that they send would
                         bring the drafter back. No target is active then, until a whole one is published
checksum, snapshot, compare     of both, as upstream has them
draft.ACTION             of the drafter alone. A reset leaves out what it shares with the target, and the map of its
                         tokens, which must lead into the vocabulary; the next update of the drafter heals it
"""

from types import SimpleNamespace
from typing import Any

from sglang.srt.managers.io_struct import CheckWeightsReqInput, CheckWeightsReqOutput
from sglang.srt.managers.scheduler_components.weight_updater import (
    SchedulerWeightUpdaterManager,
    _get_draft_model_runner,
)

from tlt_server.engine.weights.drafter import Drafter
from tlt_server.errors import OutOfTurn

OF_DRAFTER = "draft."
RESET = "reset_tensors"


def check_weights(router: Any, recv_req: Any) -> CheckWeightsReqOutput:
    """Does what an upstream `CheckWeightsReqInput` asks of one or both of them; router: the scheduler's `WeightRouter`.
    Raises OutOfTurn: the weights are released, or there is no drafter."""
    router.memory.require_weights()
    action, drafter = recv_req.action, router.draft_worker if router.state.drafter is not None else None
    checked = router.tp_worker.model_runner
    if action.startswith(OF_DRAFTER):
        checked, drafter = _OwnOfDrafter(router), None
    elif action == RESET:
        router.reset()
        drafter = None
    upstream = SchedulerWeightUpdaterManager(
        tp_worker=SimpleNamespace(model_runner=checked),
        draft_worker=drafter,
        tp_cpu_group=router.tp_cpu_group,
        memory_saver_adapter=router.memory_saver_adapter,
        flush_cache=router.flush_cache,
        is_fully_idle=router.is_fully_idle,
    )
    wanted = CheckWeightsReqInput(action=action.removeprefix(OF_DRAFTER), allow_quant_error=recv_req.allow_quant_error)
    return upstream.check_weights(wanted)


class _OwnOfDrafter:
    """Stands for the drafter's model runner where upstream checks one."""

    def __init__(self, router: Any) -> None:
        self._drafter: Drafter | None = router.state.drafter
        if self._drafter is None:
            raise OutOfTurn("this server was started without a drafter")
        self._runner = _get_draft_model_runner(router.draft_worker)

    def check_weights(self, action: str, allow_quant_error: bool) -> Any:
        if action != RESET:
            return self._runner.check_weights(action=action, allow_quant_error=allow_quant_error)
        assert self._drafter is not None
        self._drafter.reset()
        return None
