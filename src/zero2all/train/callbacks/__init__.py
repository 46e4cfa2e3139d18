"""The built-in callbacks: one file for each, whose name is the callback's. Each is a ``Component`` of the trainer."""
