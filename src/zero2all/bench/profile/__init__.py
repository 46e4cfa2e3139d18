"""``z2a bench profile``: a few steps of a recipe under torch's profiler, and what the result suggests."""

from zero2all.bench.profile.profile_run import profile_recipe
from zero2all.bench.profile.report import Profile, format_profile

__all__ = ["Profile", "format_profile", "profile_recipe"]
