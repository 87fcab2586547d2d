from __future__ import annotations

import pytest

from torchtitan_matrixfsdp.layout import ParamMeta, canonical_fqn


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("layers.0.attention.wq.weight", "layers.0.attention.wq.weight"),
        ("_orig_mod.layers.0.wq.weight", "layers.0.wq.weight"),
        ("layers.0._orig_mod._checkpoint_wrapped_module.wq.weight", "layers.0.wq.weight"),
        (
            "layers.0._fsdp_wrapped_module.wq._checkpoint_wrapped_module.weight",
            "layers.0.wq.weight",
        ),
        # Only whole components are wrappers, and "module" is a name of the model's own.
        ("module.my_orig_mod.weight", "module.my_orig_mod.weight"),
        ("layers.0._orig_mod", "layers.0"),
    ],
)
def test_canonical_fqn_drops_wrappers_and_nothing_else(name, expected):
    assert canonical_fqn(name) == expected
    assert canonical_fqn(expected) == expected


def test_param_meta_sizes():
    meta = ParamMeta("w", (3, 5), "bfloat16", 2)
    assert (meta.numel, meta.nbytes, meta.ndim) == (15, 30, 2)
    scalar = ParamMeta("s", (), "float64", 8)
    assert (scalar.numel, scalar.nbytes, scalar.ndim) == (1, 8, 0)


def test_param_meta_stores_the_canonical_name():
    assert ParamMeta("layers.0._orig_mod.w", (1,), "float32", 4) == ParamMeta(
        "layers.0.w", (1,), "float32", 4
    )


@pytest.mark.parametrize(
    ("changed", "fragments"),
    [
        ({"fqn": "_orig_mod"}, ["fqn is empty"]),
        ({"shape": (2, -1)}, ["layers.0.w", "(2, -1)", ">= 0"]),
        ({"itemsize": 0}, ["layers.0.w", "itemsize is 0", ">= 1"]),
        ({"dtype": "torch.float32"}, ["layers.0.w", "'torch.float32'", '"float32"']),
    ],
)
def test_param_meta_refuses_nonsense(changed, fragments):
    fields = {"fqn": "layers.0.w", "shape": (2, 2), "dtype": "float32", "itemsize": 4} | changed
    with pytest.raises(ValueError) as error:
        ParamMeta(**fields)
    assert all(fragment in str(error.value) for fragment in fragments)
