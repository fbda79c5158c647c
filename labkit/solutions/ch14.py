"""Reference solutions of chapter 14."""

from __future__ import annotations

import hmac
import math


# The flag, not the exception, says whether the engine still works: so every way out aborts once.
def deliver(steps, send, gone, abort):
    """Pass tokens on while somebody reads; the number handed to ``send``."""
    sent, done = 0, False
    try:
        while not gone():
            token = next(steps, steps)
            if token is steps:
                done = True
                break
            if token is not None:
                send(token)
                sent += 1
    except ConnectionError:
        pass  # the client has left: that is all right
    finally:
        if not done:
            abort()
    return sent


# Bytes are kept until a line is complete, so that no character is ever cut; in UTF-8 no byte of a longer
# character looks like a newline.
def sse_data(chunks):
    """The data of each event, as soon as its empty line is there."""
    rest, data = b"", []
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for raw in lines:
            line = raw.removesuffix(b"\r").decode("utf-8")
            if line.startswith("data:"):
                data.append(line[5:].removeprefix(" "))
            elif not line and data:
                yield "\n".join(data)
                data = []


def refuse_body(body, fields, required, context):
    """None, or words that name the field to blame."""
    if not isinstance(body, dict):
        return "body: expected an object"
    for name in body:
        if name not in fields:
            return f"{name}: unknown field"
    for name, kind in fields.items():
        value = body.get(name)
        if value is None:
            if name in required:
                return f"{name}: required"
            continue
        kinds = (int, float) if kind is float else (kind,)
        if type(value) not in kinds or (kind is float and not math.isfinite(value)):
            return f"{name}: expected {kind.__name__}, got {value!r}"
    most = body.get("max_tokens")
    if most is not None and most < 1:
        return f"max_tokens: at least 1, got {most}"
    total = len(body["prompt"]) + (most or 1)
    if total > context:
        return f"prompt: {total} tokens were asked for, the context is {context}"
    return None


# compare_digest looks at every byte of both, whatever it has seen.
def same_key(given, expected):
    """Whether the keys are equal, in a time that does not tell where they differ."""
    return hmac.compare_digest(b"" if given is None else given, expected)


def retry_wait(attempt, retry_after, draw):
    """Never before Retry-After, spread ever more widely, with a bound."""
    least = 1.0 if retry_after is None else retry_after
    if attempt >= 10 or least > 60.0:
        return None
    return min(least + draw() * min(2.0 * 2**attempt, 16.0), 60.0)
