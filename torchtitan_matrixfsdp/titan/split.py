"""The table ``[matrix_optimizer.split]``: which weights Muon orthogonalises block by block.

A key is a regular expression that is searched in canonical parameter names, its value a rule:

- ``"heads"``: one block per attention head. The role is told by the name of the projection's
  module, as TorchTitan's Llama 3 and Qwen 3 have them: ``wq`` has ``heads`` blocks of rows, ``wk``
  and ``wv`` have ``kv_heads`` blocks of rows, ``wo`` has ``heads`` blocks of columns.
- ``"rows:N"``, ``"columns:N"``: N equal blocks of rows or columns, for example the N projections
  that a fused weight holds.

Blocks are cut from whole weights. With tensor parallelism the table is refused where the job's
settings are checked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NoReturn

from torchtitan_matrixfsdp.optim import Split
from torchtitan_matrixfsdp.titan.checks import ConfigError, check_patterns

KEY = "matrix_optimizer.split"

_DIMS = {"rows": 0, "columns": 1}
_LEGAL = '"heads", "rows:N" or "columns:N" with N >= 1'


def check_split_table(table: Mapping[str, str]) -> None:
    """Check what can be checked without a model: expressions and the form of the rules.

    Raises:
        ConfigError: naming the expression and its rule.
    """
    check_patterns(KEY, list(table))
    for pattern, rule in table.items():
        if rule != "heads":
            _parts(pattern, rule)


def resolve_splits(
    table: Mapping[str, str],
    matrices: Mapping[str, tuple[int, int]],
    heads: int,
    kv_heads: int,
) -> dict[str, Split]:
    """The split of each weight that ``table`` names, by canonical name.

    Args:
        table: rules by regular expression.
        matrices: the logical shape (rows, columns) of every weight of the matrix optimizer, in all
            pipeline stages (an expression need not match in each), by canonical name.
        heads: attention heads (of queries).
        kv_heads: heads of keys and values.

    Raises:
        ConfigError: an expression is invalid or matches no matrix, a matrix has two rules, a rule
            is unknown or does not divide a matrix, or a matrix has no heads.
    """
    check_split_table(table)
    chosen: dict[str, str] = {}
    for pattern, rule in table.items():
        matched = [fqn for fqn in matrices if re.search(pattern, fqn)]
        if not matched:
            some = next(iter(matrices), "none")
            _refuse(
                pattern,
                rule,
                f"an expression found in the name of a matrix, such as {some}",
                "correct or remove it",
            )
        for fqn in matched:
            if fqn in chosen:
                _refuse(
                    pattern,
                    rule,
                    f"one rule for each matrix; {fqn} is matched by {chosen[fqn]!r} too",
                    "narrow one of the two",
                )
            chosen[fqn] = pattern
    return {
        fqn: _split_of(fqn, matrices[fqn], pattern, table[pattern], heads, kv_heads)
        for fqn, pattern in chosen.items()
    }


def _split_of(
    fqn: str, shape: tuple[int, int], pattern: str, rule: str, heads: int, kv_heads: int
) -> Split:
    if rule == "heads":
        of_role = {
            "wq": Split(0, heads),
            "wk": Split(0, kv_heads),
            "wv": Split(0, kv_heads),
            "wo": Split(1, heads),
        }
        role = next((part for part in reversed(fqn.split(".")) if part in of_role), None)
        if role is None:
            _refuse(
                pattern,
                rule,
                f"weights of modules named {', '.join(of_role)}; {fqn} is none",
                'use "rows:N" or "columns:N" for it',
            )
        split = of_role[role]
    else:
        split = _parts(pattern, rule)
    if shape[split.dim] % split.parts:
        _refuse(
            pattern,
            rule,
            f"a number of blocks that divides the {shape[split.dim]} "
            f"{'columns' if split.dim else 'rows'} of {fqn}, not {split.parts}",
            "change the rule, or exclude the matrix from the expression",
        )
    return split


def _parts(pattern: str, rule: str) -> Split:
    """The split that ``rows:N`` or ``columns:N`` says."""
    direction, _, number = rule.partition(":")
    is_number = number.isascii() and number.isdecimal()
    if direction not in _DIMS or not is_number or int(number) < 1:
        _refuse(pattern, rule, _LEGAL, "correct the rule")
    return Split(_DIMS[direction], int(number))


def _refuse(pattern: str, rule: str, legal: str, remedy: str) -> NoReturn:
    raise ConfigError(f"{KEY}: received {pattern!r} = {rule!r}; legal: {legal}; {remedy}.")
