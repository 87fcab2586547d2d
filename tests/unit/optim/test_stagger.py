"""Phases: pure, in range, spread for owners that are not known, and kept by the optimizers."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_matrixfsdp.optim import SOAP, Shampoo, refresh_load, refresh_phases

costs_lists = st.lists(st.integers(0, 10**15), max_size=60)


@given(costs_lists, st.integers(1, 40))
def test_phases_are_pure_and_in_range(costs: list[int], frequency: int) -> None:
    phases = refresh_phases(costs, frequency)
    assert len(phases) == len(costs)
    assert all(0 <= phase < frequency for phase in phases)
    assert phases == refresh_phases(tuple(costs), frequency)


@given(costs_lists, st.integers(1, 40))
def test_no_step_has_more_than_its_share_and_one_matrix(costs: list[int], frequency: int) -> None:
    """On one device: what begins in a stretch ends at most one matrix beyond it."""
    load = refresh_load(costs, refresh_phases(costs, frequency), [0] * len(costs), frequency)
    assert sum(load) == sum(costs)
    assert max(load) <= -(-sum(costs) // frequency) + max(costs, default=0)


def test_phases_by_hand() -> None:
    # They begin at 0, 5 and 14 of 19; with frequency 2 the second stretch begins at 9.5.
    assert refresh_phases([5, 9, 5], 2) == (0, 0, 1)
    assert refresh_phases([5, 9, 5], 19) == (0, 5, 14)
    assert refresh_phases([5, 9, 5], 1) == (0, 0, 0)
    assert refresh_phases([4, 4, 4, 4], 2) == (0, 0, 1, 1)
    assert refresh_phases([4, 4], 10) == (0, 5)
    assert refresh_phases([4, 0], 3) == (0, 2)
    assert refresh_phases([0, 0], 3) == (0, 0)
    assert refresh_phases([], 5) == ()


@pytest.mark.parametrize("frequency", [8, 10, 16, 50])
@pytest.mark.parametrize("world_size", [1, 2, 4, 8, 16])
def test_every_wth_matrix_is_spread(world_size: int, frequency: int) -> None:
    """64 equal matrices, dealt out in turn: no owner has more in a step than its share, rounded up,
    and one, also where W and the frequency share a factor."""
    owners = [index % world_size for index in range(64)]
    phases = refresh_phases([1] * 64, frequency)
    share = -(-64 // (world_size * frequency))
    assert max(refresh_load([1] * 64, phases, owners, frequency)) <= share + 1


def test_refresh_load_by_hand() -> None:
    costs, phases, owners = [5, 9, 5, 1], [1, 0, 1, 1], [0, 0, 1, 0]
    assert refresh_load(costs, phases, owners, 3) == (9, 6, 0)
    assert refresh_load([], [], [], 2) == (0, 0)


@pytest.mark.parametrize("frequency", [0, -1])
def test_what_is_refused(frequency: int) -> None:
    with pytest.raises(ValueError, match=f"frequency: received {frequency}; legal: >= 1"):
        refresh_phases([1], frequency)
    with pytest.raises(ValueError, match=f"frequency: received {frequency}; legal: >= 1"):
        refresh_load([1], [0], [0], frequency)
    with pytest.raises(ValueError, match="costs: received -1"):
        refresh_phases([1, -1], 2)
    with pytest.raises(ValueError, match=r"phases: received \(2,\); legal: 0 to 1"):
        refresh_load([1], [2], [0], 2)


def make_params(count: int, shape: tuple[int, int] = (4, 4)) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(shape)) for _ in range(count)]


def refreshed_steps(
    optimizer: Shampoo | SOAP, params: list[nn.Parameter], steps: int
) -> list[list[int]]:
    """In which steps, from 1, each parameter refreshed: roots or basis change there alone."""
    name = "L_root" if isinstance(optimizer, Shampoo) else "L_basis"
    generator = torch.Generator().manual_seed(0)
    seen: list[list[int]] = [[] for _ in params]
    for step in range(1, steps + 1):
        states = [optimizer.state[param] for param in params]
        before = [(int(state["refreshes"]), state[name].clone()) for state in states]
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()
        for index, (state, (refreshes, made)) in enumerate(zip(states, before, strict=True)):
            is_refreshed = int(state["refreshes"]) > refreshes
            assert torch.equal(state[name], made) is not is_refreshed
            if is_refreshed:
                seen[index].append(step)
    return seen


@pytest.mark.parametrize("kind", [Shampoo, SOAP])
def test_a_matrix_refreshes_in_its_phase(kind: type[Shampoo] | type[SOAP]) -> None:
    """The roots or the basis change in these steps and in no other."""
    params = make_params(3)
    optimizer = kind(params, precondition_frequency=3)
    assert [optimizer.refresh_phase(param) for param in params] == [0, 1, 2]
    assert refreshed_steps(optimizer, params, 7) == [[1, 4, 7], [2, 5], [3, 6]]
    together = make_params(3)
    optimizer = kind(together, precondition_frequency=3, stagger=False)
    assert refreshed_steps(optimizer, together, 7) == [[1, 4, 7]] * 3


def test_groups_share_phases_by_frequency() -> None:
    """Two groups with one frequency are spread as one list; a third, not staggered, is apart. A
    changed frequency holds from the next step."""
    params = make_params(5)
    groups = [
        {"params": params[:2]},
        {"params": params[2:4]},
        {"params": params[4:], "stagger": False},
    ]
    soap = SOAP(groups, precondition_frequency=4)
    assert [soap.refresh_phase(p) for p in params] == [0, 1, 2, 3, 0]
    soap.param_groups[1]["precondition_frequency"] = 2
    assert [soap.refresh_phase(p) for p in params] == [0, 2, 0, 1, 0]
    soap.add_param_group({"params": make_params(1, (9, 9))})
    (added,) = soap.param_groups[-1]["params"]
    assert soap.refresh_phase(added) == 0  # of 2 small ones and a large one, all in the first
    assert [soap.refresh_phase(p) for p in params[:2]] == [0, 0]


def test_phases_follow_from_logical_shapes() -> None:
    """Matrices that are not here count with the rest."""
    shapes = [(9, 9), (4, 4), (9, 9), (4, 4), (9, 9)]
    here = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    away = [nn.Parameter(torch.zeros(0, shape[1])) for shape in shapes]
    for kind in (Shampoo, SOAP):
        single = kind(here, precondition_frequency=4)
        logical = dict(zip(away, shapes, strict=True))
        other = kind(away, logical_shapes=logical, precondition_frequency=4)
        phases = [single.refresh_phase(p) for p in here]
        assert phases == [other.refresh_phase(p) for p in away]
        assert phases == [0, 1, 1, 2, 2]
