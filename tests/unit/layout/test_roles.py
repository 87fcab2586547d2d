from __future__ import annotations

import pytest
from hypothesis import given

from tests.unit.layout.models import SMALL, Model, models, param
from torchtitan_matrixfsdp.layout import BlockMeta, RoleKind, build_roles


def test_roles_of_one_block_by_hand():
    block = BlockMeta(
        "layers.0",
        (
            param("layers.0.norm", (4,)),
            param("layers.0.wq", (4, 4)),
            param("layers.0.gate", (4, 2)),  # 2D, but routed elementwise
            param("layers.0.frozen_bias", (4,), trainable=False),
            param("layers.0.base", (3, 1, 5), trainable=False),
            param("layers.0.wo", (4, 3)),
            param("layers.0.experts", (2, 3, 5)),
        ),
    )
    (roles,) = build_roles([block], {"layers.0.wq", "layers.0.wo"})
    assert [(role.index, role.kind, role.name, role.numel, role.nbytes) for role in roles] == [
        (0, RoleKind.MATRIX, "layers.0.wq", 16, 64),
        (1, RoleKind.FROZEN, "layers.0.base", 15, 60),
        (2, RoleKind.MATRIX, "layers.0.wo", 12, 48),
        (3, RoleKind.TAIL, "layers.0/tail", 4 + 8 + 4 + 30, 4 * 46),
    ]
    assert [p.fqn for p in roles[3].params] == [
        "layers.0.norm",
        "layers.0.gate",
        "layers.0.frozen_bias",
        "layers.0.experts",
    ]


def test_blocks_without_a_tail_or_without_parameters():
    bare = BlockMeta("a", (param("a.w", (2, 2)),))
    assert [role.kind for role in build_roles([bare], {"a.w"})[0]] == [RoleKind.MATRIX]
    assert build_roles([BlockMeta("empty", ())], set()) == ((),)
    assert build_roles([], set()) == ()


@SMALL
@given(models())
def test_every_parameter_is_in_exactly_one_role(model: Model):
    roles = build_roles(model.blocks, model.matrices)
    for block, block_roles in zip(model.blocks, roles, strict=True):
        held = [p for role in block_roles for p in role.params]
        assert sorted(p.fqn for p in held) == sorted(p.fqn for p in block.params)
        assert sum(role.numel for role in block_roles) == sum(p.numel for p in block.params)
        assert [role.index for role in block_roles] == list(range(len(block_roles)))
        kinds = [role.kind for role in block_roles]
        assert RoleKind.TAIL not in kinds[:-1]
    taken = {r.params[0].fqn for b in roles for r in b if r.kind is RoleKind.MATRIX}
    assert taken == model.matrices


@pytest.mark.parametrize(
    ("matrices", "fragments"),
    [
        ({"a.w", "tok_embeddings.weight"}, ["'tok_embeddings.weight'", "none of the 1 blocks"]),
        ({"a.bias"}, ["a.bias", "(4,)", "2D"]),
        ({"a.conv"}, ["a.conv", "(2, 2, 3)", "2D"]),
        ({"a.frozen"}, ["a.frozen", "trainable=False"]),
    ],
)
def test_only_trainable_2d_weights_of_blocks_can_be_matrices(matrices, fragments):
    block = BlockMeta(
        "a",
        (
            param("a.w", (2, 2)),
            param("a.bias", (4,)),
            param("a.conv", (2, 2, 3)),
            param("a.frozen", (2, 2), trainable=False),
        ),
    )
    with pytest.raises(ValueError) as error:
        build_roles([block], matrices)
    assert all(fragment in str(error.value) for fragment in fragments)
