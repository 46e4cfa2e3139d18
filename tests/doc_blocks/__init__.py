"""Pages whose blocks run, by area of the documentation."""
