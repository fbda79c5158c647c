"""Decoding on a GPU by replays of one CUDA graph: a replay is one token a sequence, with no work of the host.

On the CPU the same step runs eagerly in the emulator, so that everything here can be tested there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from labkit.errors import InputError, refuse, require
from labkit.kernels.capture import capturing
from labkit.models.decode_step import DecodeStep, Products, check, step_weights
from labkit.quant.packing import describe

_PREFILL_CHUNK = 512  # positions; bounds the activations of a long prompt


class GraphDecoder:
    """Greedy decoding of a static batch.

    Args:
        step: the model with its buffers; it belongs to this object from here on.
        graph: capture the step in a CUDA graph (on a GPU); False launches it anew each time.
        decoder: the Decoder that fills the cache in :meth:`prefill`; None where nobody will.

    Attributes:
        lengths: cached positions of every row, as the host counts them.

    A row's bits depend neither on the other rows, nor on the batch, nor on the capacity: exactly so up to
    the hidden state, and in the logits as far as the head is of the tensor-core family. A dense head is
    cuBLAS's: there one batch size at or below eight gives the same bits as another, a larger one its own.
    """

    def __init__(self, step: DecodeStep, *, graph: bool = True, decoder: Any = None) -> None:
        self.step, self.decoder = step, decoder
        self.lengths = [0] * step.batch
        self._graph: torch.cuda.CUDAGraph | None = None
        self._generation = step.kv.generation
        if graph and step.device.type == "cuda":
            self._graph = _capture(step.run, step.device)
        self.reset()

    @classmethod
    def from_decoder(
        cls,
        decoder: Any,
        *,
        capacity: int,
        batch: int = 1,
        graph: bool = True,
        products: Products | None = None,
        block_size: int = 16,
        kv_dtype: torch.dtype | None = None,
    ) -> GraphDecoder:
        """A graph decoder with the weights of a labkit.models.decoder.Decoder.

        Args:
            decoder: W4 or W3 matrices, float16 or bfloat16 activations.
            capacity: positions of the cache, prompt and answer together.
            batch: rows.
            products: the tensor-core family by default.
            block_size, kv_dtype: of the cache, see DecodeStep.

        Raises:
            InputError: what the step cannot do, by name, before anything is repacked.
        """
        stored: dict[str, Any] = {"block_size": block_size, "kv_dtype": kv_dtype}
        check(decoder.config, capacity=capacity, dtype=decoder.dtype, **stored)
        products = products or Products.tensor_core()
        weights = step_weights(decoder, products=products)
        step = DecodeStep(
            decoder.config, weights, batch=batch, capacity=capacity, products=products, **stored
        )
        return cls(step, graph=graph, decoder=decoder)

    @property
    def captured(self) -> bool:
        """Whether a step is a replay of a CUDA graph."""
        return self._graph is not None

    @property
    def logits(self) -> Tensor:
        """Logits [B, V] of the last step; the next one overwrites them."""
        return self.step.logits

    @property
    def tokens(self) -> Tensor:
        """int64 [B]: the next input of every row; the next step overwrites it."""
        return self.step.state.tokens

    def reset(self) -> None:
        """Forget all positions."""
        self.step.cache.truncate(0)
        self.place(0)
        self.step.state.tokens.zero_()

    def place(self, lengths: int | Sequence[int]) -> None:
        """Say how many positions of the cache each row holds: after filling it, or to go back.

        Raises:
            InputError: below 0, beyond the capacity, or another number of rows.
        """
        rows = [lengths] * self.step.batch if isinstance(lengths, int) else [int(n) for n in lengths]
        fits = len(rows) == self.step.batch and all(0 <= n <= self.step.capacity for n in rows)
        require(fits, "lengths", rows, f"{self.step.batch} numbers from 0 to {self.step.capacity}")
        self.lengths = rows
        self.step.state.lengths.copy_(torch.tensor(rows, dtype=torch.int32))
        self.step.state.status.zero_()

    def feed(self, tokens: Tensor | Sequence[int]) -> None:
        """Choose the next input of every row, in place of the token that the last step found.

        Args:
            tokens: integer [B].

        Raises:
            InputError: another count, or an id outside the vocabulary.
        """
        given = torch.as_tensor(tokens)
        batch, vocabulary = self.step.batch, self.step.config.vocab_size
        whole = not given.is_floating_point() and given.dtype != torch.bool
        right = whole and tuple(given.shape) == (batch,)
        require(right, "tokens", describe(given), f"whole numbers [{batch}]")
        low, high = (int(v) for v in given.aminmax())
        inside = low >= 0 and high < vocabulary
        require(inside, "tokens", f"ids from {low} to {high}", f"ids from 0 to {vocabulary - 1}")
        self.step.state.tokens.copy_(given)

    @torch.inference_mode()
    def prefill(self, tokens: Tensor) -> Tensor:
        """Begin anew with a prompt; the most likely next tokens are the next input.

        Args:
            tokens: int64 [B, T], T at least 1 and at most the capacity.

        Returns:
            Logits [B, V] after the last position.

        Raises:
            InputError: no decoder, a wrong shape, an unknown id, or a prompt that does not fit.
        """
        if self.decoder is None:
            refuse("decoder", "none", "the Decoder that was repacked", "GraphDecoder.from_decoder")
        good = isinstance(tokens, Tensor) and tokens.ndim == 2 and tokens.dtype == torch.int64
        good = good and tokens.shape[0] == self.step.batch and tokens.shape[1] >= 1
        require(good, "tokens", describe(tokens), f"int64 [{self.step.batch}, T]")
        length = tokens.shape[1]
        self._check_room(length, [0])
        low, high = (int(v) for v in tokens.aminmax())
        last = self.step.config.vocab_size - 1
        require(low >= 0 and high <= last, "tokens", f"ids from {low} to {high}", f"ids from 0 to {last}")
        self.reset()
        for start in range(0, length, _PREFILL_CHUNK):
            hidden = self.decoder.hidden(tokens[:, start : start + _PREFILL_CHUNK], self.step.cache)
        logits = self.decoder.head(hidden[:, -1])
        self.place(length)
        self.step.state.tokens.copy_(logits.argmax(-1))
        return logits

    def forward(self, tokens: Tensor | Sequence[int]) -> Tensor:
        """Feed ``tokens`` [B], step, and give the logits [B, V]; the next call overwrites them."""
        self._check_room(1, self.lengths)
        self.feed(tokens)
        self.advance()
        return self.logits

    def advance(self) -> Tensor:
        """One step: the tokens that follow, int64 [B], which are also the next input.

        Raises:
            InputError: the cache is full, or has grown since the capture; before anything is written.
        """
        self._check_room(1, self.lengths)
        if self._graph is not None:
            moved = self.step.kv.generation != self._generation
            require(not moved, "kv", "storage that has grown", "the addresses of the capture", "capture anew")
            self._graph.replay()
        else:
            self.step.run()
        self.lengths = [n + 1 for n in self.lengths]
        return self.tokens

    def generate(self, count: int) -> Tensor:
        """``count`` steps, then the tokens that they found: int64 [B, count].

        Raises:
            InputError: no room for as many, before the first; or logits that were NaN or infinite.
        """
        whole = isinstance(count, int) and not isinstance(count, bool)
        require(whole and count >= 1, "count", repr(count), "a whole number of at least 1")
        self._check_room(count, self.lengths)
        first = list(self.lengths)
        for _ in range(count):
            self.advance()
        self.check()
        history = self.step.state.history
        return torch.stack([history[b, n : n + count] for b, n in enumerate(first)]).to(torch.int64)

    def check(self) -> None:
        """Wait for the device; raise InputError when a row's logits were NaN or infinite since the last
        :meth:`place`."""
        bad = self.step.state.status.nonzero().flatten().tolist()
        if bad:
            expected = "finite logits: the weights or activations overflowed"
            raise InputError("logits", f"NaN or infinite values in rows {bad}", expected, "use bfloat16")

    def _check_room(self, count: int, lengths: Sequence[int]) -> None:
        longest, capacity = max(lengths), self.step.capacity
        if longest + count > capacity:
            raise InputError(
                "tokens",
                f"{count} more after {longest} positions",
                f"at most {capacity - longest} (KV cache capacity {capacity})",
                "use a larger capacity or a shorter prompt",
            )


def _capture(work: Callable[[], None], device: torch.device) -> torch.cuda.CUDAGraph:
    """``work`` as a graph; it runs once before, which loads and prepares whatever a capture may not."""
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, stream=stream):
            work()
        torch.cuda.current_stream().wait_stream(stream)
    return graph
