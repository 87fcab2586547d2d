"""Transports over a process group, exact traffic counters and plan agreement.

Imports ``layout`` and torch, nothing else of this package.
"""

from torchtitan_matrixfsdp.comm.agreement import (
    PlanDisagreementError,
    agree_on_choice,
    agree_on_plan,
)
from torchtitan_matrixfsdp.comm.traffic import Traffic, TrafficCounter
from torchtitan_matrixfsdp.comm.transport import (
    TRANSPORT_NAMES,
    TRANSPORTS,
    BalancedTransport,
    BroadcastTransport,
    P2PTransport,
    Transport,
    TransportFactory,
    view_segment,
)

__all__ = [
    "TRANSPORTS",
    "TRANSPORT_NAMES",
    "BalancedTransport",
    "BroadcastTransport",
    "P2PTransport",
    "PlanDisagreementError",
    "Traffic",
    "TrafficCounter",
    "Transport",
    "TransportFactory",
    "agree_on_choice",
    "agree_on_plan",
    "view_segment",
]
