"""Rollouts over HTTP from tlt-server, or from any SGLang server."""

from tlt_client.aio import AsyncClient
from tlt_client.client import Client
from tlt_client.errors import (
    Aborted,
    BadRequest,
    ConnectionLost,
    InvalidArgument,
    ProtocolError,
    RequestRefused,
    RequestUnserved,
    ServerError,
    ServerFault,
    ServerUnavailable,
    Timeout,
    TltClientError,
    Unauthorized,
    VersionConflict,
)
from tlt_client.flow import Retry
from tlt_client.rollouts import Chunk, DrafterSpan, FinishReason, Rollout, SpecCounts, TargetSpan
from tlt_client.sampling import SamplingParams
from tlt_client.schemas import (
    Drafter,
    DrafterTrainer,
    DrafterUpdate,
    DrafterVersion,
    Event,
    Load,
    SharedTarget,
    Speculation,
    Status,
    StrategyUpdate,
    Versions,
    Watch,
)
from tlt_client.wire import Prompt

__all__ = [
    "Aborted",
    "AsyncClient",
    "BadRequest",
    "Chunk",
    "Client",
    "ConnectionLost",
    "Drafter",
    "DrafterSpan",
    "DrafterTrainer",
    "DrafterUpdate",
    "DrafterVersion",
    "Event",
    "FinishReason",
    "InvalidArgument",
    "Load",
    "Prompt",
    "ProtocolError",
    "RequestRefused",
    "RequestUnserved",
    "Retry",
    "Rollout",
    "SamplingParams",
    "ServerError",
    "ServerFault",
    "ServerUnavailable",
    "SharedTarget",
    "SpecCounts",
    "Speculation",
    "Status",
    "StrategyUpdate",
    "TargetSpan",
    "Timeout",
    "TltClientError",
    "Unauthorized",
    "VersionConflict",
    "Versions",
    "Watch",
]
