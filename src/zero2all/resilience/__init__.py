"""What a run needs to survive: checkpoints that are whole or not there."""

from zero2all.resilience.checkpoint import Checkpoints

__all__ = ["Checkpoints"]
