"""The story world in English."""
