"""Fault injection, and proof that a run recovers: same losses, every sample seen once, no manual help.

Nothing is imported here, because every rank of the suite imports this package.
"""
