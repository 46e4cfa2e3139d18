"""What a run costs and how to lay it out, before it starts: memory, FLOPs, time, money. Formulas; no GPU is needed."""
