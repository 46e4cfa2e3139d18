"""Makes the images of the documentation from real runs."""
