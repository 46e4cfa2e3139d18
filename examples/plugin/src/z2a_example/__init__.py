"""One plugin of each kind for zero2all. pyproject.toml names them as entry points."""
