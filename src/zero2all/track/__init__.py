"""Experiment tracking: a durable run record that can neither stop nor slow training."""

from zero2all.track.run_record import RunRecord, read_steps
from zero2all.track.sinks import Sink, open_sinks

__all__ = ["RunRecord", "Sink", "open_sinks", "read_steps"]
