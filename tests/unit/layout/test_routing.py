from __future__ import annotations

import re
from typing import Any

import pytest

from tests.unit.layout.models import param, transformer
from torchtitan_matrixfsdp.layout import ParamMeta, Routing, RoutingError, route

EMBEDDING = param("tok_embeddings.weight", (50, 64))
HEAD = param("output.weight", (50, 64))
TRANSFORMER = transformer(layers=2)
PARAMS = (EMBEDDING, *TRANSFORMER.params, param("norm.weight", (64,)), HEAD)
BLOCK_OF = {p.fqn: block.name for block in TRANSFORMER.blocks for p in block.params}
STOCK_EXCLUDE = [r"^tok_embeddings\.weight$", r"^output\.weight$"]


def test_a_weight_matched_by_an_include_and_no_exclude_is_a_matrix():
    routing = route(PARAMS, BLOCK_OF, [r"attention\.w", r"\.w[qko1]\."], [r"layers\.1\.attention"])
    assert routing.matrices == (
        "layers.0.attention.wq.weight",
        "layers.0.attention.wk.weight",
        "layers.0.attention.wv.weight",
        "layers.0.attention.wo.weight",
        "layers.0.feed_forward.w1.weight",
        "layers.1.feed_forward.w1.weight",
    )
    assert routing.matched_by == tuple(
        (fqn, r"attention\.w" if "attention" in fqn else r"\.w[qko1]\.") for fqn in routing.matrices
    )
    assert not routing.frozen
    assert set(routing.matrices) | set(routing.elementwise) == {p.fqn for p in PARAMS}
    assert len(routing.matrices) + len(routing.elementwise) == len(PARAMS)


def test_exclude_keeps_embedding_and_head_out_of_a_catch_all():
    routing = route(PARAMS, BLOCK_OF, ["weight"], STOCK_EXCLUDE)
    assert set(routing.matrices) == TRANSFORMER.matrices
    assert EMBEDDING.fqn in routing.elementwise


def test_bracket_pattern_takes_exactly_the_weights_it_names():
    """Case 29: the pattern `w[123]` takes w1, w2 and w3, neither wq nor a norm."""
    routing = route(PARAMS, BLOCK_OF, ["w[123]"], [])
    assert routing.matrices == tuple(
        f"layers.{layer}.feed_forward.w{i}.weight" for layer in range(2) for i in (1, 2, 3)
    )


@pytest.mark.parametrize(
    "wrapper",
    ["_checkpoint_wrapped_module", "_orig_mod", "_orig_mod._checkpoint_wrapped_module"],
)
def test_wrapped_names_route_identically(wrapper):
    """Case 29: routing is the same under activation checkpointing and compile."""
    plain = route(PARAMS, BLOCK_OF, [r"^layers\.\d+\.feed_forward", r"attention\.wq"], [r"\.w2"])

    def wrapped(fqn: str) -> str:
        return re.sub(r"^(layers\.\d+)\.", rf"\1.{wrapper}.", fqn)

    params = [ParamMeta(wrapped(p.fqn), p.shape, p.dtype, p.itemsize) for p in PARAMS]
    block_of = {wrapped(fqn): block for fqn, block in BLOCK_OF.items()}
    include = [r"^layers\.\d+\.feed_forward", r"attention\.wq"]
    assert route(params, block_of, include, [r"\.w2"]) == plain
    assert plain.is_matrix(wrapped("layers.0.attention.wq.weight"))
    assert not plain.is_matrix(wrapped("layers.0.feed_forward.w2.weight"))


def test_routing_does_not_depend_on_the_order_of_block_of():
    reversed_map = dict(reversed(BLOCK_OF.items()))
    assert route(PARAMS, reversed_map, ["w[123]"], []) == route(PARAMS, BLOCK_OF, ["w[123]"], [])


def test_the_logical_shape_decides():
    """Case 18: metadata carries the logical shape, so owners and non-owners route the same.

    The reported fault routes by the local shard: a rank that sees shape (0,) finds no 2D weight.
    Given such metadata, routing refuses instead of sending everything to the elementwise optimizer.
    """
    routings = [route(PARAMS, BLOCK_OF, ["w[123]"], []) for _rank in range(4)]
    assert all(routing == routings[0] for routing in routings)
    assert len(routings[0].matrices) == 6

    emptied = [ParamMeta(p.fqn, (0,), p.dtype, p.itemsize) for p in PARAMS]
    with pytest.raises(RoutingError, match="matches no trainable 2D weight"):
        route(emptied, BLOCK_OF, ["w[123]"], [])


def test_only_2d_weights_become_matrices():
    """Case 27: 1xN is a matrix; 0D, 1D, 3D and 4D are elementwise, whatever the pattern."""
    params = [
        param("b.row", (1, 16)),
        param("b.square", (8, 16)),
        param("b.conv", (8, 4, 3, 3)),
        param("b.experts", (4, 16, 8)),
        param("b.bias", (16,)),
        param("b.scale", ()),
        param("b.frozen", (8, 16), trainable=False),
    ]
    routing = route(params, {p.fqn: "b" for p in params}, ["b"], [])
    assert routing.matrices == ("b.row", "b.square")
    assert routing.elementwise == ("b.conv", "b.experts", "b.bias", "b.scale")
    assert routing.frozen == ("b.frozen",)
    assert not routing.is_matrix("b.frozen")


INCLUDE, EXCLUDE = "matrix_optimizer.include", "matrix_optimizer.exclude"


@pytest.mark.parametrize(
    ("include", "exclude", "fragments"),
    [
        ([], [], [f"{INCLUDE} = []", "at least one regex", "stock train spec"]),
        ("w1", [], [f"{INCLUDE} = 'w1'", "single string", "write ['w1']"]),
        (["w1"], "w2", [f"{EXCLUDE} = 'w2'", "single string"]),
        ([3], [], [f"{INCLUDE} = 3", "not a string"]),
        (["w[12"], [], [f"{INCLUDE} = 'w[12'", "not a regular expression", "correct it"]),
        (["w1"], ["(w2"], [f"{EXCLUDE} = '(w2'", "not a regular expression"]),
        (
            ["w1", "w_1"],
            [],
            [
                f"{INCLUDE} = 'w_1'",
                "no trainable 2D weight",
                "'layers.0.attention.wq.weight'",
                "more",
                "correct the pattern or remove it",
            ],
        ),
        (
            ["ffn_norm"],
            [],
            [f"{INCLUDE} = 'ffn_norm'", "'layers.0.ffn_norm.weight'", "(64,)", "by rule"],
        ),
        (["w1"], ["lm_head"], [f"{EXCLUDE} = 'lm_head'", "no parameter", "correct the pattern"]),
        (
            ["weight"],
            [],
            [
                f"{INCLUDE} = 'weight'",
                "'tok_embeddings.weight'",
                "'output.weight'",
                "outside every block",
                r"add '^tok_embeddings\.weight$', '^output\.weight$' to matrix_optimizer.exclude",
            ],
        ),
        (["w1", "w2"], [r"\.w\d\."], [f"{EXCLUDE} = ", "removes every weight", "['w1', 'w2']"]),
    ],
)
def test_errors_name_the_key_the_value_and_the_remedy(include, exclude, fragments):
    with pytest.raises(RoutingError) as error:
        route(PARAMS, BLOCK_OF, include, exclude)
    message = str(error.value)
    missing = [part for part in (*fragments, "Legal: ", "Remedy: ") if part not in message]
    assert not missing, message


def test_the_remedy_for_a_weight_outside_the_blocks_works():
    with pytest.raises(RoutingError) as error:
        route(PARAMS, BLOCK_OF, ["weight"], [])
    _, _, remedy = str(error.value).partition("Remedy: add ")
    exclude = re.findall(r"'([^']+)'", remedy)
    assert set(route(PARAMS, BLOCK_OF, ["weight"], exclude).matrices) == TRANSFORMER.matrices


def test_a_model_without_any_2d_weight_says_so():
    with pytest.raises(RoutingError, match="this model has none"):
        route([param("b.bias", (4,))], {"b.bias": "b"}, ["w"], [])


def test_a_pattern_that_finds_only_frozen_weights_says_so():
    params = [param("b.base", (4, 4), trainable=False), param("b.lora", (4, 2))]
    with pytest.raises(RoutingError, match=r"'b\.base' \(shape \(4, 4\), trainable=False\)"):
        route(params, {p.fqn: "b" for p in params}, ["lora", "base"], [])


def test_a_name_listed_twice_is_refused():
    again = ParamMeta("layers.0._orig_mod.attention.wq.weight", (64, 64), "float32", 4)
    with pytest.raises(RoutingError, match=r"'layers\.0\.attention\.wq\.weight'.*tied"):
        route((*PARAMS, again), BLOCK_OF, ["w1"], [])


@pytest.mark.parametrize(
    "fields",
    [
        {"elementwise": ("a",)},
        {"frozen": ("b",), "elementwise": ("b",)},
        {"matrices": ("a", "a")},
        {"matched_by": (("b", "x"),)},
        {"matched_by": (("a", "x"), ("a", "y"))},
    ],
)
def test_a_routing_assigns_each_parameter_once(fields):
    legal: dict[str, Any] = {
        "matrices": ("a",),
        "elementwise": (),
        "frozen": (),
        "matched_by": (("a", "x"),),
    }
    Routing(**legal)
    with pytest.raises(RoutingError, match="legal: each"):
        Routing(**(legal | fields))


def test_asking_for_an_unknown_parameter_is_an_error():
    routing = route(PARAMS, BLOCK_OF, ["w1"], [])
    with pytest.raises(KeyError, match="was not routed"):
        routing.is_matrix("layers.9.feed_forward.w1.weight")
