"""What every package may use, and what knows nothing of models: errors, files, processes, charts."""
