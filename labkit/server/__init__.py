"""The OpenAI-compatible server: ``labkit serve``.

To read it in order: ``settings``, ``errors``, ``schemas`` (what may be asked), ``call`` (one HTTP request in
the engine), ``loop`` (the engine's own thread), ``service`` (from a request to a call), ``answers`` (from a
call to a body or a stream), ``shape``, ``completions`` and ``chat`` (the two shapes of an answer), ``chunks``
(the events of a stream), ``app``, ``process``.
Beside them: ``gate`` (keys and body sizes), ``connection`` (slow heads), ``door`` (how many at once),
``prompts``, ``logprobs``, ``stream``, ``metrics``, ``spread``, ``status``.
"""
