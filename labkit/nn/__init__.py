"""Layers of the decoder, and the table that chooses a kernel for each call."""
