"""What ``labkit generate``, ``perplexity`` and ``quantize`` do, apart from reading their options."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from labkit.errors import InputError, require

DTYPES = ("float32", "bfloat16", "float16")
# format, group size, offset; None is the model as stored.
SWEEP: tuple[tuple[str, int, bool] | None, ...] = (
    None,
    *((bits, group, offset) for bits in ("w4", "w3") for group in (32, 64) for offset in (False, True)),
)


@dataclass(frozen=True)
class Loading:
    """How a model is to be loaded, as the options say it."""

    source: str | None
    bits: str | None
    group: str | None
    offset: bool
    device: str
    dtype: str

    def load(self) -> Any:
        """Check the options, then load; see :func:`labkit.models.zoo.load_model`."""
        from labkit.course.lab import pick_device
        from labkit.models.zoo import load_model

        require(self.dtype in DTYPES, "dtype", repr(self.dtype), ", ".join(DTYPES))
        device = pick_device(self.device)
        import torch

        return load_model(
            self.source,
            bits=self.bits,
            group_size=group_size(self.group),
            offset=self.offset,
            device=device,
            dtype=getattr(torch, self.dtype),
        )


def group_size(text: str | None) -> int | str | None:
    """ "64" to 64, "row" to "row", None to None; what else is not a group size is refused."""
    if text is None or text == "row":
        return text
    try:
        value = int(text)
    except ValueError:
        value = 0
    require(value in (16, 32, 64, 128), "group", repr(text), "16, 32, 64, 128 or row")
    return value


def per_layer(pairs: list[str]) -> dict[str, str]:
    """["mlp=w3", …] to a mapping, in order."""
    rules: dict[str, str] = {}
    for pair in pairs:
        pattern, equals, form = pair.partition("=")
        require(bool(pattern and equals and form), "layer", repr(pair), "PATTERN=FORMAT, such as mlp=w3")
        require(pattern not in rules, "layer", f"{pattern!r} twice", "each pattern once")
        rules[pattern] = form
    return rules


def generate(
    prompt: str,
    loading: Loading,
    *,
    max_tokens: int,
    temperature: float,
    seed: int,
    chat: bool,
    stats: bool,
) -> None:
    """Stream the answer to standard output; the speed goes to standard error."""
    from labkit.models.generate import generate as run
    from labkit.models.sampling import Sampling

    # Refused before a model is loaded: loading takes seconds, a typing mistake should not.
    require(bool(prompt), "prompt", "empty text", "text that encodes to at least one token")
    require(max_tokens >= 1, "max_tokens", max_tokens, "a whole number of at least 1")
    Sampling(temperature=temperature, seed=seed)
    model = loading.load()
    generation = run(model, prompt, max_tokens=max_tokens, temperature=temperature, seed=seed, chat=chat)
    warm_up(model)
    for piece in generation:
        print(piece, end="", flush=True)
    print(flush=True)
    if stats:
        got = generation.stats
        line = (
            f"[{got.prompt_tokens} prompt tokens at {got.prefill_tokens_per_s:.0f} tokens/s, "
            f"{got.new_tokens} new at {got.decode_tokens_per_s:.1f} tokens/s (measured), "
            f"stopped by {got.stop_reason}]"
        )
        print(line, file=sys.stderr)


def warm_up(model: Any) -> None:
    """One step on nothing: kernels prepare their layouts at first use, which is no speed of the model."""
    import torch

    model.decoder(torch.zeros(1, 1, dtype=torch.int64))


def perplexity(file: Path | None, loading: Loading, *, max_tokens: int, sweep: bool) -> None:
    """Print perplexity, of one setting or of the whole sweep, a line as soon as it is known."""
    from labkit.models.perplexity import corpus_text
    from labkit.models.perplexity import perplexity as run
    from labkit.models.requant import requantise

    require(max_tokens >= 2, "max_tokens", max_tokens, "a whole number of at least 2")
    require(
        not (sweep and loading.bits), "bits", f"{loading.bits} with --sweep", "one of the two", "drop --bits"
    )
    text = corpus_text() if file is None else read_text(file)
    model = loading.load()
    print(f"{model.name}, {file or 'data/corpus'}, at most {max_tokens} tokens, window 512 (measured)")
    print(f"{'weights':<24} {'perplexity':>10} {'tokens':>7}")
    for setting in SWEEP if sweep else (None,):
        name = loading.bits or "as stored"
        subject = model
        if setting is not None:
            bits, group, offset = setting
            name = f"{bits} group {group}{' offset' if offset else ''}"
            subject = requantise(model, bits=bits, group_size=group, offset=offset)
        result = run(subject, text, max_tokens=max_tokens)
        print(f"{name:<24} {result.ppl:>10.2f} {result.tokens:>7}", flush=True)


def read_text(path: Path) -> str:
    """Text of a UTF-8 file, with or without a byte order mark."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError("file", f"{path} ({error.strerror})", "a readable text file") from None
    except UnicodeDecodeError as error:
        fix = f"convert it, e.g. from GBK: iconv -f GBK -t UTF-8 {path.name}"
        raise InputError("file", f"{path}, not UTF-8 at byte {error.start}", "UTF-8 text", fix) from None


def quantize(
    src: Path, out: Path, *, bits: str, group: str | None, offset: bool, layers: list[str], resume: bool
) -> None:
    """Quantise a checkpoint with a progress bar in bytes of the source."""
    from labkit.models.quantize_checkpoint import QuantizeProgress, quantize_checkpoint

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("reading", total=None)

        def show(step: QuantizeProgress) -> None:
            name = step.name if len(step.name) <= 40 else f"…{step.name[-39:]}"
            bar.update(task, description=name, completed=step.bytes_done, total=step.bytes_total)

        result = quantize_checkpoint(
            src,
            out,
            bits=bits,
            group_size=group_size(group),
            offset=offset,
            per_layer=per_layer(layers),
            progress=show,
            resume=resume,
        )
    formats = ", ".join(f"{count} {form}" for form, count in sorted(result.formats.items()))
    print(f"{result.out}: {result.weights} weights ({formats}), {result.bytes_written / 1e6:.1f} MB", end="")
    print(", was complete already" if result.already_complete else f" from {result.bytes_read / 1e6:.1f} MB")
    if result.resumed:
        print(f"{result.resumed} weights were there from an earlier run")
