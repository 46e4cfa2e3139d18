"""The ``z2a`` command: one thin file a command group; parse, call, print."""

import os

from zero2all.base.environment import set_cuda_environment
from zero2all.base.machine.cpus import limit_openmp_spinning

# All here, because every way into the command comes past before it imports torch.
limit_openmp_spinning()
set_cuda_environment()
# What torch cannot compute on the GPU of a Mac is computed on the CPU, with a warning, instead of ending the run.
os.environ.setdefault("PYTORCH_ENABLE_MPS_FALLBACK", "1")
