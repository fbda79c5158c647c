"""Chat templates: messages to the text a model was trained on, by sandboxed Jinja."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from labkit.errors import InputError, require


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, str]],
    *,
    generation_prompt: bool = True,
    bos_token: str = "",
    eos_token: str = "",
) -> str:
    """Render ``messages`` with ``template``, with the settings chat templates are written for.

    The template comes out of a model file, so it runs in Jinja's immutable sandbox: no attribute
    of Python objects, no mutation, bounded ranges. Text of a message is inserted as it is; a
    control token spelled out in it is read as one, as every engine of this kind does.

    Raises:
        InputError: malformed messages, or a template that is broken or refuses them.
    """
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    check_messages(messages)

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    def strftime_now(pattern: str) -> str:
        return datetime.datetime.now().strftime(pattern)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    try:
        return environment.from_string(template).render(
            messages=[dict(message) for message in messages],
            add_generation_prompt=generation_prompt,
            bos_token=bos_token,
            eos_token=eos_token,
        )
    except Exception as error:  # a template is a program of the model file: anything may go wrong in it
        raise InputError(
            "messages", f"chat template: {error}", "messages the model's template takes"
        ) from error


def check_messages(messages: object) -> None:
    """Raise InputError unless ``messages`` is a non-empty list of {"role": str, "content": str}."""
    good = isinstance(messages, Sequence) and not isinstance(messages, str) and len(messages) > 0
    require(good, "messages", repr(messages)[:80], 'a list of {"role": ..., "content": ...}')
    for i, message in enumerate(messages):  # type: ignore[arg-type, var-annotated]
        fine = isinstance(message, Mapping) and all(
            isinstance(message.get(k), str) for k in ("role", "content")
        )
        require(fine, f"messages[{i}]", repr(message)[:80], "a mapping with text under role and content")
