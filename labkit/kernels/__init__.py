"""Kernels by name: the registry, and the torch kernels that run anywhere."""
