"""The ``labkit`` command: thin wrappers, so that starting it loads neither torch nor Jupyter.

Every command ends with exit code 0 (done), 1 (it ran and failed), 2 (wrong usage or input; one
readable message, no traceback) or 130 (interrupted).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from labkit import __version__
from labkit.bench.cli import bench_app
from labkit.classroom.cli import book, grade, release
from labkit.course.cli import course, notebook_app
from labkit.errors import InputError
from labkit.rerun.cli import rerun, schedule
from labkit.results.cli import report
from labkit.server.cli import serve
from labkit.spin import spin_briefly

app = typer.Typer(
    name="labkit",
    help="Low-bit LLM inference, chapter by chapter: course, models, benchmarks.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("course")(course)
app.add_typer(notebook_app, name="notebook")
app.add_typer(bench_app, name="bench")
app.command("rerun")(rerun)
app.command("schedule")(schedule)
app.command("report")(report)
app.command("serve")(serve)
app.command("release")(release)
app.command("grade")(grade)
app.command("book")(book)

Source = Annotated[
    str | None, typer.Option("--model", help="GGUF file, Hugging Face folder or labkit folder.")
]
Bits = Annotated[
    str | None, typer.Option("--bits", help="Convert on load: w4, w3, mixed, q8 or none (float).")
]
Group = Annotated[
    str | None,
    typer.Option("--group", help="Group size: 16, 32, 64, 128 or row. [default: the source's own, else 32]"),
]
Offset = Annotated[
    bool,
    typer.Option(
        "--offset/--no-offset",
        help="An offset beside each scale; measure it, at w3 it can hurt (chapter 09).",
    ),
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
Dtype = Annotated[str, typer.Option("--dtype", help="Activations: float32, bfloat16 or float16.")]


@app.callback(invoke_without_command=True)
def top(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    """Low-bit LLM inference, chapter by chapter."""
    spin_briefly()
    if version:
        typer.echo(f"labkit {__version__}")
        raise typer.Exit


@app.command()
def doctor(json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False) -> None:
    """What this machine has, what is missing, and the line that mends it (1 = a problem was found)."""
    from labkit import doctor as report

    raise typer.Exit(report.main(["--json"] if json else []))


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What to say to the model.")],
    model: Source = None,
    bits: Bits = None,
    group: Group = None,
    offset: Offset = False,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Stop after this many new tokens.")] = 128,
    temperature: Annotated[float, typer.Option("--temperature", help="0 takes the likeliest token.")] = 0.0,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the sampling.")] = 0,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text; no chat template.")] = False,
    device: Device = "auto",
    dtype: Dtype = "float32",
    stats: Annotated[
        bool, typer.Option("--stats/--no-stats", help="Speed on standard error at the end.")
    ] = True,
) -> None:
    """Stream text from a model; SmolLM2-135M-Instruct unless --model names another."""
    from labkit.models import commands

    commands.generate(
        prompt,
        commands.Loading(model, bits, group, offset, device, dtype),
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        chat=not raw,
        stats=stats,
    )


@app.command()
def perplexity(
    file: Annotated[Path | None, typer.Argument(help="UTF-8 text; default: the corpus in data/.")] = None,
    model: Source = None,
    bits: Bits = None,
    group: Group = None,
    offset: Offset = False,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Read at most this many tokens.")] = 2048,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Original, W4 and W3, groups 32 and 64, ± offset.")
    ] = False,
    device: Device = "auto",
    dtype: Dtype = "float32",
) -> None:
    """Perplexity of a model on a text."""
    from labkit.models import commands

    commands.perplexity(
        file, commands.Loading(model, bits, group, offset, device, dtype), max_tokens=max_tokens, sweep=sweep
    )


@app.command()
def quantize(
    src: Annotated[Path, typer.Argument(help="Hugging Face folder or GGUF file.")],
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    bits: Annotated[
        str, typer.Option("--bits", help="w4, w3, mixed, q8, keep (convert exactly) or none (float).")
    ] = "w4",
    group: Group = None,
    offset: Offset = False,
    layers: Annotated[
        list[str] | None, typer.Option("--layer", help="PATTERN=FORMAT, for --bits mixed.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Go on with an unfinished OUT.")
    ] = True,
) -> None:
    """Quantise a checkpoint of any size, tensor by tensor; resumable."""
    from labkit.models import commands

    commands.quantize(src, out, bits=bits, group=group, offset=offset, layers=layers or [], resume=resume)


@app.command()
def resources(
    kernel: Annotated[
        str | None,
        typer.Argument(help="A kernel, or a .cu file, packaged or your own. [default: all]"),
    ] = None,
    arch: Annotated[
        list[str] | None, typer.Option("--arch", help="sm_80, sm_86 …; repeatable. [default: all five]")
    ] = None,
    device: Annotated[
        list[str] | None, typer.Option("--device", help="Occupancy on this device; repeatable, or 'all'.")
    ] = None,
    defines: Annotated[
        list[str] | None, typer.Option("--define", "-D", help="NAME=VALUE; repeatable.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", help="Threads a block. [default: the launch bounds]")
    ] = None,
    shared: Annotated[int, typer.Option("--shared", help="Dynamic shared memory a block, bytes.")] = 0,
    sass: Annotated[bool, typer.Option("--sass", help="Memory instructions by source line as well.")] = False,
) -> None:
    """Registers, spills, shared memory and occupancy of kernels, with no GPU."""
    from labkit.kernels import report

    report.resources(kernel, arch or [], device or [], defines or [], threads, shared, sass)


@app.command()
def plan(
    model: Annotated[
        str | None,
        typer.Argument(
            help="GGUF file, Hugging Face or labkit folder, or a shape such as qwen2.5-3b. "
            "(default: the default model)"
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory", help="4GB, 3.5GiB, bytes, or a share of what is free: 0.9, 90%. (default: 0.9)"
        ),
    ] = None,
    context: Annotated[
        int | None, typer.Option("--context", help="Tokens of a row, prompt and answer. (default: 2048)")
    ] = None,
    batch: Annotated[int, typer.Option("--batch", help="Rows that decode at once.")] = 1,
    bits: Bits = None,
    group: Group = None,
    offset: Offset = False,
    layers: Annotated[
        list[str] | None, typer.Option("--layer", help="PATTERN=FORMAT, such as head=w4; repeatable.")
    ] = None,
    kv: Annotated[
        str | None,
        typer.Option("--kv", help="KV cache: fp16, bf16, fp32 or int8. (default: as the activations)"),
    ] = None,
    block_size: Annotated[int, typer.Option("--block-size", help="Tokens of a KV block.")] = 16,
    chunk: Annotated[int, typer.Option("--chunk", help="Tokens of a prefill chunk.")] = 512,
    device: Annotated[
        str, typer.Option("--device", help="auto, cpu, cuda, or a card such as rtx3050-laptop.")
    ] = "auto",
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="Activations. (default: cpu float32, cuda float16)")
    ] = None,
    graphs: Annotated[
        bool | None,
        typer.Option("--graphs/--no-graphs", help="Decode by CUDA graphs. (default: where they fit)"),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """What a model needs in memory, by formula: the bill, what fits, what to change (1 = does not fit)."""
    from labkit.cache import plan_command

    options = plan_command.Options(
        model, memory, context, batch, bits, group, offset, tuple(layers or ()), kv, block_size, chunk,
        device, dtype, graphs,
    )  # fmt: skip
    raise typer.Exit(0 if plan_command.run(options, as_records=json) else 1)


def main() -> None:
    """Entry point: turns an :class:`InputError` into one message and exit code 2."""
    # A console in GBK or ASCII cannot show every token; a replacement sign beats a crash.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        app()
    except InputError as error:
        typer.echo(f"labkit: {error}", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        typer.echo("labkit: interrupted", err=True)
        sys.exit(130)
    except BrokenPipeError:
        # The reader of a pipe (`labkit doctor | head`) has gone; that is not an error of ours.
        sys.stderr.close()
        sys.exit(0)


if __name__ == "__main__":
    main()
