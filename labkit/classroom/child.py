"""The process that judges one notebook's answers; started by :mod:`labkit.classroom.grade`, never imported.

It reads one request, answers with signed lines, and is expected to be killed at any time. What the
student's notebook prints, claims or stores plays no part: the answers are taken out of its cells
(:mod:`labkit.classroom.answers`) and judged by the course's own checks.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import linecache
import os
import sys
import time
import types
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_TEXT = 400
_FILE_BYTES = 256 << 20
_AFTER = 60


class Channel:
    """Signed lines to the parent, on a descriptor of its own: standard output goes nowhere."""

    def __init__(self, key: bytes) -> None:
        private = os.dup(1)
        nothing = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1):
            os.dup2(nothing, standard)
        count = 0

        def send(**record: Any) -> None:
            nonlocal count
            count += 1
            text = json.dumps({"n": count, **record})
            mark = hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
            line = f"{mark} {text}\n".encode()
            while line:
                line = line[os.write(private, line) :]

        self.send = send


def main() -> None:
    """Judge what the request names, and end without running anybody's exit handlers."""
    request = json.loads(sys.stdin.buffer.readline())
    own = Path(request["folder"])
    channel = Channel(bytes.fromhex(request.pop("key")))
    sys.path.insert(0, str(ROOT))
    from labkit.classroom import walls

    walls.die_with_parent()
    walls.keep_orphans()
    stands = walls.build([own, Path(os.devnull)])
    try:
        judged = _judge(request, own, channel, stands)
    except Exception as error:  # ours, not the student's: the parent says so
        channel.send(event="broken", reason=_short(f"{type(error).__name__}: {error}"))
        judged = False
    if judged:
        channel.send(event="end")
        time.sleep(
            _AFTER
        )  # to be ended by the parent: what an answer has left behind is its child until then
    os._exit(0)


def _judge(request: dict[str, Any], own: Path, channel: Channel, stands: str) -> bool:
    from labkit.classroom.submission import Unreadable, chapter_of, load
    from labkit.course.notebook import read

    try:
        book = load(Path(request["notebook"]))
        number = chapter_of(book, request["names"])
    except Unreadable as error:
        channel.send(event="unreadable", reason=_short(str(error)))
        return True
    if number not in request["chapters"]:
        channel.send(event="other chapter", chapter=number)
        return True
    names = request["names"][number]
    channel.send(event="book", chapter=number, walls=stands)
    from labkit.classroom.answers import answers

    course = read(Path(request["courses"][number]))
    judge = _Judge(number, own, request["memory"])
    skip = set(request["skip"])
    for answer in answers(course, book, names):
        if answer.exercise in skip:
            continue
        channel.send(event="begin", exercise=answer.exercise)
        result = judge.judge(answer)
        channel.send(event="verdict", exercise=answer.exercise, **result)
        if result["state"] == "tampered":
            return False  # this process is not to be trusted again; the parent starts another
    return True


class _Judge:
    """Everything trusted is imported and looked at before the first answer runs."""

    def __init__(self, number: str, own: Path, memory: int) -> None:
        import labkit
        from labkit import paths
        from labkit.check import registry, session, stub
        from labkit.check.verdict import NotYet, not_yet
        from labkit.classroom import guard

        package = Path(labkit.__file__).parent
        self.exercises = {item.name: item for item in registry.exercises(number)}
        self.session, self.chapter = session.current, number
        self.guard = guard.Guard(own, (package / "solutions", package / "check"), (package, paths.data_dir()))
        self.trick = guard.trick
        self.student = guard.STUDENT

        class Honest(stub.Watched):
            """Refuses a value that decides by itself what it equals."""

            @property
            def last(self) -> Any:
                return self._last

            @last.setter
            def last(self, value: Any) -> None:
                self._last = value
                if name := guard.trick(value):
                    raise NotYet(not_yet("plain values", f"a {name}, which may equal anything"))

        stub.Watched = Honest  # type: ignore[misc]
        _limit(memory)
        sys.stdout.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        self.judge_code = guard.Judge()

    def judge(self, answer: Any) -> dict[str, Any]:
        """State, score and words for one answer; the judge itself is looked at afterwards."""
        item = self.exercises[answer.exercise]
        tried = len(self.guard.tried)
        self.session.chapter, self.session.solve = self.chapter, False
        with self.guard.watching():
            state, score, words = self._verdict(item, answer)
            passes_all = self._passes_nonsense(item)
        if self.session.solve or passes_all or (changed := self.judge_code.changed()):
            what = (
                "the check passed a wrong answer"
                if passes_all
                else changed
                if not self.session.solve
                else "solve"
            )
            state, score, words = "tampered", None, f"the judge was changed while the answer ran: {what}"
        notes = sorted(set(self.guard.tried[tried:]))
        return {"state": state, "score": score, "message": _short(words), "tried": [_short(n) for n in notes]}

    def _verdict(self, item: Any, answer: Any) -> tuple[str, float | None, str]:
        if not answer.expression:
            return "missing", None, answer.problem
        if answer.problem:
            return "not yet", None, answer.problem
        try:
            value = self._value(answer)
            if name := self.trick(value):
                return "not yet", None, f"plain values expected; got a {name}, which may equal anything"
            verdict = item._framed(item._judge(value, {}, own=True))
        except _Failed as failed:
            return "not yet", None, str(failed)
        except (
            BaseException
        ) as error:  # KeyboardInterrupt, GeneratorExit: nothing of a student's ends the judge
            return "not yet", None, f"{type(error).__name__}: {error}"
        parts = [verdict.message, verdict.score_line()]
        parts += [
            f"expected {verdict.expected}" * bool(verdict.expected),
            f"got {verdict.got}" * bool(verdict.got),
        ]
        score = verdict.score if isinstance(verdict.score, float) else None
        return str(verdict.state), score, "; ".join(part for part in parts if part)

    def _value(self, answer: Any) -> Any:
        """Run the statements in a module of their own, and evaluate what the check is given."""
        module = types.ModuleType("__main__")
        module.__dict__["display"] = lambda *_, **__: None
        sys.modules["__main__"] = module
        first: BaseException | None = None
        for one in answer.statements:
            name = f"{self.student}{one.cell.label}>" if one.cell.own else f"<{one.cell.label}>"
            lines = one.cell.source.splitlines(keepends=True)
            linecache.cache[name] = (len(one.cell.source), None, lines, name)
            try:
                code = compile(_module(one.node), name, "exec", dont_inherit=True)
                exec(code, module.__dict__)
            except BaseException as error:
                first = first or error
        try:
            code = compile(answer.expression, f"{self.student}answer>", "eval", dont_inherit=True)
            return eval(code, module.__dict__)
        except BaseException as error:
            cause = first or error
            raise _Failed(f"{type(cause).__name__}: {cause}") from None

    def _passes_nonsense(self, item: Any) -> bool:
        """Would the judge pass an answer that is surely wrong? Then somebody has changed it."""
        for nonsense in (_nothing_right, "neither text nor kernel", [_Nonsense()]):
            with contextlib.suppress(BaseException):
                if item._framed(item._judge(nonsense, {}, own=False)).state == "passed":
                    return True
        return False


class _Failed(Exception):
    """The statements gave no answer."""


class _Nonsense:
    """Equal to nothing."""


def _nothing_right(*_: Any, **__: Any) -> Any:
    return _Nonsense()


def _module(node: Any) -> Any:
    import ast

    return ast.Module([node], [])


def _limit(memory: int) -> None:
    """Address space, file size and core files, where the system has such limits."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        import psutil

        here = psutil.Process().memory_info().vms
        for kind, most in (
            (resource.RLIMIT_AS, here + memory),
            (resource.RLIMIT_FSIZE, _FILE_BYTES),
            (resource.RLIMIT_CORE, 0),
        ):
            _, hard = resource.getrlimit(kind)
            bound = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(kind, (bound, bound))


def _short(text: Any) -> str:
    """One printable line of bounded length."""
    plain = "".join(ch if ch.isprintable() else " " for ch in str(text)[: 4 * _TEXT])
    plain = " ".join(plain.split())
    return plain if len(plain) <= _TEXT else plain[: _TEXT - 1] + "…"


if __name__ == "__main__":
    main()
