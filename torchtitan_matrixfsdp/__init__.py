"""Owner-sharded ZeRO-3 for matrix optimizers, as a TorchTitan plugin.

The packages depend on one another in one direction only:

    layout -> comm -> runtime -> {optim, checkpoint} -> titan

An arrow reads "may be imported by". `layout` is pure Python, `comm`, `runtime`, `optim` and
`checkpoint` need torch, and `titan` alone knows TorchTitan. The entry points (`train`, `plan`,
`bench`, `checkpoint.__main__`) stand above all of them, and nothing imports an entry point.
`tests/unit/test_import_boundaries.py` enforces this.

Importing this package imports nothing else, torch included.
"""

__version__ = "0.1.0"
