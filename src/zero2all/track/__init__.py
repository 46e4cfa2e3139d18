"""reslog: the durable record of a run, which can neither stop nor slow training."""

from zero2all.track.reslog import Record, read_steps

__all__ = ["Record", "read_steps"]
