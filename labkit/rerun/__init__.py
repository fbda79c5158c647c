"""Suites of notebooks, run again and again: here, over a Dask cluster, or by the machine's scheduler."""
