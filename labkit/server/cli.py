"""The options of ``labkit serve``; the server and torch are loaded when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from labkit.errors import InputError
from labkit.probes.fixes import pip_install

_MODEL, _ENGINE, _LIMITS, _NETWORK = "Model", "Engine", "Limits", "Network"


def serve(
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="GGUF file, Hugging Face folder or labkit folder. (default: SmolLM2-135M-Instruct)",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            "--name", help="What clients ask for. (default: the file's name)", rich_help_panel=_MODEL
        ),
    ] = None,
    bits: Annotated[
        str | None,
        typer.Option(
            "--bits", help="Convert on load: w4, w3, mixed, q8 or none (float).", rich_help_panel=_MODEL
        ),
    ] = None,
    group: Annotated[
        str | None,
        typer.Option("--group", help="Group size: 16, 32, 64, 128 or row.", rich_help_panel=_MODEL),
    ] = None,
    offset: Annotated[
        bool,
        typer.Option("--offset/--no-offset", help="An offset beside each scale.", rich_help_panel=_MODEL),
    ] = False,
    device: Annotated[
        str, typer.Option("--device", help="auto, cpu or cuda.", rich_help_panel=_MODEL)
    ] = "auto",
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            help="Activations: float32, bfloat16 or float16. (default: cpu float32, cuda float16)",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    kv_dtype: Annotated[
        str | None,
        typer.Option(
            "--kv-dtype",
            help="KV cache: fp16, bf16, fp32 or int8. (default: as the activations)",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    policy: Annotated[
        str,
        typer.Option(
            "--policy",
            help="NAME, NAME:CHUNK or NAME:CHUNK@TARGET, such as serial, overlap:128, ticks:512@20ms, "
            "dynamic:512@20ms, mixed:64, sliced:512@5ms, adaptive.",
            rich_help_panel=_ENGINE,
        ),
    ] = "mixed",
    overlap: Annotated[
        bool,
        typer.Option(
            "--prefill-decode-overlap/--no-prefill-decode-overlap",
            help="Prefill on a CUDA stream of its own, where the policy uses one.",
            rich_help_panel=_ENGINE,
        ),
    ] = True,
    admission: Annotated[
        str,
        typer.Option(
            "--admission",
            help="Start an answer when it fits at its longest (peak), or when its prompt fits (now).",
            rich_help_panel=_ENGINE,
        ),
    ] = "peak",
    prefix_cache: Annotated[
        bool,
        typer.Option(
            "--prefix-cache/--no-prefix-cache",
            help="Compute equal beginnings of prompts once.",
            rich_help_panel=_ENGINE,
        ),
    ] = True,
    invariant: Annotated[
        bool,
        typer.Option(
            "--invariant",
            help="CPU: answers that do not depend, in any bit, on who else is served; slower.",
            rich_help_panel=_ENGINE,
        ),
    ] = False,
    max_batch: Annotated[
        int, typer.Option("--max-batch", help="Answers that run at once.", rich_help_panel=_LIMITS)
    ] = 64,
    max_queue: Annotated[
        int,
        typer.Option(
            "--max-queue",
            help="Answers that may wait beyond these; more get status 429.",
            rich_help_panel=_LIMITS,
        ),
    ] = 256,
    max_context: Annotated[
        int | None,
        typer.Option(
            "--max-context",
            help="Tokens of prompt and answer. (default: the model's, at most 8192)",
            rich_help_panel=_LIMITS,
        ),
    ] = None,
    num_blocks: Annotated[
        int | None,
        typer.Option(
            "--num-blocks",
            help="KV blocks of 16 tokens. (default: what fits in half of the free memory)",
            rich_help_panel=_LIMITS,
        ),
    ] = None,
    max_body_bytes: Annotated[
        int,
        typer.Option("--max-body-bytes", help="Larger requests get status 413.", rich_help_panel=_LIMITS),
    ] = 4 << 20,
    drain_seconds: Annotated[
        float,
        typer.Option(
            "--drain-seconds",
            help="After SIGTERM or Ctrl-C, let answers go on for so long; a second signal ends at once.",
            rich_help_panel=_LIMITS,
        ),
    ] = 30.0,
    host: Annotated[
        str,
        typer.Option("--host", help="Address to listen on; 0.0.0.0 for everybody.", rich_help_panel=_NETWORK),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="0 takes a free one.", rich_help_panel=_NETWORK)] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key",
            help="Ask clients for this key. Better given as LABKIT_API_KEY: others can see a command line.",
            rich_help_panel=_NETWORK,
        ),
    ] = None,
) -> None:
    """Serve a model to OpenAI clients: /v1/completions, /v1/chat/completions, /v1/models.

    Beside them: /health, /status (JSON) and /metrics (Prometheus).

    Only this machine can connect, unless --host says otherwise.
    """
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ModuleNotFoundError as error:
        fix = pip_install("fastapi prometheus-client uvicorn")
        raise InputError("serve", f"no package {error.name}", "the server's packages", fix) from None
    from labkit.server import command

    command.serve(
        command.EngineOptions(
            model, bits, group, offset, device, dtype, kv_dtype, policy, overlap, admission, prefix_cache,
            max_batch, max_context, num_blocks, invariant,
        ),
        name=name,
        host=host,
        port=port,
        api_key=api_key,
        max_queue=max_queue,
        max_body_bytes=max_body_bytes,
        drain_seconds=drain_seconds,
    )  # fmt: skip
