"""Seed kernels: the CUDA kernels of the two articles the course grew from, as baselines and for teaching."""
