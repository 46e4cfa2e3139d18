"""The ``z2a`` command: one thin file a command group; parse, call, print."""

from zero2all.openmp import limit_openmp_spinning

limit_openmp_spinning()  # here, because every way into the command comes past before it imports torch
