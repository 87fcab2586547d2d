"""Decides which parameters the matrix optimizer takes, by name pattern and logical shape.

The rule: only a trainable parameter whose logical shape is 2D can be a matrix, 1xN included.
Trainable parameters of 0, 1, 3 or more dimensions are always elementwise, whatever a pattern says.
The logical shape decides and never a local shard's, so every rank decides the same.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torchtitan_matrixfsdp.layout._messages import config_message, some
from torchtitan_matrixfsdp.layout.params import ParamMeta, canonical_fqn

_INCLUDE = "matrix_optimizer.include"
_EXCLUDE = "matrix_optimizer.exclude"
_LEGAL = "a list of Python regular expressions, searched in parameter names"


class RoutingError(ValueError):
    """Parameters cannot be routed as configured; the message names the key and the remedy."""


@dataclass(frozen=True)
class Routing:
    """Where every parameter goes, by canonical FQN and in model order.

    ``matched_by`` pairs each matrix with the first include pattern that took it.

    Raises:
        RoutingError: a name that stands twice, or a ``matched_by`` name that is no matrix.
    """

    matrices: tuple[str, ...]
    elementwise: tuple[str, ...]
    frozen: tuple[str, ...]
    matched_by: tuple[tuple[str, str], ...]

    def __post_init__(self) -> None:
        twice = _repeated((*self.matrices, *self.elementwise, *self.frozen))
        if twice:
            raise RoutingError(
                f"{some(twice)}: routed more than once; legal: each parameter in exactly one of "
                "matrices, elementwise and frozen"
            )
        matched = [fqn for fqn, _ in self.matched_by]
        wrong = sorted({fqn for fqn in matched if fqn not in self._matrix_set})
        wrong += _repeated(matched)
        if wrong:
            raise RoutingError(
                f"{some(wrong)}: in matched_by, but not a matrix or there twice; legal: each "
                "matrix at most once"
            )

    def is_matrix(self, fqn: str) -> bool:
        """Returns whether the matrix optimizer takes this parameter; wrapped names are welcome.

        Raises:
            KeyError: no such parameter was routed. Answering "no" would let a misspelt or
                re-wrapped weight drift to the elementwise optimizer unnoticed.
        """
        name = canonical_fqn(fqn)
        if name not in self._all_set:
            raise KeyError(f"{fqn!r} was not routed; {len(self._all_set)} parameters were")
        return name in self._matrix_set

    @cached_property
    def _matrix_set(self) -> frozenset[str]:
        return frozenset(self.matrices)

    @cached_property
    def _all_set(self) -> frozenset[str]:
        return self._matrix_set | frozenset(self.elementwise) | frozenset(self.frozen)


def route(
    params: Sequence[ParamMeta],
    block_of: Mapping[str, str],
    include: Sequence[str],
    exclude: Sequence[str],
) -> Routing:
    """Routes parameters: a 2D weight that some include and no exclude pattern finds is a matrix.

    ``params`` are all parameters of the model part, in model order; ``block_of`` gives the block
    of each parameter that lies in one (names may be wrapped). Patterns are ``re.search``ed in
    canonical FQNs, so ``w[123]`` finds ``layers.0.feed_forward.w1.weight`` under every wrapper.

    Raises:
        RoutingError: no include pattern; a pattern that is not a regular expression; an include
            pattern that finds no trainable 2D weight; an exclude pattern that finds no parameter;
            a weight taken from outside the blocks; exclusion of every weight; a repeated name.
    """
    includes = _compile(_INCLUDE, include)
    excludes = _compile(_EXCLUDE, exclude)
    if not includes:
        raise RoutingError(
            config_message(
                _INCLUDE,
                list(include),
                "the matrix optimizer has no weights",
                f"{_LEGAL}, at least one",
                "give at least one regex, or use a stock train spec",
            )
        )
    twice = _repeated([param.fqn for param in params])
    if twice:
        raise RoutingError(
            f"{some(twice)}: listed more than once among {len(params)} parameters; legal: each "
            "canonical name once; remedy: list a tied weight under one name only"
        )
    for pattern in includes:
        _check_include_finds_a_weight(pattern, params)
    for pattern in excludes:
        _check_exclude_finds_a_parameter(pattern, params)

    matrices: list[str] = []
    elementwise: list[str] = []
    frozen: list[str] = []
    matched_by: list[tuple[str, str]] = []
    for param in params:
        taken_by = _first_match(includes, param.fqn) if _is_candidate(param) else None
        if not param.trainable:
            frozen.append(param.fqn)
        elif taken_by is None or _first_match(excludes, param.fqn) is not None:
            elementwise.append(param.fqn)
        else:
            matrices.append(param.fqn)
            matched_by.append((param.fqn, taken_by.pattern))
    _check_inside_blocks(matched_by, block_of)
    if not matrices:
        raise RoutingError(
            config_message(
                _EXCLUDE,
                list(exclude),
                f"it removes every weight that {_INCLUDE} = {list(include)!r} finds",
                f"patterns that leave at least one weight of {_INCLUDE}",
                f"remove or narrow a pattern of {_EXCLUDE}, or use a stock train spec",
            )
        )
    return Routing(tuple(matrices), tuple(elementwise), tuple(frozen), tuple(matched_by))


def _is_candidate(param: ParamMeta) -> bool:
    return param.trainable and param.ndim == 2


def _repeated(names: Sequence[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]


def _first_match(patterns: Sequence[re.Pattern[str]], fqn: str) -> re.Pattern[str] | None:
    return next((pattern for pattern in patterns if pattern.search(fqn)), None)


def _compile(key: str, patterns: Sequence[str]) -> list[re.Pattern[str]]:
    # A string is a sequence of one-letter strings, each a valid regex that matches far too much.
    if isinstance(patterns, str):
        raise RoutingError(
            config_message(key, patterns, "a single string", _LEGAL, f"write [{patterns!r}]")
        )
    compiled = []
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise RoutingError(
                config_message(key, pattern, "not a string", _LEGAL, "put it in quotes")
            )
        try:
            compiled.append(re.compile(pattern))
        except re.error as error:
            raise RoutingError(
                config_message(
                    key,
                    pattern,
                    f"not a regular expression ({error})",
                    _LEGAL,
                    "correct it, with a backslash before characters meant literally, e.g. "
                    f"{re.escape(pattern)}",
                )
            ) from error
    return compiled


def _check_include_finds_a_weight(pattern: re.Pattern[str], params: Sequence[ParamMeta]) -> None:
    found = [param for param in params if pattern.search(param.fqn)]
    if any(_is_candidate(param) for param in found):
        return
    problem = "it matches no trainable 2D weight"
    if found:
        first = found[0]
        problem += (
            f"; it does match {first.fqn!r} (shape {first.shape}, trainable={first.trainable}), "
            "which is elementwise or frozen by rule"
        )
    candidates = [param.fqn for param in params if _is_candidate(param)]
    near = f"candidates are {some(candidates)}" if candidates else "this model has none"
    raise RoutingError(
        config_message(
            _INCLUDE,
            pattern.pattern,
            problem,
            f"patterns found in the name of a trainable 2D weight; {near}",
            "correct the pattern or remove it",
        )
    )


def _check_exclude_finds_a_parameter(pattern: re.Pattern[str], params: Sequence[ParamMeta]) -> None:
    if any(pattern.search(param.fqn) for param in params):
        return
    raise RoutingError(
        config_message(
            _EXCLUDE,
            pattern.pattern,
            "it matches no parameter",
            "patterns found in the name of a parameter; the first names are "
            f"{some([param.fqn for param in params])}",
            "correct the pattern or remove it",
        )
    )


def _check_inside_blocks(
    matched_by: Sequence[tuple[str, str]], block_of: Mapping[str, str]
) -> None:
    in_block = {canonical_fqn(name) for name in block_of}
    outside = [(fqn, pattern) for fqn, pattern in matched_by if fqn not in in_block]
    if not outside:
        return
    # An embedding or LM head would put a large share of the model on one rank.
    additions = ", ".join(f"'^{re.escape(fqn)}$'" for fqn, _ in outside[:8])
    raise RoutingError(
        config_message(
            _INCLUDE,
            outside[0][1],
            f"it takes {some([fqn for fqn, _ in outside])}, outside every block (an embedding or "
            "LM head?)",
            "patterns that take weights inside blocks only",
            f"add {additions} to {_EXCLUDE}, or narrow the pattern",
        )
    )
