"""What a run needs to survive: states in memory and on disk that are whole or not there."""

from zero2all.resilience.checkpoint import Checkpoints
from zero2all.resilience.flash import PLACE, flash_directory
from zero2all.resilience.guard import Guard
from zero2all.resilience.keeper import Found, Keeper
from zero2all.resilience.lock import locked
from zero2all.resilience.team import Team

__all__ = ["PLACE", "Checkpoints", "Found", "Guard", "Keeper", "Team", "flash_directory", "locked"]
