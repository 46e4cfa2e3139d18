"""The ``z2a`` command: one thin file a command group; parse, call, print."""

from zero2all.threads import wait_briefly

wait_briefly()  # here, because every way into the command comes past before it imports torch
