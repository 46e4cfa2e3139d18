"""The ``z2a`` command: one thin file a command group; parse, call, print."""
