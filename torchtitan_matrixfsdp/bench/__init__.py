"""``python -m torchtitan_matrixfsdp.bench``: what owner shards move, how fast, in how much memory.

An entry point above the rooms: it may import all of them, and nothing imports it. It starts gloo
ranks of its own; under torchrun it is one of the ranks. ``docs/bench.md`` says what each number
means.
"""
