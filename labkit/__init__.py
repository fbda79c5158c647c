"""labkit: the engine and the course frame of a lab series on low-bit LLM inference.

Importing ``labkit`` is cheap on purpose: ``labkit doctor`` must run before torch
can be imported, so nothing heavy is loaded here.
"""

__version__ = "0.1.0"
