"""Many nodes: launching and supervising a job, checking nodes, files for Slurm and Kubernetes."""
