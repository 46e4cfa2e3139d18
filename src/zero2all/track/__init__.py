"""reslog: the durable record of a run, which can neither stop nor slow training."""

from zero2all.track.reslog import Record, read_steps
from zero2all.track.sinks import Sink, open_sinks

__all__ = ["Record", "Sink", "open_sinks", "read_steps"]
