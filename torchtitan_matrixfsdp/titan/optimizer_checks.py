"""Which matrix optimizer works in which layout, before the first collective."""

from __future__ import annotations

from torchtitan.config import JobConfig as TitanJobConfig

from torchtitan_matrixfsdp.titan.checks import ConfigError
from torchtitan_matrixfsdp.titan.custom_class import class_options, import_class
from torchtitan_matrixfsdp.titan.job_config import MatrixOptimizer, OwnerFSDP
from torchtitan_matrixfsdp.titan.split import KEY as SPLIT_KEY
from torchtitan_matrixfsdp.titan.split import check_split_table

# Those that are not given whole matrices: Muon because the step itself exchanges what it needs,
# AdamW because it is elementwise.
_ON_PARTS = ("Muon", "AdamW")


def shard_degree(config: TitanJobConfig, world_size: int) -> int:
    """Ranks that share a block's parameters."""
    parallelism = config.parallelism
    degree = parallelism.data_parallel_shard_degree
    if degree == -1:
        others = parallelism.data_parallel_replicate_degree * parallelism.tensor_parallel_degree
        others *= parallelism.pipeline_parallel_degree * parallelism.context_parallel_degree
        degree = max(world_size // max(others, 1), 1)
    return degree * parallelism.context_parallel_degree


def check_matrix_optimizer(
    config: TitanJobConfig, owner_fsdp: OwnerFSDP, options: MatrixOptimizer, world_size: int
) -> None:
    """Check ``matrix_optimizer.class`` and ``split``, and that the layout gives the optimizer what
    it needs.

    Raises:
        ConfigError: with key, value, legal range and remedy.
    """
    check_split_table(options.split)
    if options.split:
        _check_split(config, options)
    if options.class_path:
        cls = import_class(options.class_path)
        class_options(cls, options.kwargs, options.lr, options.weight_decay)
    elif options.name in _ON_PARTS:
        return
    key = "class" if options.class_path else "name"
    received = f"matrix_optimizer.{key}: received {options.title!r}"
    if owner_fsdp.mode == "stock" and shard_degree(config, world_size) > 1:
        raise ConfigError(
            f'{received} with owner_fsdp.mode = "stock", whose ranks hold rows of each matrix; '
            f'legal there: {list(_ON_PARTS)}. Set owner_fsdp.mode = "zero3" or "zero1".'
        )
    if config.parallelism.tensor_parallel_degree > 1:
        raise ConfigError(
            f"{received} with parallelism.tensor_parallel_degree = "
            f"{config.parallelism.tensor_parallel_degree}, whose ranks hold fragments of each "
            f"matrix; legal there: {list(_ON_PARTS)}. Set the degree to 1."
        )


def _check_split(config: TitanJobConfig, options: MatrixOptimizer) -> None:
    if options.title != "Muon":
        raise ConfigError(
            f"{SPLIT_KEY}: received {options.split!r} with {options.title!r}; legal: only with "
            'matrix_optimizer.name = "Muon"; remove the table.'
        )
    degree = config.parallelism.tensor_parallel_degree
    if degree > 1:
        raise ConfigError(
            f"{SPLIT_KEY}: received {options.split!r} with parallelism.tensor_parallel_degree = "
            f"{degree}; legal: no table with tensor parallelism; remove it, or set the degree to 1."
        )
