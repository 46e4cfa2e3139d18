"""The machine at hand: devices, CPUs, and the table of GPUs."""
