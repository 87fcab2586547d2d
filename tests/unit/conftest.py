"""A process group of one, for code that asks for its rank or gathers from all."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture(scope="module")
def group_of_one() -> Iterator[None]:
    """The default group while a module's tests run."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
