"""The commands of ``labkit bench``; torch and matplotlib are loaded when one runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from labkit.bench import open_loop_cli, serving_cli

bench_app = typer.Typer(
    no_args_is_help=True, help="Measure on this machine; write a record, print and plot it."
)

EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED = 0, 1, 130

Out = Annotated[
    Path | None, typer.Option("--out", help="JSON to write [results/bench/NAME-DEVICE-DATE.json].")
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]


@bench_app.callback()
def top() -> None:
    """Measure on this machine; write a record, print and plot it."""


@bench_app.command()
def gemm(
    table: Annotated[
        str,
        typer.Option(
            "--table",
            help="seed (the article's tables and the sweep), tiled_w4, tiled_w3, w3_batch_tile, sweep, "
            "or fast (the tensor-core family; by default on the shapes 3b,7b).",
        ),
    ] = "seed",
    shapes: Annotated[
        str | None,
        typer.Option("--shapes", help="Of sweep and fast: N×K such as 5632x2048, or 0.5b, 3b, 7b."),
    ] = None,
    m: Annotated[str | None, typer.Option("--m", help="Rows of sweep and fast, such as 1-8,16,32.")] = None,
    bits: Annotated[str, typer.Option("--bits", help="4, 3 or both: 4,3.")] = "4,3",
    group: Annotated[int, typer.Option("--group", help="Of sweep and fast: 128, 64, 32 or 16.")] = 128,
    dtype: Annotated[
        str, typer.Option("--dtype", help="Activations of fast: float16 or bfloat16.")
    ] = "float16",
    peers: Annotated[
        bool,
        typer.Option("--peers", help="Other projects' kernels as well: tinygemm; humming, if installed."),
    ] = False,
    device: Device = "auto",
    samples: Annotated[int, typer.Option("--samples", help="Samples of each contender, at least 20.")] = 20,
    graph: Annotated[bool, typer.Option("--graph/--no-graph", help="Time CUDA graphs.")] = True,
    plot: Annotated[bool, typer.Option("--plot/--no-plot", help="PNG and SVG beside the JSON.")] = True,
    out: Out = None,
) -> None:
    """Quantised products against the fallback and dense cuBLAS, right before timed.

    With no GPU the kernels run on small shapes in the emulator: right or wrong and counts, no time.

    Exit codes: 0 done; 1 a contender gave wrong results or failed; 2 wrong usage; 130 interrupted
    (what was done is kept).
    """
    from labkit.bench import cases, gemm
    from labkit.errors import require

    chosen: dict[str, Any] = {"table": table, "samples": samples, "graph": graph}
    chosen |= {"group": group, "dtype": dtype, "peers": peers}
    chosen["device"] = _device(device)
    if shapes is not None:
        chosen["shapes"] = tuple(cases.parse_shapes(shapes))
    if m is not None:
        chosen["m"] = tuple(cases.parse_numbers(m, "m"))
    numbers = cases.parse_numbers(bits, "bits")
    require(set(numbers) <= {3, 4}, "bits", repr(bits), "4, 3 or both: 4,3")
    chosen["formats"] = tuple(f"w{number}" for number in numbers)
    options = gemm.Options(**chosen)
    options.cases()  # a bad choice is refused before the device is touched
    command = f"labkit bench gemm --table {table}"
    command += f" --device {device}" if device != "auto" else ""
    command += f" --shapes {shapes}" if shapes is not None else ""
    command += f" --m {m}" if m is not None else ""
    command += f" --bits {bits}" if bits != "4,3" else ""
    command += f" --group {group}" if group != 128 else ""
    command += f" --dtype {dtype}" if dtype != "float16" else ""
    command += " --peers" if peers else ""
    command += f" --samples {samples}" if samples != 20 else ""
    command += "" if graph else " --no-graph"
    _writable(out)
    record = gemm.run(options, command, report=typer.echo)
    _finish(record, out, plot)


@bench_app.command()
def offload(
    device: Device = "auto",
    samples: Annotated[int, typer.Option("--samples", help="Round trips to time.")] = 50,
    out: Out = None,
) -> None:
    """What one call costs when input and output live in host memory: stage, launch, copy back, wait."""
    from labkit.bench import offload as work

    command = "labkit bench offload" + (f" --samples {samples}" if samples != 50 else "")
    _writable(out)
    _finish(work.run(_device(device), samples, command), out, plot=False)


@bench_app.command()
def decode(
    model: Annotated[str, typer.Option("--model", help="A shape of data/quoted/models.json.")] = "qwen2.5-3b",
    batch: Annotated[str, typer.Option("--batch", help="Sequences, such as 1,8.")] = "1",
    context: Annotated[
        str, typer.Option("--context", help="Cached tokens at the start, such as 128.")
    ] = "128",
    bits: Annotated[int, typer.Option("--bits", help="Of the matrices: 4 or 3.")] = 4,
    group: Annotated[int, typer.Option("--group", help="128, 64 or 32.")] = 128,
    head: Annotated[str, typer.Option("--head", help="lm_head: dense or w4, for the peer too.")] = "dense",
    dtype: Annotated[str, typer.Option("--dtype", help="Our activations: float16 or bfloat16.")] = "float16",
    tokens: Annotated[int, typer.Option("--tokens", help="Steps of a sample.")] = 32,
    peers: Annotated[
        bool, typer.Option("--peers", help="torch.compile with tinygemm as well; compiling takes minutes.")
    ] = False,
    device: Device = "auto",
    samples: Annotated[int, typer.Option("--samples", help="Samples of each contender, at least 20.")] = 20,
    out: Out = None,
) -> None:
    """Tokens a second of the decode step in one CUDA graph, with random weights of a real shape.

    With no GPU a narrow model runs in the emulator: right or wrong and counts, no time.

    Exit codes: 0 done; 1 wrong logits or a failure; 2 wrong usage; 130 interrupted (what was done is kept).
    """
    from labkit.bench import cases
    from labkit.bench import decode as work

    options = work.Options(
        model=model,
        batch=tuple(cases.parse_numbers(batch, "batch")),
        context=tuple(cases.parse_numbers(context, "context")),
        bits=bits,
        group=group,
        head=head,
        dtype=dtype,
        tokens=tokens,
        samples=samples,
        peers=peers,
        device=_device(device),
    )
    command = f"labkit bench decode --model {model} --batch {batch} --context {context} --bits {bits}"
    command += f" --head {head}" + (f" --group {group}" if group != 128 else "")
    command += (f" --dtype {dtype}" if dtype != "float16" else "") + (" --peers" if peers else "")
    command += (f" --tokens {tokens}" if tokens != 32 else "") + (
        f" --samples {samples}" if samples != 20 else ""
    )
    _writable(out)
    _finish(work.run(options, command, report=typer.echo), out, plot=False)


@bench_app.command()
def attention(
    model: Annotated[
        str, typer.Option("--model", help="Shapes of data/quoted/models.json.")
    ] = "qwen2.5-3b,qwen2.5-7b,smollm2-135m",
    context: Annotated[
        str, typer.Option("--context", help="Tokens that a row attends to, such as 512,4096.")
    ] = "512,2048,4096,8192,32768",
    batch: Annotated[str, typer.Option("--batch", help="Rows, such as 1,8.")] = "1,4,16,64",
    chunk: Annotated[str, typer.Option("--chunk", help="New tokens a row: 1 is decode, more prefill.")] = "1",
    kv: Annotated[str, typer.Option("--kv", help="Keys and values: fp16, int8 or both.")] = "fp16,int8",
    block_size: Annotated[int, typer.Option("--block-size", help="Tokens a block: 8, 16, 32 or 64.")] = 16,
    plans: Annotated[
        str, typer.Option("--plans", help="Launch choices to compare: walk or FINE/COARSE, such as walk,1/4.")
    ] = "",
    peers: Annotated[bool, typer.Option("--peers/--no-peers", help="torch's attention as well.")] = True,
    device: Device = "auto",
    samples: Annotated[int, typer.Option("--samples", help="Samples of each contender, at least 20.")] = 20,
    out: Out = None,
) -> None:
    """Attention over paged keys and values against torch's on gathered ones, and the copy bandwidth.

    With no GPU short contexts run in the emulator: right or wrong and counts, no time.

    Exit codes: 0 done; 1 wrong results or a failure; 2 wrong usage; 130 interrupted (what was done is kept).
    """
    from labkit.bench import attention as work
    from labkit.bench import cases

    options = work.Options(
        models=tuple(model.split(",")),
        context=tuple(cases.parse_numbers(context, "context")),
        batch=tuple(cases.parse_numbers(batch, "batch")),
        chunk=tuple(cases.parse_numbers(chunk, "chunk")),
        formats=tuple(kv.split(",")),
        block_size=block_size,
        plans=work.parse_plans(plans),
        peers=peers,
        samples=samples,
        device=_device(device),
    )
    command = f"labkit bench attention --model {model} --context {context} --batch {batch} --chunk {chunk}"
    command += f" --kv {kv}" + (f" --block-size {block_size}" if block_size != 16 else "")
    command += (f" --plans {plans}" if plans else "") + ("" if peers else " --no-peers")
    command += f" --samples {samples}" if samples != 20 else ""
    _writable(out)
    _finish(work.run(options, command, report=typer.echo), out, plot=False)


bench_app.command()(serving_cli.concurrency)
bench_app.command()(serving_cli.jitter)
bench_app.command()(open_loop_cli.serving)


@bench_app.command()
def show(
    files: Annotated[list[Path], typer.Argument(help="Records to print again.")],
    markdown: Annotated[bool, typer.Option("--markdown", help="Tables in Markdown.")] = False,
) -> None:
    """Print records again; a file that is none is named and skipped (exit code 1)."""
    from labkit.bench import record, report

    records, skipped = record.read_all(files)
    for one in records:
        typer.echo((report.markdown(one) if markdown else report.text(one)) + "\n")
    for message in skipped:
        typer.echo(f"labkit: {message}", err=True)
    raise typer.Exit(EXIT_FAILED if skipped else EXIT_DONE)


def _device(name: str) -> str:
    """``auto`` resolved; anything unknown or absent is refused."""
    from labkit.errors import require

    require(name in ("auto", "cpu", "cuda"), "device", repr(name), "auto, cpu or cuda")
    if name == "cpu":
        return name
    import torch

    found = torch.cuda.is_available()
    require(found or name == "auto", "device", "cuda", "a GPU that torch can use", "--device cpu")
    return "cuda" if found else "cpu"


def _writable(out: Path | None) -> None:
    """Refuse a place that cannot be written before anything is measured."""
    import tempfile

    from labkit.errors import InputError, require
    from labkit.paths import results_dir

    folder = out.parent if out else results_dir() / "bench"
    require(out is None or not out.is_dir(), "--out", f"{out}, a folder", "the JSON file to write")
    there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    try:
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        expected = "a folder that can be written"
        raise InputError("--out", f"{there}: {error.strerror}", expected, "--out FILE elsewhere") from error


def _finish(record: Any, out: Path | None, plot: bool) -> None:
    """Write, draw, print; the exit code says whether all was right."""
    from labkit.bench import report
    from labkit.paths import results_dir

    path = record.write(out or results_dir() / "bench" / record.file_name)
    typer.echo("\n" + report.text(record))
    typer.echo(f"\nwritten: {path}")
    if plot:
        from labkit.bench import figure

        for picture in figure.save(record, path):
            typer.echo(f"written: {picture}")
    if not record.complete:
        raise typer.Exit(EXIT_INTERRUPTED)
    bad = any(entry.status in ("wrong", "failed") for entry in record.entries)
    raise typer.Exit(EXIT_FAILED if bad else EXIT_DONE)
