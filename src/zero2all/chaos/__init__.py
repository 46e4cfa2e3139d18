"""Faults made on purpose, and proof that a run survives them: same losses, every sample once, nobody had to help.

Nothing is imported here, because every rank of the suite passes through.

>>> from zero2all.chaos.suite import run_suite
>>> rows = run_suite(Path("runs/chaos"), only=["kill a rank"], seed=0)
"""
