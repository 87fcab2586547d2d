"""Every optimizer on owners keeps one contract; see ``contract`` for the model and the optimizers.

Cases 1, 2, 8, 10, 11, 13, 14, 17, 18, 20, 27, 28 of the collected bug reports.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed.contract import (
    SHAPES,
    STEPS,
    Job,
    Subject,
    mesh_of_all,
    subjects,
    whole_weights,
    worst,
)
from tests.harness import run_ranks
from torchtitan_matrixfsdp.optim import LocalStepOptimizer

# Gradients are equal to the bit. What is left is the order of sums within a batch of matrices.
TOLERANCE = 1e-12
FIVE = SHAPES[:5]
NINETEEN = tuple(SHAPES[i % len(SHAPES)] for i in range(19))


class NoCollective(TorchDispatchMode):
    """Raises where a collective starts."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        assert func.namespace not in ("c10d", "_c10d_functional"), func
        return func(*args, **(kwargs or {}))


def silent(step: Callable[[], Any]) -> None:
    with NoCollective():
        step()


Check = tuple[str, tuple[Any, ...]]
"""A function of this module, by name, and its arguments after the subject."""
Found = dict[Check, dict[str, list[Any]]]
"""What each check returned for each optimizer, by rank."""


def _all_checks(checks: Sequence[Check]) -> list[dict[str, Any]]:
    # Two ranks are enough to see a library's class through; ours run everywhere.
    every = subjects(with_libraries=dist.get_world_size() == 2).items()
    return [{name: globals()[check](s, *args) for name, s in every} for check, args in checks]


def _found(world_size: int, *checks: Check) -> Found:
    """One spawn for all checks and optimizers."""
    by_rank = run_ranks(_all_checks, world_size, checks, timeout_s=280)
    return {
        check: {name: [found[i][name] for found in by_rank] for name in by_rank[0][i]}
        for i, check in enumerate(checks)
    }


def _equals_plain(subject: Subject, shapes: Any) -> float:
    job = Job(subject, shapes)
    model, optimizer = job.shard(mesh_of_all())
    job.train(model, optimizer, range(STEPS), silent)
    return worst(whole_weights(model), job.train_plain())


EQUALS: Check = ("_equals_plain", (SHAPES,))
GROUPS: Check = ("_honours_groups", ())
ZERO: Check = ("_survives_zero", ())
SHAPELESS: Check = ("_without_shapes", ())
STATES: dict[str, Check] = {
    str(dtype): ("_state_by_rank", (dtype,)) for dtype in (torch.float32, torch.bfloat16)
}
RESUMES: dict[str, Check] = {
    f"{dtype}, {first} steps before": ("_resumes", (dtype, first))
    for dtype in (torch.float32, torch.bfloat16)
    for first in (0, STEPS)
}
FEW: Check = ("_equals_plain", (FIVE,))
MANY: Check = ("_equals_plain", (NINETEEN,))


@pytest.fixture(scope="module")
def with_one_rank() -> Found:
    return _found(1, EQUALS)


@pytest.fixture(scope="module")
def with_two_ranks() -> Found:
    return _found(2, EQUALS, GROUPS, ZERO, SHAPELESS, *RESUMES.values())


@pytest.fixture(scope="module")
def with_four_ranks() -> Found:
    return _found(4, EQUALS, *STATES.values())


@pytest.fixture(scope="module")
def with_eight_ranks() -> Found:
    return _found(8, FEW, MANY)


@pytest.mark.parametrize(
    ("ranks", "check"),
    [
        ("with_one_rank", EQUALS),
        ("with_two_ranks", EQUALS),
        ("with_four_ranks", EQUALS),
        ("with_eight_ranks", FEW),
        ("with_eight_ranks", MANY),
    ],
    ids=["1 rank", "2", "4", "8 ranks, 5 matrices", "8 ranks, 19 matrices"],
)
def test_equals_the_plain_class_without_a_collective(
    ranks: str, check: Check, request: pytest.FixtureRequest
) -> None:
    """Cases 1, 2, 20, 27: whole matrices, of every kind of shape and stride, wherever they live."""
    for name, errors in request.getfixturevalue(ranks)[check].items():
        assert max(errors) <= TOLERANCE, name


def _honours_groups(subject: Subject) -> float:
    job = Job(subject, groups={"slow": (1, 2, 6)})
    model, optimizer = job.shard(mesh_of_all())
    job.train(model, optimizer, range(STEPS))
    return worst(whole_weights(model), job.train_plain())


def test_groups_have_rates_and_decays_of_their_own(with_two_ranks: Found) -> None:
    """Case 28."""
    for name, errors in with_two_ranks[GROUPS].items():
        assert max(errors) <= TOLERANCE, name


def _without_shapes(subject: Subject) -> str:
    job = Job(subject)
    params = list(job.shard(mesh_of_all())[0].parameters())
    if subject.is_foreign or subject.plain is torch.optim.AdamW:
        return "needs none, or is tried with them"
    with pytest.raises(ValueError) as raised:
        LocalStepOptimizer(params, lambda groups, of_local: subject.make_plain(groups))
    return str(raised.value)


def test_an_optimizer_must_know_the_logical_shapes(with_two_ranks: Found) -> None:
    """Case 18: on a rank without the matrix its state would be named by the shape of nothing."""
    for name in ("Muon", "Shampoo", "SOAP"):
        for message in with_two_ranks[SHAPELESS][name]:
            assert "must pass logical_shapes=logical_shapes(of_local)" in message, name


def _survives_zero(subject: Subject) -> dict[str, bool]:
    """Weight 0 never has a gradient but zero; all are zero from step 3 on."""
    job = Job(subject, zero=(0,), zero_from=3)
    model, optimizer = job.shard(mesh_of_all())
    before = whole_weights(model)[0]
    job.train(model, optimizer, range(STEPS))
    after = whole_weights(model)
    decayed = before * (1 - subject.options["lr"] * subject.options["weight_decay"]) ** STEPS
    return {
        "finite": all(bool(weight.isfinite().all()) for weight in after),
        "decays alone": worst(after[:1], [decayed]) <= TOLERANCE or not subject.decays_alone,
    }


def test_zero_gradients_decay_weights_and_nothing_else(with_two_ranks: Found) -> None:
    """Case 8."""
    for name, found in with_two_ranks[ZERO].items():
        assert found == [{"finite": True, "decays alone": True}] * 2, name


def _state_by_rank(subject: Subject, dtype: torch.dtype) -> list[dict[str, Any]]:
    """What each parameter's state is called and what shape and dtype it has, over the steps."""
    job = Job(subject, dtype=dtype)
    model, optimizer = job.shard(mesh_of_all())
    seen = []
    for step in range(STEPS):
        seen.append(
            {
                f"{index}.{name}": (tuple(value.shape), str(value.dtype))
                for index, param in enumerate(model.parameters())
                for name, value in optimizer.state[param].items()
            }
        )
        job.train(model, optimizer, [step])
    return seen


@pytest.mark.parametrize("check", STATES.values(), ids=list(STATES))
def test_state_is_eager_and_has_the_same_names_on_every_rank(
    check: Check, with_four_ranks: Found
) -> None:
    """Cases 10, 11, 14, 17: from before the first step on, whatever the rank owns."""
    for name, by_rank in with_four_ranks[check].items():
        for seen in by_rank:
            assert seen == [by_rank[0][0]] * STEPS, name
        assert by_rank[0][0], name


def _resumes(subject: Subject, dtype: torch.dtype, first: int) -> dict[str, bool]:
    job = Job(subject, dtype=dtype)
    mesh = mesh_of_all()
    model, optimizer = job.shard(mesh)
    job.train(model, optimizer, range(first))
    saved = optimizer.state_dict()
    copied = {
        "param_groups": saved["param_groups"],
        "state": {
            index: {name: value.clone() for name, value in state.items()}
            for index, state in saved["state"].items()
        },
    }
    weights = [param.detach().to_local().clone() for param in model.parameters()]
    torch.manual_seed(3)  # heavyball rounds bfloat16 at random
    job.train(model, optimizer, range(first, first + STEPS))

    resumed, fresh = job.shard(mesh)
    if first:
        job.train(resumed, fresh, [7, 8])  # state of its own, to be replaced
    with torch.no_grad():
        for param, weight in zip(resumed.parameters(), weights, strict=True):
            param.to_local().copy_(weight)
    fresh.load_state_dict(copied)
    dtypes = [{k: v.dtype for k, v in s.items()} for s in fresh.state_dict()["state"].values()]
    torch.manual_seed(3)
    job.train(resumed, fresh, range(first, first + STEPS))
    pairs = zip(whole_weights(resumed), whole_weights(model), strict=True)
    return {
        "same dtypes": dtypes
        == [{k: v.dtype for k, v in s.items()} for s in copied["state"].values()],
        "same weights": all(torch.equal(a, b) for a, b in pairs),
    }


@pytest.mark.parametrize("check", RESUMES.values(), ids=list(RESUMES))
def test_what_was_saved_continues_to_the_bit(check: Check, with_two_ranks: Found) -> None:
    """Cases 10, 13, 17: a float32 preconditioner of a bfloat16 weight stays one."""
    for name, found in with_two_ranks[check].items():
        assert found == [{"same dtypes": True, "same weights": True}] * 2, name
