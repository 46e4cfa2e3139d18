"""The story world in Chinese."""
