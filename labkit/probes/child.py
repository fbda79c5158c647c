"""Ask another Python process a question, so that a crash or a hang there is an answer here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

SECONDS = 90.0


class ChildFailed(RuntimeError):
    """The child crashed, hung, or raised; the message is its last line."""


def ask(code: str, *, python: str | None = None, seconds: float = SECONDS) -> dict[str, Any]:
    """Run ``code``, which prints one JSON object as its last line, and return that object.

    Args:
        code: Python source.
        python: interpreter to use; default this one.
        seconds: time limit.

    Raises:
        ChildFailed: it ended with another exit code, printed no JSON, or took too long.
    """
    environment = dict(os.environ, PYTHONIOENCODING="utf-8")
    try:
        done = subprocess.run(
            [python or sys.executable, "-c", code],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=seconds,
            check=False,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        raise ChildFailed(f"no answer within {seconds:.0f} s") from None
    except OSError as error:
        raise ChildFailed(str(error)) from error
    last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    if done.returncode != 0:
        raise ChildFailed(last)
    try:
        answer = json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        raise ChildFailed(f"no answer in its output; {last}") from None
    if not isinstance(answer, dict):
        raise ChildFailed(f"unexpected answer {answer!r}")
    return answer
