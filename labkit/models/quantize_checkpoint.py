"""Quantise a checkpoint of any size, one weight at a time: resumable, atomic, bounded in memory.

Work happens in ``OUT.partial``. After every shard its name goes into ``progress.json``, so a run that
was killed loses at most the shard it was writing; the same command continues, and the result has the
same bytes as an uninterrupted run. The last steps are the manifest and a rename to ``OUT``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.atomic import write_json, write_text
from labkit.errors import InputError, require
from labkit.models.checkpoint import MANIFEST, PROGRESS, VERSION, partial_path
from labkit.models.hf_files import read_json
from labkit.models.recipe import Recipe
from labkit.models.shard_writer import ShardWriter
from labkit.models.sources import WeightSource, open_source
from labkit.models.work_folder import LOCK, check_apart, clear, earlier_state, lock, shard_name

SHARD_BYTES = 256 << 20


@dataclass(frozen=True)
class QuantizeProgress:
    """How far a run is: weights and source bytes, with what an earlier run had done included.

    ``shard`` counts from 1; ``resumed`` is how many weights were there when this run began.
    """

    done: int
    total: int
    bytes_done: int
    bytes_total: int
    name: str
    shard: int
    shards: int
    resumed: int


@dataclass(frozen=True)
class QuantizeResult:
    """What a run made.

    Attributes:
        out: the finished folder.
        weights: how many weights it holds; ``resumed`` of them were there before this run.
        bytes_read: bytes of the source; ``bytes_written``: bytes of the shards.
        formats: format -> number of weights ("tensor" is a float one).
        already_complete: the folder existed, made from this source with these options.
    """

    out: Path
    weights: int
    resumed: int
    bytes_read: int
    bytes_written: int
    formats: dict[str, int]
    already_complete: bool = False


def quantize_checkpoint(
    src: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    bits: str | None = "w4",
    group_size: int | str | None = None,
    offset: bool = False,
    per_layer: Mapping[str, str] | None = None,
    progress: Callable[[QuantizeProgress], None] | None = None,
    resume: bool = True,
    shard_bytes: int = SHARD_BYTES,
) -> QuantizeResult:
    """Quantise the model ``src`` into the new folder ``out``.

    Args:
        src: Hugging Face folder (float, GPTQ or AWQ) or GGUF file.
        out: folder to make; it must not exist yet (an empty one is taken).
        bits: "w4", "w3", "mixed", "q8", "none" (float), or None / "keep": every weight as the source
            stores it, exactly.
        group_size: 16, 32, 64, 128 or "row"; None is 32, or the source's own where it already has the
            format. Weights that the source already has in the wanted format and group are kept exactly.
        offset: quantise asymmetrically (weights kept exactly keep their offset either way).
        per_layer: pattern -> format over the preset (:mod:`labkit.models.layer_bits`).
        progress: called after every weight.
        resume: continue an interrupted run; False throws it away and starts again.
        shard_bytes: about how large one shard of the result is.

    Raises:
        InputError: bad options, ``out`` in use, a partial result of another source or other options,
            files of somebody else in ``OUT.partial``, a full disk. ModelFileError, MissingModelError:
            the source or its tokenizer, before anything is written.
    """
    bits = None if bits == "keep" else bits
    recipe = Recipe.of(bits, group_size=group_size, offset=offset, per_layer=per_layer)
    require(
        isinstance(shard_bytes, int) and shard_bytes >= 1, "shard_bytes", shard_bytes, "a whole number >= 1"
    )
    src, out = Path(src), Path(out)
    if out.name in ("", ".."):
        out = out.resolve()  # "." has no name to put ".partial" behind
    check_apart(src, out)
    with contextlib.closing(open_source(src)) as source:
        job = _Job(source, out, recipe, _resume_line(src, out, bits, recipe, per_layer or {}), shard_bytes)
        finished = job.finished()
        if finished is not None:
            return finished
        earlier_state(job.work)  # refuses a stranger's folder before the lock is put into it
        companions = source.companions()
        with _naming_full_disk(job):
            with lock(job.work):
                resumed = job.begin(resume)
                job.run(resumed, progress)
                job.write_manifest(companions)
                if os.name != "nt":
                    return job.publish(resumed)
            return job.publish(resumed)  # Windows does not rename a folder with an open file in it


class _Job:
    """One source, one result, one recipe."""

    def __init__(self, source: WeightSource, out: Path, recipe: Recipe, line: str, shard_bytes: int) -> None:
        self.source, self.out, self.recipe, self.line = source, out, recipe, line
        self.work = partial_path(out)
        self.plan = recipe.plan(source.names)
        self.sizes = {
            name: recipe.estimate(
                form, source.shape(name), source.nbytes(name), quantised=source.is_quantised(name)
            )
            for name, form in self.plan.items()
        }
        self.shards = _partition(self.sizes, shard_bytes)
        self.identity = {
            "source": source.fingerprint(),
            "recipe": recipe.to_json(),
            "shards": len(self.shards),
        }
        self.done: list[dict[str, Any]] = []

    def finished(self) -> QuantizeResult | None:
        """The result when ``out`` is already there and the same; refuses any other content."""
        if not self.out.exists() or (self.out.is_dir() and not any(self.out.iterdir())):
            return None
        fix = "choose another folder, or remove this one"
        if not (self.out / MANIFEST).is_file():
            raise InputError("out", f"{self.out}, which exists", "a folder that does not exist yet", fix)
        manifest = read_json(self.out / MANIFEST)
        if any(manifest.get(key) != self.identity[key] for key in ("source", "recipe")):
            raise InputError(
                "out",
                f"{self.out}, a finished checkpoint of another source or other options",
                "a new folder",
                fix,
            )
        return self._result(manifest, resumed=len(self.plan), already_complete=True)

    def begin(self, resume: bool) -> int:
        """Prepare the working folder; returns how many weights an earlier run finished."""
        state = earlier_state(self.work)
        if state is not None and resume:
            for key, what in (("source", "a source that has changed since"), ("recipe", "other options")):
                require(
                    state.get(key) == self.identity[key],
                    "out",
                    f"{self.work}, begun with {what}",
                    "the same source and options as the run it continues",
                    f"repeat its command ({state.get('resume')}), or begin again with --no-resume",
                )
            require(
                state.get("shards") == len(self.shards),
                "shard_bytes",
                f"a division into {len(self.shards)} shards",
                f"{state.get('shards')} shards, as in the run it continues",
            )
            # Only an unbroken beginning counts: what follows a lost shard is made again with it.
            for index, shard in enumerate(state["done"][: len(self.shards)]):
                if not self._is_done(index, shard):
                    break
                self.done.append(shard)
        clear(self.work, keep={PROGRESS, *(shard["file"] for shard in self.done)})
        self._save_state()
        left = sum(self.sizes[name] for names in self.shards[len(self.done) :] for name in names)
        free = shutil.disk_usage(self.work).free
        if left > free:
            raise InputError(
                "out",
                f"{free / 1e6:.1f} MB free on its disk",
                f"{left / 1e6:.1f} MB",
                "free space, then run it again",
            )
        return sum(len(names) for names in self.shards[: len(self.done)])

    def run(self, resumed: int, progress: Callable[[QuantizeProgress], None] | None) -> None:
        """Write the shards that are missing."""
        total = {name: self.source.nbytes(name) for name in self.plan}
        count, read = resumed, sum(total[n] for names in self.shards[: len(self.done)] for n in names)
        for index in range(len(self.done), len(self.shards)):
            names = self.shards[index]
            writer = ShardWriter(self.work / shard_name(index), names)
            records = {}
            try:
                for name in names:
                    weight = self.source.read(name)
                    weight = self.recipe.apply(name, weight, self.plan[name], where=self.source.where(name))
                    records[name] = writer.add(name, weight)
                    del weight
                    count, read = count + 1, read + total[name]
                    if progress is not None:
                        progress(
                            QuantizeProgress(
                                count,
                                len(total),
                                read,
                                sum(total.values()),
                                name,
                                index + 1,
                                len(self.shards),
                                resumed,
                            )
                        )
                size = writer.finish()
            except BaseException:
                writer.discard()
                raise
            self.done.append({"file": writer.path.name, "bytes": size, "weights": records})
            self._save_state()

    def write_manifest(self, companions: Mapping[str, str]) -> None:
        """Write the companions (file name -> text) and, last of all, the manifest."""
        weights = [item for shard in self.done for item in shard["weights"].items()]
        require(
            [name for name, _ in weights] == list(self.plan),
            "out",
            f"{len(weights)} weights in the shards of {self.work}",
            f"the {len(self.plan)} weights of the source, each once",
            f"begin again: {self.line} --no-resume",
        )
        for name, text in companions.items():
            write_text(self.work / name, text)
        manifest = {
            "format": "labkit",
            "version": VERSION,
            "name": self.source.name,
            "config": self.source.config.to_dict(),
            "recipe": self.identity["recipe"],
            "source": self.identity["source"],
            "files": {shard["file"]: shard["bytes"] for shard in self.done},
            "weights": dict(weights),
        }
        write_json(self.work / MANIFEST, manifest)

    def publish(self, resumed: int) -> QuantizeResult:
        """Give the complete folder its name."""
        (self.work / LOCK).unlink(missing_ok=True)
        if self.out.is_dir():
            self.out.rmdir()  # an empty one; some systems do not rename onto it
        self.work.rename(self.out)
        (self.out / PROGRESS).unlink(missing_ok=True)
        return self._result(read_json(self.out / MANIFEST), resumed)

    def _is_done(self, index: int, shard: Any) -> bool:
        """Whether ``shard`` of an earlier run is on disk and holds what shard ``index`` of this one is."""
        path = self.work / shard_name(index)
        return (
            isinstance(shard, dict)
            and shard.get("file") == path.name
            and isinstance(shard.get("weights"), dict)
            and list(shard["weights"]) == self.shards[index]
            and path.is_file()
            and path.stat().st_size == shard.get("bytes")
        )

    def _save_state(self) -> None:
        write_json(self.work / PROGRESS, {**self.identity, "resume": self.line, "done": self.done})

    def _result(
        self, manifest: dict[str, Any], resumed: int, already_complete: bool = False
    ) -> QuantizeResult:
        formats: dict[str, int] = {}
        for record in manifest["weights"].values():
            formats[record["format"]] = formats.get(record["format"], 0) + 1
        return QuantizeResult(
            out=self.out,
            weights=len(manifest["weights"]),
            resumed=resumed,
            bytes_read=sum(self.source.nbytes(name) for name in self.plan),
            bytes_written=sum(manifest["files"].values()),
            formats=formats,
            already_complete=already_complete,
        )


def _partition(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Consecutive names in shards of about ``limit`` bytes: from sizes alone, so the same every run."""
    shards: list[list[str]] = []
    filled = 0
    for name, size in sizes.items():
        if not shards or (filled + size > limit and shards[-1]):
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _resume_line(src: Path, out: Path, bits: str | None, recipe: Recipe, per_layer: Mapping[str, str]) -> str:
    words = ["labkit", "quantize", str(src), str(out), "--bits", bits or "keep"]
    if recipe.group_size is not None:
        words += ["--group", str(recipe.group_size)]
    if recipe.offset:
        words.append("--offset")
    for pattern, form in per_layer.items():
        words += ["--layer", f"{pattern}={form}"]
    return " ".join(shlex.quote(word) for word in words)


@contextlib.contextmanager
def _naming_full_disk(job: _Job) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise InputError(
            "out",
            f"no space left on the disk of {job.work}",
            f"about {sum(job.sizes.values()) / 1e6:.1f} MB for the whole result",
            f"free space, then continue with: {job.line}",
        ) from error
