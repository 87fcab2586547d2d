"""Buffer states, deferred release and pinned gradients, without a process group."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn

from torchtitan_matrixfsdp.runtime import BufferStateError, OwnerContext, check_gradient
from torchtitan_matrixfsdp.runtime.buffers import BlockBuffer, BufferState, GradientPins

CPU = torch.device("cpu")
RELEASED, GATHERING = BufferState.RELEASED, BufferState.GATHERING
UNSHARDED, RETIRED = BufferState.UNSHARDED, BufferState.RETIRED
RESIDENT = BufferState.RESIDENT

STEPS: dict[str, Callable[[BlockBuffer], Any]] = {
    "start_gather": lambda buffer: buffer.start_gather(torch.float32, CPU),
    "finish_gather": BlockBuffer.finish_gather,
    "retire": BlockBuffer.retire,
    "release": BlockBuffer.release,
    "rest": BlockBuffer.rest,
}
# How to get into each state, and where each step leads from there; what is missing is illegal.
PATHS = {
    RELEASED: [],
    GATHERING: ["start_gather"],
    UNSHARDED: ["start_gather", "finish_gather"],
    RETIRED: ["start_gather", "finish_gather", "retire"],
}
LEGAL = {
    (RELEASED, "start_gather"): GATHERING,
    (GATHERING, "finish_gather"): UNSHARDED,
    (GATHERING, "release"): RELEASED,
    (UNSHARDED, "retire"): RETIRED,
    (RETIRED, "start_gather"): GATHERING,
    (RETIRED, "release"): RELEASED,
}
# Of a resident block, while its weights change in every step.
RESIDENT_PATHS = {
    RELEASED: [],
    GATHERING: ["start_gather"],
    UNSHARDED: ["start_gather", "finish_gather"],
    RESIDENT: ["start_gather", "finish_gather", "rest"],
}
RESIDENT_LEGAL = {
    (RELEASED, "start_gather"): GATHERING,
    (GATHERING, "finish_gather"): UNSHARDED,
    (GATHERING, "rest"): RESIDENT,
    (UNSHARDED, "rest"): RESIDENT,
    (RESIDENT, "start_gather"): GATHERING,
}


def buffer_in(state: BufferState, numel: int = 6, is_resident: bool = False) -> BlockBuffer:
    buffer = BlockBuffer("layers.3", numel, is_resident)
    for step in (RESIDENT_PATHS if is_resident else PATHS)[state]:
        STEPS[step](buffer)
    assert buffer.state is state
    return buffer


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    ("is_resident", "state"),
    [*((False, state) for state in PATHS), *((True, state) for state in RESIDENT_PATHS)],
)
def test_every_transition(is_resident: bool, state: BufferState, step: str) -> None:
    buffer = buffer_in(state, is_resident=is_resident)
    after = (RESIDENT_LEGAL if is_resident else LEGAL).get((state, step))
    if after is not None:
        STEPS[step](buffer)
        assert buffer.state is after
        return
    nbytes = buffer._flat.untyped_storage().nbytes() if buffer._flat is not None else 0
    with pytest.raises(BufferStateError) as raised:
        STEPS[step](buffer)
    message = str(raised.value)
    assert "layers.3" in message and f"is {state.value} and cannot become" in message
    assert buffer.state is state, "a refused step changes nothing"
    if buffer._flat is not None:
        assert buffer._flat.untyped_storage().nbytes() == nbytes


def test_a_resident_buffer_is_used_without_a_gather_only_while_it_is_fresh() -> None:
    buffer = buffer_in(RESIDENT, is_resident=True)
    with pytest.raises(BufferStateError, match=r"layers\.3: its buffer is used while it is stale"):
        buffer.occupy()
    with pytest.raises(BufferStateError, match=r"layers\.3: its buffer is resident, not filled"):
        buffer.validate()
    buffer.start_gather(torch.float32, CPU).fill_(2.0)
    buffer.validate()
    buffer.finish_gather()
    buffer.rest()
    with pytest.raises(BufferStateError, match=r"layers\.3: its buffer is gathered while it is"):
        buffer.start_gather(torch.float32, CPU)
    buffer.occupy()
    assert buffer.state is UNSHARDED
    assert buffer.flat.tolist() == [2.0] * 6, "what the last gather brought"
    buffer.invalidate()
    buffer.rest()
    with pytest.raises(BufferStateError, match="stale"):
        buffer.occupy()


def test_views_live_as_long_as_the_buffer() -> None:
    """One storage, resized: what was taken before a release is valid after the next gather."""
    buffer = buffer_in(GATHERING)
    view = buffer.flat.narrow(0, 2, 3).data.view(3, 1)
    for value in (1.0, 2.0):
        buffer.flat.fill_(value)
        buffer.finish_gather()
        assert view.flatten().tolist() == [value] * 3
        buffer.retire()
        assert buffer.flat.untyped_storage().nbytes() == 6 * 4, "pinned while retired"
        buffer.release()
        assert view.untyped_storage().nbytes() == 0
        assert buffer.start_gather(torch.float32, CPU).data_ptr() == buffer.flat.data_ptr() != 0
    assert view._version == 0, "autograd must not see a gather as a change"


def test_a_revived_buffer_keeps_its_memory() -> None:
    buffer = buffer_in(RETIRED)
    before = buffer.flat.data_ptr()
    buffer.start_gather(torch.float32, CPU)
    assert buffer.flat.data_ptr() == before


@pytest.mark.parametrize("path", [[], ["start_gather", "release"]])
def test_a_released_buffer_is_not_read(path: list[str]) -> None:
    buffer = BlockBuffer("layers.3", 6)
    for step in path:
        STEPS[step](buffer)
    with pytest.raises(BufferStateError, match=r"layers\.3: its buffer is read while released"):
        _ = buffer.flat


def test_a_block_without_elements() -> None:
    buffer = buffer_in(RETIRED, numel=0)
    buffer.release()
    assert buffer.start_gather(torch.float32, CPU).numel() == 0


def test_memory_made_in_inference_mode_can_be_saved_for_backward() -> None:
    with torch.inference_mode():
        buffer = buffer_in(UNSHARDED)
    assert not buffer.flat.is_inference()


class Waits:
    """Stands for the gather streams of one root: what they were made to wait for."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def __call__(self, event: Any) -> None:
        self.events.append(event)


def test_a_deferred_buffer_is_released_after_its_own_streams_have_waited() -> None:
    """Each root has gather streams of its own, and the memory goes back to those."""
    context = OwnerContext()
    first, second = buffer_in(RETIRED), buffer_in(RETIRED)
    waits, other_waits = Waits(), Waits()
    context.defer(first, "event 1", waits)  # type: ignore[arg-type]
    context.defer(second, "event 2", other_waits)  # type: ignore[arg-type]
    assert first.state is second.state is RETIRED
    context.release_retired()
    assert first.state is second.state is RELEASED
    assert (waits.events, other_waits.events) == (["event 1"], ["event 2"])
    context.release_retired()
    assert len(waits.events) == 1, "released once"


def test_the_wait_comes_before_the_release() -> None:
    context = OwnerContext()
    buffer = buffer_in(RETIRED)
    seen = []
    context.defer(buffer, "event", lambda _: seen.append(buffer.state))  # type: ignore[arg-type]
    context.release_retired()
    assert seen == [RETIRED]


def test_a_revived_buffer_is_not_released() -> None:
    context = OwnerContext()
    revived, other = buffer_in(RETIRED), buffer_in(RETIRED)
    waits = Waits()
    assert context.revive(revived) is None, "not deferred"
    context.defer(revived, "event 1", waits)  # type: ignore[arg-type]
    context.defer(other, "event 2", waits)  # type: ignore[arg-type]
    assert context.revive(revived) == "event 1"
    revived.start_gather(torch.float32, CPU)
    context.release_retired()
    assert (revived.state, other.state) == (GATHERING, RELEASED)
    assert waits.events == ["event 2"]


def test_the_end_of_a_roots_forward_releases() -> None:
    context = OwnerContext()
    root = nn.Linear(2, 2)
    context.release_after(root)
    context.release_after(root)
    assert len(root._forward_hooks) == 1
    buffer = buffer_in(RETIRED)
    context.defer(buffer, "event", Waits())  # type: ignore[arg-type]
    output = root(torch.ones(1, 2))
    assert buffer.state is RELEASED
    assert isinstance(output, torch.Tensor), "the hook leaves the output alone"


def test_contexts_are_apart() -> None:
    one, other = OwnerContext(), OwnerContext()
    buffer = buffer_in(RETIRED)
    one.defer(buffer, "event", Waits())  # type: ignore[arg-type]
    other.release_retired()
    assert buffer.state is RETIRED and other.revive(buffer) is None
    assert one.counter is not other.counter and one.pins is not other.pins


def parameters(flat: torch.Tensor, sizes: list[int]) -> list[nn.Parameter]:
    """One parameter per size, whose gradients are views into ``flat``."""
    params = []
    for size, part in zip(sizes, flat.split(sizes), strict=True):
        params.append(nn.Parameter(torch.zeros(size)))
        params[-1].grad = part
    return params


def test_memory_of_gradients_is_not_written_before_they_are_consumed() -> None:
    pins = GradientPins()
    flat = torch.ones(5)
    params = parameters(flat, [3, 2])
    pins.check_unpinned("layers.1", flat)  # nothing is pinned yet
    pins.pin("layers.1", params)
    for reused in (flat, flat[4:]):
        with pytest.raises(BufferStateError) as raised:
            pins.check_unpinned("layers.0", reused)
        message = str(raised.value)
        assert "layers.0" in message and "layers.1" in message and "own" in message
    pins.check_unpinned("layers.0", torch.ones(5))
    pins.check_unpinned("layers.0", flat[:0])
    params[0].grad = None
    with pytest.raises(BufferStateError):
        pins.check_unpinned("layers.0", flat)
    params[1].grad = None
    pins.check_unpinned("layers.0", flat)  # both are consumed


def test_accumulation_keeps_the_first_memory_pinned() -> None:
    """The second microbatch is added to the first one's memory; its own is free again."""
    pins = GradientPins()
    first, second = torch.ones(5), torch.ones(5)
    params = parameters(first, [3, 2])
    pins.pin("layers.1", params)
    for param, part in zip(params, second.split([3, 2]), strict=True):
        param.grad += part
    pins.pin("layers.1", params)
    pins.check_unpinned("layers.1", second)
    with pytest.raises(BufferStateError):
        pins.check_unpinned("layers.1", first)
    pins.verify("layers.1")
    with pytest.raises(BufferStateError):
        pins.check_unpinned("layers.1", first)


def test_a_partial_sum_is_pinned_while_it_lives() -> None:
    pins = GradientPins()
    memory = torch.ones(5)
    partial = memory[:4]
    pins.pin_partial("layers.1", partial)
    pins.pin_partial("layers.2", memory[:0])
    with pytest.raises(BufferStateError):
        pins.check_unpinned("layers.1", memory)
    del partial
    gc.collect()
    pins.check_unpinned("layers.1", memory)


def test_early_free_is_found() -> None:
    pins = GradientPins()
    flat = torch.ones(5)
    params = parameters(flat, [3, 2])
    pins.pin("layers.1", params)
    pins.verify("layers.1")
    flat.untyped_storage().resize_(0)
    pins.verify("layers.0")
    with pytest.raises(BufferStateError, match=r"block layers\.1.*shape \(3,\) was freed"):
        pins.verify("layers.1")
    with pytest.raises(BufferStateError, match=r"shape \(2,\) was freed before an optimizer"):
        check_gradient(params[1])
    with pytest.raises(BufferStateError, match=r"block layers\.1.*shape \(3,\) was freed"):
        pins.pin("layers.1", params)
    params[1].grad = None
    check_gradient(params[1])


def test_consumed_gradients_are_forgotten() -> None:
    """Neither an early free nor a reuse is an error then, and nothing is kept."""
    pins = GradientPins()
    flat = torch.ones(5)
    params = parameters(flat, [3, 2])
    pins.pin("layers.1", params)
    for param in params:
        param.grad = None
    flat.untyped_storage().resize_(0)
    pins.verify("layers.1")
    assert pins._pins == {}


def test_an_owner_of_nothing_pins_nothing() -> None:
    pins = GradientPins()
    param = nn.Parameter(torch.zeros(0, 4))
    param.grad = torch.zeros(0, 4)
    pins.pin("layers.1", [param, nn.Parameter(torch.zeros(2))])
    assert pins._pins == {}
    pins.verify("layers.1")
