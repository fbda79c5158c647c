"""The engine for its callers: batches, streams, coroutines, aborts, faults, and what it reports."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest
from engine_oracle import COST, InjectedError, Letters

from labkit.engine.engine import Engine
from labkit.engine.executor import Row
from labkit.engine.policy import Mixed, Sliced, Ticks
from labkit.engine.request import Status
from labkit.engine.sampling import SamplingParams
from labkit.engine.sim import SimulatedExecutor
from labkit.errors import InputError

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10], [1, 2, 3, 4]]


class LetterTokens(Letters):
    """Text to ids and back; ids 0 to 25."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 97 for letter in text]


class Faulty(SimulatedExecutor):
    """Raises at one stage of every work that holds a certain prompt."""

    stage, victim = "", (4,)

    def _check(self, stage: str, rows: list[Row]) -> None:
        if stage == self.stage and any(row.request.prompt_ids == self.victim for row in rows):
            raise MemoryError(f"out of memory in {stage}")

    def prepare(self, rows, lane):
        self._check("prepare", rows)
        return super().prepare(rows, lane)

    def launch_slice(self, batch, first, last):
        self._check("launch", batch.rows)
        return super().launch_slice(batch, first, last)

    def join(self, handle):
        outputs = super().join(handle)
        self._check("join", handle.batch.rows)
        return outputs


def make(policy="mixed", *, executor=SimulatedExecutor, text=False, sizes=None, **options) -> Engine:
    sizes = {"num_blocks": 64, "block_size": 4, "vocab_size": 26, **(sizes or {})}
    return Engine(
        executor(COST, **sizes), policy=policy, tokenizer=LetterTokens() if text else None, **options
    )


def outputs(requests) -> list[list[int]]:
    return [request.output_ids for request in requests]


PLAIN = outputs(make("serial").generate(PROMPTS, SamplingParams(max_tokens=8)))


# --- batches and streams -------------------------------------------------------------------------------


def test_generate_gives_each_prompt_its_own_parameters_and_reason() -> None:
    each = [SamplingParams(max_tokens=n) for n in (1, 3, 5, 8)]
    requests = make().generate(PROMPTS, each)
    assert outputs(requests) == [ids[:n] for ids, n in zip(PLAIN, (1, 3, 5, 8))]
    with pytest.raises(InputError, match="params"):
        make().generate(PROMPTS, each[:2])


def test_a_prompt_that_cannot_be_taken_fails_alone() -> None:
    requests = make().generate([*PROMPTS, [], [1] * 1000, [26], "abc"], SamplingParams(max_tokens=8))
    assert outputs(requests[:4]) == PLAIN
    assert [request.finish_reason for request in requests[4:]] == ["error"] * 4
    for request, text in zip(requests[4:], ("no tokens", "1000 tokens", "token id 26", "no tokenizer")):
        assert text in request.error


def test_a_stream_brings_every_token_while_others_go_on() -> None:
    run = make(text=True)
    other = run.add_request("def", SamplingParams(max_tokens=4))
    updates = list(run.stream([1, 2, 3], SamplingParams(max_tokens=8)))
    assert [token for update in updates for token in update.tokens] == PLAIN[0]
    assert "".join(update.text for update in updates) == "".join(chr(97 + token) for token in PLAIN[0])
    assert [update.ended for update in updates] == [False] * 7 + [True]
    assert other.finish_reason == "length"


def test_closing_a_stream_aborts_it() -> None:
    run = make()
    stream = run.stream([1, 2, 3], SamplingParams(max_tokens=8))
    request = next(stream).request
    stream.close()
    run.run()
    assert (request.status, request.finish_reason, len(request.output_ids)) == (Status.ABORTED, "abort", 1)


def test_stop_strings_end_the_text_and_stop_ids_have_none() -> None:
    text = "".join(chr(97 + token) for token in PLAIN[0])
    stop = text[2:4]
    run = make(text=True)
    cut, kept, by_id = run.generate(
        [PROMPTS[0]] * 3,
        [
            SamplingParams(max_tokens=8, stop=(stop,)),
            SamplingParams(max_tokens=8, stop=(stop,), include_stop=True),
            SamplingParams(max_tokens=8, stop_token_ids=(PLAIN[0][3],)),
        ],
    )
    end = text.index(stop)
    assert (cut.text, cut.finish_reason) == (text[:end], "stop")
    assert (kept.text, kept.finish_reason) == (text[: end + 2], "stop")
    at = PLAIN[0].index(PLAIN[0][3])
    assert (by_id.text, by_id.finish_reason, len(by_id.output_ids)) == (text[:at], "stop", at + 1)
    with pytest.raises(InputError, match="tokenizer"):
        make().add_request([1], SamplingParams(stop=("x",)))


def test_a_stop_string_that_the_last_bytes_complete_counts() -> None:
    class Held(LetterTokens):
        def stream(self, *, special: bool = False) -> Letters:
            return Held()

        def finish(self) -> str:
            return "!"

    run = Engine(SimulatedExecutor(COST, vocab_size=26), tokenizer=Held())
    (request,) = run.generate([PROMPTS[0]], SamplingParams(max_tokens=2, stop=("!",)))
    assert (request.finish_reason, len(request.text)) == ("stop", 2)


def test_seeded_sampling_does_not_depend_on_neighbours_or_policy() -> None:
    drawn = SamplingParams(max_tokens=8, temperature=1.5, seed=3, logprobs=2)
    (alone,) = make("serial").generate([PROMPTS[0]], drawn)
    for policy in ("mixed", "ticks", "sliced"):
        crowd = make(policy, sizes={"feeds": True}).generate([*PROMPTS, PROMPTS[0]], drawn)
        assert crowd[0].output_ids == alone.output_ids == crowd[-1].output_ids
    assert [entry.token for entry in alone.logprobs] == alone.output_ids
    assert all(len(entry.top_logprobs) == 2 for entry in alone.logprobs)


# --- coroutines and threads ----------------------------------------------------------------------------


def test_coroutines_share_the_engine() -> None:
    run = make("ticks")

    async def one(prompt):
        tokens = []
        async for update in run.astream(prompt, SamplingParams(max_tokens=8)):
            tokens += update.tokens
        return tokens

    async def all_of_them():
        return await asyncio.gather(*(one(prompt) for prompt in PROMPTS))

    assert asyncio.run(all_of_them()) == PLAIN


def test_a_cancelled_coroutine_frees_its_blocks_and_disturbs_nobody() -> None:
    run = make()

    async def leave_early():
        async for _ in run.astream([9, 9, 9, 9, 9], SamplingParams(max_tokens=200)):
            await asyncio.sleep(3600)

    async def stay():
        tokens = []
        async for update in run.astream(PROMPTS[0], SamplingParams(max_tokens=8)):
            tokens += update.tokens
            await asyncio.sleep(0)
        return tokens

    async def both():
        early = asyncio.create_task(leave_early())
        await asyncio.sleep(0.01)
        late = asyncio.create_task(stay())
        early.cancel()
        return await late

    assert asyncio.run(both()) == PLAIN[0]
    run.run()
    assert run.counters.finished == {"abort": 1, "length": 1}
    assert run.scheduler.pool.blocks.num_used == 0


def test_requests_may_come_and_go_from_other_threads() -> None:
    run, added = make(queue_limit=None), []

    def add() -> None:
        for number in range(50):
            request = run.add_request([number % 26, 1], SamplingParams(max_tokens=4))
            added.append(request)
            if number % 5 == 0:
                run.abort(request)

    threads = [threading.Thread(target=add) for _ in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) or not run.idle:
        run.step()
    assert len(added) == 150 and all(request.status.final for request in added)
    assert {request.finish_reason for request in added} <= {"length", "abort"}


# --- aborts and faults ---------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["serial", "overlap", "ticks", "mixed", "sliced"])
@pytest.mark.parametrize("steps", range(8))
def test_an_abort_at_any_moment_leaves_the_others_alone(policy: str, steps: int) -> None:
    run = make(Sliced(4, budget=1e-3) if policy == "sliced" else policy, sizes={"feeds": steps % 2 == 1})
    requests = [run.add_request(prompt, SamplingParams(max_tokens=8)) for prompt in PROMPTS]
    for _ in range(steps):
        run.step()
    run.abort(requests[2])
    run.abort(requests[2])
    run.run()
    assert requests[2].finish_reason == "abort"
    assert requests[2].output_ids == PLAIN[2][: len(requests[2].output_ids)]
    assert [outputs(requests)[i] for i in (0, 1, 3)] == [PLAIN[i] for i in (0, 1, 3)]
    assert run.scheduler.pool.blocks.num_used == 0


@pytest.mark.parametrize("policy", ["serial", "overlap", "ticks", "mixed", "sliced"])
@pytest.mark.parametrize("stage", ["prepare", "launch", "join"])
def test_a_fault_ends_its_own_request_with_the_reason(policy: str, stage: str) -> None:
    run = make(policy, executor=Faulty)
    run.executor.stage = stage
    requests = run.generate(PROMPTS, SamplingParams(max_tokens=8))
    assert [request.finish_reason for request in requests] == ["length", "error", "length", "length"]
    assert requests[1].error == f"MemoryError: out of memory in {stage}"
    assert [outputs(requests)[i] for i in (0, 2, 3)] == [PLAIN[i] for i in (0, 2, 3)]
    assert run.scheduler.pool.blocks.num_used == 0


def test_a_text_that_cannot_be_made_ends_its_own_request() -> None:
    run = make(text=True)
    good = run.add_request(PROMPTS[0], SamplingParams(max_tokens=8))
    bad = run.add_request(PROMPTS[1], SamplingParams(max_tokens=8))
    bad.stream._decoder.broken.add("everything")
    run.run()
    assert good.output_ids == PLAIN[0]
    assert bad.status is Status.FAILED and bad.error == f"{InjectedError.__name__}: text"


# --- what it reports -----------------------------------------------------------------------------------


def test_the_snapshot_can_be_shown() -> None:
    run = make(Ticks(4), sizes={"max_rows": 2})
    for prompt in PROMPTS:
        run.add_request(prompt, SamplingParams(max_tokens=8))
    run.step()
    shown = run.snapshot().as_dict()
    json.dumps(shown, allow_nan=False)
    assert shown["policy"] == "ticks" and shown["overlap"] and not shown["concurrent"]
    assert shown["waiting"] == 2 and shown["prefilling"] + shown["decoding"] == 2
    run.run()
    after = run.snapshot()
    counters = after.counters
    assert counters.finished == {"length": 4} and counters.output_tokens == 32
    assert counters.prompt_tokens == counters.prefill_tokens == sum(map(len, PROMPTS))
    assert after.blocks_used == 0 and after.latency.ttft.count == 4


def test_the_policy_changes_while_requests_run() -> None:
    run = make("serial", sizes={"feeds": True})
    requests = [run.add_request(prompt, SamplingParams(max_tokens=8)) for prompt in PROMPTS]
    seen = []
    for policy in ("ticks", "sliced", "mixed", "overlap", "dynamic", "adaptive", "serial") * 3:
        run.set_policy(policy)
        run.step()
        seen.append(run.scheduler.policy.name)
    run.run()
    assert outputs(requests) == PLAIN and len(set(seen)) > 3


def test_only_two_real_streams_count_as_a_stream_overlap() -> None:
    class Real(SimulatedExecutor):
        concurrent = True

    def count(policy, *, executor=Real, **options):
        run = make(policy, executor=executor, **options)
        for prompt in PROMPTS:
            run.add_request(prompt, SamplingParams(max_tokens=8))
            run.step()
        run.run()
        return run.counters

    both = count("overlap")
    assert both.prefill_decode_stream_overlap_steps == both.prefill_decode_overlap_steps > 0
    for policy, options in (
        ("serial", {}),
        ("mixed", {}),
        ("sliced", {}),
        ("overlap", {"overlap": False}),
        ("ticks", {"overlap": False}),
        ("ticks", {"sizes": {"lanes": False}}),
        ("ticks", {"executor": SimulatedExecutor}),
    ):
        counters = count(policy, **options)
        assert counters.prefill_decode_overlap_steps > 0
        assert counters.prefill_decode_stream_overlap_steps == 0


def test_a_shared_prefix_is_counted_once_and_changes_nothing() -> None:
    prompt = list(range(20))
    run = make(Mixed(64))
    first, again = (run.generate([prompt], SamplingParams(max_tokens=4))[0] for _ in range(2))
    assert again.output_ids == first.output_ids and (first.cached_len, again.cached_len) == (0, 16)
    assert (run.counters.prefix_cache_queries, run.counters.prefix_cache_hits) == (40, 16)
    other = run.add_request(prompt, SamplingParams(max_tokens=4), salt="another tenant")
    run.run()
    assert other.cached_len == 0 and other.output_ids == first.output_ids
