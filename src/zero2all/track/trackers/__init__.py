"""The built-in sinks: one file for each, whose name is the sink's."""
