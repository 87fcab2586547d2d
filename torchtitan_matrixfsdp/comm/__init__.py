"""Transports over a process group, exact traffic counters and plan agreement.

Imports ``layout`` and torch, nothing else of this package.
"""

from torchtitan_matrixfsdp.comm.agreement import PlanDisagreementError, agree_on_plan
from torchtitan_matrixfsdp.comm.traffic import Traffic, TrafficCounter
from torchtitan_matrixfsdp.comm.transport import (
    TRANSPORTS,
    P2PTransport,
    Transport,
    TransportFactory,
    transport_factory,
    view_segment,
)

__all__ = [
    "TRANSPORTS",
    "P2PTransport",
    "PlanDisagreementError",
    "Traffic",
    "TrafficCounter",
    "Transport",
    "TransportFactory",
    "agree_on_plan",
    "transport_factory",
    "view_segment",
]
