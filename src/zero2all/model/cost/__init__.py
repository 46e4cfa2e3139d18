"""What a model costs before it is built: parameters, memory, FLOPs, shapes."""
