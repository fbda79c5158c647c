"""The engine: continuous batching over a paged KV cache, with scheduling policies side by side.

To read it in order: ``request`` (what is asked), ``executor`` (who computes), ``work`` (what is computed
together), ``policy`` (what comes next), ``admission`` and ``pool`` (who holds which blocks), ``scheduler``
(the books), ``runner`` (the loop, and faults), ``engine`` (the front door). Beside them: ``adaptive``,
``cost_model`` and ``sim``, ``sampling``, ``text``, ``metrics``.
"""
