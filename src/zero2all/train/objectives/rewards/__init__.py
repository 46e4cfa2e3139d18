"""The built-in reward functions: one file for each, whose name is the function's."""
