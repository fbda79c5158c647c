"""Benchmarks: measure on this machine, write one record a run, print and plot it."""
