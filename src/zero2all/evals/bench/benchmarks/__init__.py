"""The built-in benchmarks, as functions that read their files. A new one is a new file."""
