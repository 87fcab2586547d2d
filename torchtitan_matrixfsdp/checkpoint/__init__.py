"""Checkpoints in other formats than TorchTitan's own. Imports ``layout``, ``comm``, ``runtime``."""
