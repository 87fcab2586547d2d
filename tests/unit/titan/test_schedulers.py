"""One schedule over two learning rates, saved and resumed (case 9)."""

from __future__ import annotations

import copy
import json
import logging

import pytest
import torch
import torch.nn as nn
from torchtitan.config import LRScheduler as LRSchedulerConfig
from torchtitan.config import Optimizer as OptimizerConfig

from torchtitan_matrixfsdp.layout import Routing
from torchtitan_matrixfsdp.runtime import OwnerContext, PartitionedReplicas
from torchtitan_matrixfsdp.titan.job_config import MatrixOptimizer
from torchtitan_matrixfsdp.titan.model import OwnerSetup
from torchtitan_matrixfsdp.titan.optimizers import (
    MatrixLRSchedulersContainer,
    build_elementwise_optimizer,
    build_matrix_optimizer,
    build_schedulers,
)

MATRIX_LR, ELEMENTWISE_LR = 0.02, 3e-4
TOTAL = 12
SCHEDULE = LRSchedulerConfig(warmup_steps=3, decay_ratio=0.5, min_lr_factor=0.1)


def make_schedulers(
    matrix_lr: float = MATRIX_LR, elementwise_lr: float = ELEMENTWISE_LR
) -> MatrixLRSchedulersContainer:
    config = OptimizerConfig(lr=elementwise_lr, implementation="foreach")
    context = OwnerContext()
    optimizers = [
        build_matrix_optimizer(
            [nn.Parameter(torch.ones(4, 3))],
            OwnerSetup(Routing((), (), (), ()), None, context, MatrixOptimizer(lr=matrix_lr)),
            config,
            PartitionedReplicas({}, context.counter),
        ),
        build_elementwise_optimizer([nn.Parameter(torch.ones(3))], config),
    ]
    return build_schedulers(optimizers, SCHEDULE, TOTAL)  # type: ignore[arg-type]


def advance(schedulers: MatrixLRSchedulersContainer, steps: int) -> list[list[float]]:
    """The rates that each of the next steps uses."""
    rates = []
    for _ in range(steps):
        rates.append(current_rates(schedulers))
        for scheduler in schedulers:
            scheduler.optimizer.step()
        schedulers.step()
    return rates


def current_rates(schedulers: MatrixLRSchedulersContainer) -> list[float]:
    return [scheduler.optimizer.param_groups[0]["lr"] for scheduler in schedulers]


def base_rates(schedulers: MatrixLRSchedulersContainer) -> list[list[float]]:
    return [scheduler.base_lrs for scheduler in schedulers]


def test_both_follow_one_schedule() -> None:
    rates = advance(make_schedulers(), TOTAL)
    factors = [matrix / MATRIX_LR for matrix, _ in rates]
    assert factors == pytest.approx([elementwise / ELEMENTWISE_LR for _, elementwise in rates])
    assert factors[:4] == pytest.approx([1 / 3, 2 / 3, 1, 1])
    assert 0.1 < factors[-1] < factors[-2] < 1


@pytest.mark.parametrize("steps", [0, 1, 5, 9])
def test_resuming_continues_both_rates(steps: int, caplog: pytest.LogCaptureFixture) -> None:
    """Case 9: the matrix rate does not overwrite AdamW's."""
    uninterrupted = make_schedulers()
    advance(uninterrupted, steps)
    # A checkpoint holds numbers only, whatever it is written with.
    saved = json.loads(json.dumps(uninterrupted.state_dict()))
    resumed = make_schedulers()
    with caplog.at_level(logging.INFO):
        resumed.load_state_dict(saved)
    assert caplog.records == []
    assert base_rates(resumed) == [[MATRIX_LR], [ELEMENTWISE_LR]]
    assert current_rates(resumed) == current_rates(uninterrupted)
    assert [s.get_last_lr() for s in resumed] == [s.get_last_lr() for s in uninterrupted]
    assert resumed.state_dict() == saved
    assert advance(resumed, TOTAL - steps) == advance(uninterrupted, TOTAL - steps)


def test_saving_changes_nothing_and_is_no_live_view() -> None:
    """Case 10."""
    schedulers = make_schedulers()
    advance(schedulers, 2)
    first = schedulers.state_dict()
    kept = copy.deepcopy(first)
    assert set(first) == {"last_epoch", "base_lr.0.0", "base_lr.1.0"}
    assert schedulers.state_dict() == first
    advance(schedulers, 1)
    assert first == kept
    assert schedulers.state_dict()["last_epoch"] == 3


def test_the_checkpoints_rates_win_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    uninterrupted = make_schedulers()
    advance(uninterrupted, 4)
    changed = make_schedulers(matrix_lr=0.5, elementwise_lr=ELEMENTWISE_LR)
    with caplog.at_level(logging.WARNING):
        changed.load_state_dict(uninterrupted.state_dict())
    warning, *more = [record.getMessage() for record in caplog.records]
    assert not more, "only one of the two rates differs"
    assert "[0.02]" in warning and "[0.5]" in warning
    assert "checkpoint.exclude_from_loading" in warning
    assert base_rates(changed) == [[MATRIX_LR], [ELEMENTWISE_LR]]
    assert advance(changed, 5) == advance(uninterrupted, 5)


@pytest.mark.parametrize("key", ["last_epoch", "base_lr.0.0", "base_lr.1.0"])
def test_a_missing_rate_is_an_error(key: str) -> None:
    """Case 13: not a silent default."""
    schedulers = make_schedulers()
    state = schedulers.state_dict()
    del state[key]
    with pytest.raises(KeyError, match=key):
        schedulers.load_state_dict(state)
