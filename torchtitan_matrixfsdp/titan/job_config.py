"""The TOML sections that this plugin adds, named by ``job.custom_config_module``.

TorchTitan merges ``JobConfig`` below into its own, so every key here is a TOML key and a command
line flag (``--owner_fsdp.mode=stock``). Types and ranges are checked as each section is built,
on every rank, before any process group exists.

This module must not postpone the evaluation of annotations: TorchTitan's merge reads the
field types as objects.
"""

from dataclasses import dataclass, field
from typing import Any

from torchtitan_matrixfsdp.comm import TRANSPORT_NAMES
from torchtitan_matrixfsdp.layout import PLANNERS
from torchtitan_matrixfsdp.optim import ADJUST_LR, COEFFICIENTS, GRAFTING, STOCK_STEPS
from torchtitan_matrixfsdp.titan.checks import (
    ConfigError,
    check_choice,
    check_field_types,
    check_patterns,
    check_range,
)
from torchtitan_matrixfsdp.titan.keyword_field import rename_field

MODES = ("zero3", "zero1", "stock")
MATRIX_OPTIMIZERS = ("Muon", "Shampoo", "SOAP", "AdamW")
REPLICAS = ("redundant", "partitioned")
TENSOR_PARALLEL = ("refuse", "gather")
NS_DTYPES = ("bfloat16", "float32", "float64")
ROOT_DTYPES = ("float32", "float64")


@dataclass
class OwnerFSDP:
    """Where the shards of the transformer blocks live."""

    mode: str = "zero3"
    """
    "zero3": each matrix whole on one owner rank (MatrixFSDP); the optimizer step does not
    communicate. "zero1": the same owners, but every rank keeps the blocks' gathered parameters;
    each step sends them anew, forward and backward do not. "stock": ordinary FSDP2 row shards,
    and the step that ``stock_step`` names. No effect where nothing is sharded (shard degree 1).
    """

    stock_step: str = "gather"
    """
    How Muon comes by whole matrices with mode "stock": "gather" (each matrix to every rank),
    "gather_once" (all in one all-gather), or "all_to_all" (each to one rank, and back, as dion and
    DistMuon do). No effect with other modes, or with AdamW.
    """

    planner: str = "cost_aware"
    """Who owns what: "role_greedy", "scope_greedy" or "cost_aware" (the paper's three)."""

    transport: str = "auto"
    """
    How blocks travel: "balanced" (an all-gather and a reduce-scatter of equal slices, the overflow
    sent beforehand or afterwards), "p2p" (the paper's fan-out), "broadcast" (one per owner), or
    "auto": the cheapest of them for each block.
    """

    replicas: str = "redundant"
    """
    Who steps a matrix under HSDP: "redundant" (its owner in every replica) or "partitioned" (its
    owner in one replica, which sends it to the others behind the next forward: the optimizer's
    work and state fall by the number of replicas). No effect without replicas.
    """

    tensor_parallel: str = "refuse"
    """
    With parallelism.tensor_parallel_degree above 1 in zero3: "refuse", or "gather": each step
    gathers every matrix over the tensor-parallel ranks of its owner, the one exception to a step
    without communication. No effect in stock.
    """

    def __post_init__(self) -> None:
        check_field_types(self, "owner_fsdp")
        check_choice("owner_fsdp.mode", self.mode, MODES)
        check_choice("owner_fsdp.stock_step", self.stock_step, STOCK_STEPS)
        check_choice("owner_fsdp.planner", self.planner, sorted(PLANNERS))
        check_choice("owner_fsdp.transport", self.transport, sorted(TRANSPORT_NAMES))
        check_choice("owner_fsdp.replicas", self.replicas, REPLICAS)
        check_choice("owner_fsdp.tensor_parallel", self.tensor_parallel, TENSOR_PARALLEL)

    @property
    def is_owned(self) -> bool:
        """Whether blocks have owners where they are sharded."""
        return self.mode != "stock"


@dataclass
class ShampooOptions:
    """Shampoo's own keys, ``[matrix_optimizer.shampoo]``; see ``optim.Shampoo`` for the maths."""

    beta1: float = 0.9
    """Momentum, 0 <= beta1 < 1."""

    beta2: float = 0.99
    """Decay of the factors and of the grafted AdamW's second moment, 0 <= beta2 <= 1; 1 sums."""

    nesterov: bool = False
    """Nesterov (look-ahead) momentum."""

    grafting: str = "adamw"
    """Whose step length a matrix takes: "adamw", "sgd", or "none" (Shampoo's own)."""

    eps: float = 1e-8
    """Of the grafted AdamW, > 0."""

    exponent: float = 0.25
    """Exponent of the inverse root of each factor, > 0."""

    root_epsilon: float = 1e-6
    """Damping of the roots, relative to a factor's largest eigenvalue, > 0."""

    root_dtype: str = "float32"
    """Dtype of the eigendecompositions: "float32" or "float64"."""

    precondition_frequency: int = 50
    """Steps between refreshes of a matrix's roots, >= 1."""

    stagger: bool = True
    """Spread the refreshes of the matrices over the steps."""

    max_preconditioner_dim: int = 2048
    """Largest side of a block, >= 1; larger matrices are cut into blocks, each with factors."""

    def __post_init__(self) -> None:
        section = "matrix_optimizer.shampoo"
        check_field_types(self, section)
        check_choice(f"{section}.grafting", self.grafting, GRAFTING)
        check_choice(f"{section}.root_dtype", self.root_dtype, ROOT_DTYPES)
        check_range(f"{section}.beta1", self.beta1, low=0, below=1)
        check_range(f"{section}.beta2", self.beta2, low=0, high=1)
        for key in ("eps", "exponent", "root_epsilon"):
            check_range(f"{section}.{key}", vars(self)[key], above=0)
        for key in ("precondition_frequency", "max_preconditioner_dim"):
            check_range(f"{section}.{key}", vars(self)[key], low=1)


@dataclass
class SoapOptions:
    """SOAP's own keys, ``[matrix_optimizer.soap]``; see ``optim.SOAP`` for the maths."""

    beta1: float = 0.95
    """Decay of the first moment, 0 <= beta1 < 1."""

    beta2: float = 0.95
    """Decay of the second moment, 0 <= beta2 < 1."""

    shampoo_beta: float = 0.95
    """Decay of the factors whose eigenvectors are the basis, 0 <= shampoo_beta < 1."""

    eps: float = 1e-8
    """Added to the root of the second moment, > 0."""

    precondition_frequency: int = 10
    """Steps between refreshes of a matrix's bases, >= 1."""

    stagger: bool = True
    """Spread the refreshes of the matrices over the steps."""

    max_precond_dim: int = 10000
    """Largest side that has a basis, >= 0; above it the side keeps the identity."""

    def __post_init__(self) -> None:
        section = "matrix_optimizer.soap"
        check_field_types(self, section)
        for key in ("beta1", "beta2", "shampoo_beta"):
            check_range(f"{section}.{key}", vars(self)[key], low=0, below=1)
        check_range(f"{section}.eps", self.eps, above=0)
        check_range(f"{section}.precondition_frequency", self.precondition_frequency, low=1)
        check_range(f"{section}.max_precond_dim", self.max_precond_dim, low=0)


@rename_field("class_path", key="class")
@dataclass
class MatrixOptimizer:
    """The optimizer of the routed 2D weights. Everything else is on ``[optimizer]``."""

    name: str = "Muon"
    """"Muon", "Shampoo", "SOAP" or "AdamW" (the matrices too, in the owner layout, with
    [optimizer]'s betas, eps)."""

    class_path: str = ""
    """
    TOML key ``class``: instead of ``name``, any installed optimizer class, "package.module:Class".
    It steps each matrix whole on its owner, with ``lr``, ``weight_decay`` and ``kwargs``.
    """

    kwargs: dict[str, Any] = field(default_factory=dict)
    """Other keyword arguments of ``class``, as a table; arrays become tuples."""

    lr: float = 0.02
    """Learning rate at the top of the schedule, >= 0."""

    weight_decay: float = 0.1
    """Decoupled weight decay, >= 0; multiplied by the base learning rate."""

    momentum: float = 0.95
    """Muon's momentum, 0 <= momentum < 1."""

    nesterov: bool = True
    """Nesterov (look-ahead) momentum."""

    ns_steps: int = 5
    """Newton-Schulz iterations, 1 to 20."""

    ns_coefficients: str = "quintic"
    """Coefficients of the iteration: "quintic" (Jordan's) or "polar_express" (one set per step)."""

    ns_dtype: str = "bfloat16"
    """Dtype of Newton-Schulz: "bfloat16", "float32", or "float64" (for exactness tests)."""

    adjust_lr: str = "match_rms_adamw"
    """Learning-rate factor by shape (out, in): "original" is sqrt(max(1, out/in)),
    "match_rms_adamw" is 0.2 * sqrt(max(out, in))."""

    split: dict[str, str] = field(default_factory=dict)
    """
    Table ``[matrix_optimizer.split]``: weights that Muon orthogonalises block by block. A key is a
    regular expression searched in canonical parameter names, its value "heads" (one block per
    attention head of wq, wk, wv, wo), "rows:N" or "columns:N".
    """

    shampoo: ShampooOptions = field(default_factory=ShampooOptions)
    """Table ``[matrix_optimizer.shampoo]``, for name = "Shampoo"."""

    soap: SoapOptions = field(default_factory=SoapOptions)
    """Table ``[matrix_optimizer.soap]``, for name = "SOAP"."""

    include: list[str] = field(default_factory=lambda: [r"layers\..*\.weight$"])
    """Regular expressions searched in canonical parameter names; applied to 2D weights only."""

    exclude: list[str] = field(default_factory=list)
    """Regular expressions that take weights back out of ``include``."""

    def __post_init__(self) -> None:
        check_field_types(self, "matrix_optimizer")
        check_choice("matrix_optimizer.name", self.name, MATRIX_OPTIMIZERS)
        check_choice("matrix_optimizer.ns_coefficients", self.ns_coefficients, sorted(COEFFICIENTS))
        check_choice("matrix_optimizer.ns_dtype", self.ns_dtype, NS_DTYPES)
        check_choice("matrix_optimizer.adjust_lr", self.adjust_lr, ADJUST_LR)
        check_range("matrix_optimizer.lr", self.lr, low=0)
        check_range("matrix_optimizer.weight_decay", self.weight_decay, low=0)
        check_range("matrix_optimizer.momentum", self.momentum, low=0, below=1)
        check_patterns("matrix_optimizer.include", self.include)
        check_patterns("matrix_optimizer.exclude", self.exclude)
        if self.kwargs and not self.class_path:
            raise ConfigError(
                f"matrix_optimizer.kwargs: received {self.kwargs!r}; legal: only with "
                f'matrix_optimizer.class; name = "{self.name}" has keys of its own. Remove it.'
            )
        check_range("matrix_optimizer.ns_steps", self.ns_steps, low=1, high=20)

    @property
    def title(self) -> str:
        """What logs call the optimizer: ``class`` where there is one, else ``name``."""
        return self.class_path or self.name


@dataclass
class JobConfig:
    """What TorchTitan merges into its own ``JobConfig``."""

    owner_fsdp: OwnerFSDP = field(default_factory=OwnerFSDP)
    matrix_optimizer: MatrixOptimizer = field(default_factory=MatrixOptimizer)
