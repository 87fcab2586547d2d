"""The error of this package."""


class CheckpointError(Exception):
    """What a user can mend about a checkpoint."""
