"""HTTP schemas of the routes that tlt-server adds under /tlt/v1. The server imports them from here.

Unknown fields are ignored when decoding, so that an older client reads a newer server.
"""

from tlt_client.schemas.fleet import Fleet, FleetEvent, FleetMember, FleetTransaction
from tlt_client.schemas.history import History, HistoryLoad, TokenIds
from tlt_client.schemas.status import AcceptLength, Counters, Load, Models, Status
from tlt_client.schemas.strategy import (
    Arm,
    ArmReport,
    BucketReport,
    CapturedArm,
    CapturedPass,
    Graphs,
    Selection,
    SelectionBucket,
    Speculation,
    StrategyUpdate,
)
from tlt_client.schemas.weights import (
    Drafter,
    DrafterFreeze,
    DrafterTrainer,
    DrafterUpdate,
    DrafterVersion,
    DrafterWatchdog,
    Event,
    SharedTarget,
    Staging,
    TargetShare,
    TargetVersion,
    TrainedSteps,
    TrainedUntil,
    TrainSteps,
    Versions,
    Watch,
)

__all__ = [
    "AcceptLength",
    "Arm",
    "ArmReport",
    "BucketReport",
    "CapturedArm",
    "CapturedPass",
    "Counters",
    "Drafter",
    "DrafterFreeze",
    "DrafterTrainer",
    "DrafterUpdate",
    "DrafterVersion",
    "DrafterWatchdog",
    "Event",
    "Fleet",
    "FleetEvent",
    "FleetMember",
    "FleetTransaction",
    "Graphs",
    "History",
    "HistoryLoad",
    "Load",
    "Models",
    "Selection",
    "SelectionBucket",
    "SharedTarget",
    "Speculation",
    "Staging",
    "Status",
    "StrategyUpdate",
    "TargetShare",
    "TargetVersion",
    "TokenIds",
    "TrainSteps",
    "TrainedSteps",
    "TrainedUntil",
    "Versions",
    "Watch",
]
