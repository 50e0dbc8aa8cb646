"""An engine in a process of its own does what one in this process does; nobody outlives or waits for a dead peer."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.config.schema import RolloutConfig, TrainerConfig
from lockstep.records import Claim, Completion
from lockstep.refit.engine_child import start_engine
from lockstep.refit.transaction import RefitError, run_refit
from lockstep.refit.verify import claim_covered, claim_loaded
from lockstep.rollout.process_link import EngineProcess, EngineProcessError
from lockstep.rollout.receiver import RefitRefused
from lockstep.rollout.remote_engine import RemoteEngine, RemoteReceiver
from lockstep.rollout.torch_engine import EngineUnfit, TorchEngine
from lockstep.train.fsdp import FsdpTrainer
from tests.contract.engine_models import tiny_model
from tests.contract.refit_ends import any_transport, assert_nothing_left, shared_memory
from tests.contract.test_engine import PROMPTS, as_sequence, make_request, ragged_requests
from tests.contract.test_refit import largest_difference
from tests.e2e.conftest import SMALL, assert_same_run
from tests.e2e.conftest import run as run_command
from tests.e2e.conftest import start as start_command

ROLLOUT = RolloutConfig(dtype="float32", num_slots=8, record_routes=True)
PATIENT_S = 120.0
"""A time that nothing here takes, however loaded the machine is."""

NUM_THREADS = 1
"""Of the engine's process and of this one: matrix products are summed in another order by another number of threads,
and what is computed here is compared to the bit with what is computed there."""


@pytest.fixture(autouse=True, scope="module")
def as_many_threads_here() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(NUM_THREADS)
    yield
    torch.set_num_threads(before)


def settings_for(model: Any, **changes: Any) -> dict[str, Any]:
    return {
        "engine": "torch",
        "threads": NUM_THREADS,
        "model_config": json.loads(model.config.to_json_string(use_diff=False)),
        "model_dtype": "float32",
        "rollout": ROLLOUT.model_dump(mode="json"),
        **changes,
    }


def make_trainer(seed: int = 2) -> FsdpTrainer:
    config = TrainerConfig(dtype="float32", learning_rate=1e-3)
    return FsdpTrainer(tiny_model("qwen3_moe", seed=seed), config, total_optimizer_steps=1, temperature=1.0)


def started(timeout_s: float = PATIENT_S) -> RemoteEngine:
    """A fresh engine; ``timeout_s`` of silence in a refit makes either side give up."""
    return start_engine(settings_for(tiny_model("qwen3_moe")), timeout_s=timeout_s)


@pytest.fixture(scope="module")
def shared_engine() -> Iterator[RemoteEngine]:
    """One process for the tests that leave it in service."""
    engine = started()
    yield engine
    engine.close()


@pytest.fixture
def doomed() -> Iterator[Callable[[float], RemoteEngine]]:
    """Makes engines whose process a test will kill or stop."""
    made: list[RemoteEngine] = []

    def make(timeout_s: float) -> RemoteEngine:
        made.append(started(timeout_s))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def refit(trainer: FsdpTrainer, engine: Any, name: str = "shm", folder: Path = Path("/nowhere"), **sizes: Any) -> Any:
    transport = any_transport(name, folder, **{"bucket_bytes": 20_000, "timeout_s": PATIENT_S, **sizes})
    return run_refit(trainer.weights(), engine.receiver(), transport, verify=True)


def run(engine: Any, requests: Any) -> list[Completion]:
    async def gather() -> list[Completion]:
        return list(await asyncio.gather(*[engine.generate(request) for request in requests]))

    return asyncio.run(gather())


def is_alive(process_id: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], bool], limit_s: float) -> bool:
    end = time.monotonic() + limit_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


# --- the same engine --------------------------------------------------------------------------------------------------


def test_an_engine_serves_nothing_before_its_first_refit_and_then_what_one_in_this_process_does(shared_engine):
    request = make_request("early", PROMPTS[0])
    with pytest.raises(EngineUnfit, match="no refit has committed yet"):
        run(shared_engine, [request])
    trainer = make_trainer()
    receipt = refit(trainer, shared_engine)
    claims = {claim.name: claim.status for claim in receipt.claims}
    assert {claims[claim] for claim in ("covered", "transported", "loaded")} == {"held"}
    assert receipt.num_buckets > 2
    assert shared_engine.version == trainer.version
    inline = TorchEngine(tiny_model("qwen3_moe", seed=1), ROLLOUT)
    refit(trainer, inline, "local")
    requests = ragged_requests(want_routes=True)
    for here, there in zip(run(inline, requests), run(shared_engine, requests), strict=True):
        assert (here.request_id, here.finish_reason) == (there.request_id, there.finish_reason)
        for name in ("tokens", "logprobs", "versions", "kv_versions", "routes"):
            ours, theirs = getattr(here, name), getattr(there, name)
            assert ours.dtype == theirs.dtype
            np.testing.assert_array_equal(ours, theirs)
    sequence = as_sequence("s", requests[0].prompt_tokens, run(shared_engine, requests[:1])[0])
    for path in ("prefill", "decode"):
        ours, theirs = inline.score([sequence], path)["s"], shared_engine.score([sequence], path)["s"]
        assert ours.version == theirs.version
        np.testing.assert_array_equal(ours.logprobs, theirs.logprobs)
        np.testing.assert_array_equal(ours.top1, theirs.top1)
        np.testing.assert_array_equal(ours.routes, theirs.routes)
        assert largest_difference(trainer, shared_engine, path) < 1e-5


@pytest.mark.parametrize("name", ["shm", "disk", "local"])
def test_every_way_brings_new_weights_and_without_a_refit_the_old_ones_stay(shared_engine, name, tmp_path):
    """``local``'s tensors go over the socket: slower, the same weights."""
    refit(make_trainer(seed=5), shared_engine)
    trainer = make_trainer(seed=6)
    assert largest_difference(trainer, shared_engine, "decode") > 1e-2, "without a refit this test must fail"
    refit(trainer, shared_engine, name, tmp_path)
    assert largest_difference(trainer, shared_engine, "decode") < 1e-5
    assert not list(tmp_path.iterdir())


def test_claims_are_checked_where_the_engine_is_and_no_weight_travels_for_them(shared_engine, monkeypatch):
    trainer = make_trainer(seed=7)
    refit(trainer, shared_engine)
    receiver, source = shared_engine.receiver(), trainer.weights()
    with monkeypatch.context() as patched:
        patched.setattr(RemoteReceiver, "live", lambda _: pytest.fail("tensors were asked for"))
        claims = (claim_covered(source.manifest(), receiver), claim_loaded(source.manifest(), source, receiver))
    assert [claim.status for claim in claims] == ["held", "held"]
    assert "equal by digest" in claims[1].detail
    name, _, _, tensor = next(iter(source.shards()))
    with torch.no_grad():
        tensor.view(-1)[3:5] += 1
    claim = claim_loaded(source.manifest(), source, receiver)
    assert (claim.status, claim.detail) == ("failed", f"{name}: 2 of {tensor.numel()} values differ from the trainer's")


def test_aliasing_another_process_is_refused_by_name_and_a_refit_mends_it(shared_engine):
    trainer = make_trainer()
    with pytest.raises(RefitError, match="can't alias"):
        refit(trainer, shared_engine, "shared")
    with pytest.raises(EngineUnfit):
        run(shared_engine, [make_request("r", PROMPTS[0])])
    refit(trainer, shared_engine)
    assert run(shared_engine, [make_request("r", PROMPTS[0])])[0].finish_reason in ("length", "stop")


def test_errors_come_back_as_what_they_were(shared_engine):
    refit(make_trainer(), shared_engine)
    twice = [make_request("same", PROMPTS[0], max_new_tokens=50)] * 2
    with pytest.raises(ValueError, match="'same' is already in flight"):
        run(shared_engine, twice)
    (failed,) = run(shared_engine, [make_request("bad", [10**6])])
    assert failed.finish_reason == "failed"
    assert "the vocabulary has" in str(failed.error)
    empty = np.empty(0, np.int32)
    nothing = as_sequence("e", empty, Completion("e", empty, np.empty(0, np.float32), empty, empty, "stop"))
    with pytest.raises(ValueError, match="has no tokens"):
        shared_engine.score([nothing])
    with pytest.raises(RuntimeError, match="no refit has begun"):
        shared_engine.receiver().commit()
    wrong = make_trainer().weights()
    good = wrong.manifest()
    wrong.manifest = lambda: replace(good, tensors=good.tensors[1:])  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(RefitError, match=r"missing: model\.embed_tokens"):
        run_refit(wrong, shared_engine.receiver(), any_transport("shm", Path("/")), verify=True)
    assert run(shared_engine, [make_request("r", PROMPTS[0])]), "a refused manifest leaves the engine in service"
    with pytest.raises(RefitRefused):
        shared_engine.receiver().alias([])


def test_requests_are_aborted_paused_and_resumed(shared_engine):
    refit(make_trainer(), shared_engine)

    async def scenario() -> list[Completion]:
        tasks = [asyncio.create_task(shared_engine.generate(make_request(f"r{i}", PROMPTS[i], max_new_tokens=150)))
                 for i in range(3)]  # fmt: skip
        await asyncio.sleep(0.05)
        await asyncio.to_thread(shared_engine.pause, "keep")
        await shared_engine.abort(["r0", "unknown"])
        first = await tasks[0]
        tasks[1].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[1]
        assert not tasks[2].done()
        await asyncio.to_thread(shared_engine.resume)
        return [first, await tasks[2]]

    aborted, finished = asyncio.run(scenario())
    assert aborted.finish_reason == "aborted"
    assert finished.finish_reason in ("length", "stop")
    # The cancelled request was aborted there too: its name is free again.
    assert run(shared_engine, [make_request("r1", PROMPTS[1])])[0].request_id == "r1"


def test_requests_kept_across_a_refit_carry_both_versions(shared_engine):
    trainer = make_trainer()
    refit(trainer, shared_engine)
    before = trainer.version
    weights = trainer.weights()
    weights.version = before + 1

    async def scenario() -> Completion:
        request = make_request("kept", PROMPTS[1], max_new_tokens=200)
        task = asyncio.create_task(shared_engine.generate(request))
        await asyncio.sleep(0.05)
        transport = any_transport("shm", Path("/"), bucket_bytes=20_000)
        await asyncio.to_thread(run_refit, weights, shared_engine.receiver(), transport, verify=False)
        return await task

    completion = asyncio.run(scenario())
    if before + 1 in completion.versions:
        changed = int(np.argmax(completion.versions == before + 1))
        assert (completion.versions[:changed] == before).all()
        assert (completion.kv_versions[changed:] == before + 1).all(), "old keys and values never serve a new version"
    assert completion.versions[0] == before
    assert completion.versions[-1] == before + 1, "the request was to outlast the refit"


@pytest.mark.parametrize("sound", [True, False])
def test_a_request_is_not_admitted_before_the_claims_were_checked(shared_engine, sound):
    """After the commit the new version may be scored; nothing is sampled from it until it is found right."""
    refit(make_trainer(), shared_engine)
    answers: list[Any] = []
    trainer = make_trainer(seed=4)

    def sample() -> None:
        try:
            answers.extend(run(shared_engine, [make_request("r", PROMPTS[0], max_new_tokens=2)]))
        except EngineUnfit as error:
            answers.append(error)

    caller = threading.Thread(target=sample)

    def probe() -> Claim:
        caller.start()
        caller.join(1.0)
        assert caller.is_alive(), "the request was served by weights that nobody had checked"
        return Claim("behaves", "held" if sound else "failed", "as the test says")

    transfer = any_transport("shm", Path("/"), bucket_bytes=20_000)
    if sound:
        run_refit(trainer.weights(), shared_engine.receiver(), transfer, verify=True, behaves=probe)
    else:
        with pytest.raises(RefitError, match="behaves: as the test says"):
            run_refit(trainer.weights(), shared_engine.receiver(), transfer, verify=True, behaves=probe)
    caller.join(30)
    (answer,) = answers
    if sound:
        assert set(answer.versions.tolist()) == {trainer.version}
    else:
        assert isinstance(answer, EngineUnfit)
        refit(make_trainer(), shared_engine)


def test_a_second_refit_is_refused_while_one_runs_and_the_first_goes_on(shared_engine):
    trainer = make_trainer(seed=8)
    source, second = trainer.weights(), []
    shards = source.shards

    def interrupted() -> Iterator[Any]:
        for index, shard in enumerate(shards()):
            if index == 5:
                with pytest.raises(RefitError, match="has begun and is not over") as caught:
                    refit(make_trainer(seed=9), shared_engine)
                second.append(caught)
            yield shard

    source.shards = interrupted  # pyright: ignore[reportAttributeAccessIssue]
    run_refit(source, shared_engine.receiver(), any_transport("shm", Path("/"), bucket_bytes=20_000), verify=False)
    assert second
    assert largest_difference(trainer, shared_engine, "prefill") < 1e-5


def test_no_shared_memory_is_left_at_either_end(shared_engine):
    """After a refit that held, the engine keeps the last transfer's buffers; after one that broke off, nothing."""
    child = shared_engine.process.process_id
    before = shared_memory()
    refit(make_trainer(), shared_engine)
    kept = shared_memory(child)
    refit(make_trainer(), shared_engine)
    again = shared_memory(child)
    assert 0 < len(again) == len(kept) <= 2
    assert kept.isdisjoint(again), "they are those of a transport that has ended"
    source = make_trainer().weights()
    shards = source.shards

    def broken() -> Iterator[Any]:
        for index, shard in enumerate(shards()):
            if index == 7:
                raise OSError("the trainer broke")
            yield shard

    source.shards = broken  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(RefitError, match="the trainer broke"):
        run_refit(source, shared_engine.receiver(), any_transport("shm", Path("/"), bucket_bytes=20_000), verify=True)
    assert (shared_memory(), shared_memory(child)) == (before, set())
    with pytest.raises(EngineUnfit, match="the trainer broke"):
        run(shared_engine, [make_request("r", PROMPTS[0])])
    refit(make_trainer(), shared_engine)


# --- peers that end or hang -------------------------------------------------------------------------------------------


def during_shard(source: Any, number: int, act: Callable[[], None]) -> Any:
    """``source``, which calls ``act`` before it yields shard ``number``."""
    shards = source.shards

    def acting() -> Iterator[Any]:
        for index, shard in enumerate(shards()):
            if index == number:
                act()
            yield shard

    source.shards = acting
    return source


@pytest.mark.parametrize("number", [0, 9, 22])
def test_an_engine_killed_at_any_bucket_is_named_and_serves_nothing(doomed, number):
    engine = doomed(PATIENT_S)
    before = shared_memory()
    source = during_shard(make_trainer().weights(), number, lambda: os.kill(engine.process.process_id, signal.SIGKILL))
    begun = time.monotonic()
    with pytest.raises(RefitError, match=r"is gone \(signal 9\)"):
        run_refit(source, engine.receiver(), any_transport("shm", Path("/"), bucket_bytes=20_000), verify=True)
    assert time.monotonic() - begun < 30, "its end is noticed, not waited for"
    with pytest.raises(EngineProcessError, match="signal 9"):
        run(engine, [make_request("r", PROMPTS[0])])
    assert_nothing_left(before)


def test_an_engine_killed_while_it_samples_fails_every_request(doomed):
    engine = doomed(PATIENT_S)
    refit(make_trainer(), engine)

    async def scenario() -> list[Any]:
        requests = [make_request(f"r{i}", PROMPTS[i], max_new_tokens=200) for i in range(3)]
        tasks = [asyncio.create_task(engine.generate(request)) for request in requests]
        await asyncio.sleep(0.05)
        os.kill(engine.process.process_id, signal.SIGKILL)
        return await asyncio.gather(*tasks, return_exceptions=True)

    for error in asyncio.run(scenario()):
        assert isinstance(error, EngineProcessError)
        assert "signal 9" in str(error)


class Gone:
    """A process that took requests, and ended before it was told to abort one."""

    started = {"naming": "module", "quantisation": "none"}  # noqa: RUF012

    def post_together(self, _operation: str, count: int, *_: Any) -> list[Future[Any]]:
        return [Future() for _ in range(count)]

    def post(self, *_: Any) -> Future[Any]:
        raise EngineProcessError("the engine's process 12 is gone")


def test_a_caller_that_is_cancelled_because_the_engine_is_gone_is_only_cancelled():
    """The first of many requests fails the caller, who cancels the others: each had a traceback of its own."""
    engine = RemoteEngine(Gone())  # pyright: ignore[reportArgumentType]

    async def scenario() -> None:
        asked = asyncio.create_task(engine.generate(make_request("r", PROMPTS[0])))
        await asyncio.sleep(0.01)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked

    asyncio.run(scenario())


def test_an_engine_that_hangs_in_a_refit_is_noticed_within_the_timeout_and_ended(doomed):
    engine = doomed(2.0)
    process_id = engine.process.process_id
    source = during_shard(make_trainer().weights(), 9, lambda: os.kill(process_id, signal.SIGSTOP))
    begun = time.monotonic()
    with pytest.raises(RefitError, match="no sign of life for 2 s while asked to hand_over"):
        run_refit(source, engine.receiver(), any_transport("shm", Path("/"), timeout_s=60), verify=True)
    assert 1.5 < time.monotonic() - begun < 15
    assert not is_alive(process_id)
    with pytest.raises(EngineProcessError, match="no sign of life"):
        engine.score([])


def test_an_engine_that_is_busy_for_longer_than_the_timeout_but_steps_is_not_condemned(doomed):
    engine = doomed(1.0)
    refit(make_trainer(), engine)

    async def long_work() -> int:
        count, begun = 0, time.monotonic()
        while time.monotonic() - begun < 2.5:
            requests = [make_request(f"r{count}/{i}", PROMPTS[i], max_new_tokens=200) for i in range(4)]
            await asyncio.gather(*[engine.generate(request) for request in requests])
            count += 1
        return count

    assert asyncio.run(long_work()) > 0


def test_a_trainer_that_goes_silent_in_a_refit_is_given_up_there(doomed):
    engine, trainer = doomed(2.0), make_trainer()
    refit(trainer, engine)
    source = during_shard(trainer.weights(), 9, lambda: time.sleep(4))
    with pytest.raises(RefitError, match="gave this refit up: its owner said nothing for 2 s"):
        run_refit(source, engine.receiver(), any_transport("shm", Path("/"), bucket_bytes=20_000), verify=True)
    with pytest.raises(EngineUnfit):
        run(engine, [make_request("r", PROMPTS[0])])
    refit(trainer, engine)
    assert largest_difference(trainer, engine, "decode") < 1e-5


def test_a_disk_that_takes_longer_to_write_than_the_timeout_is_no_silence(doomed, tmp_path):
    engine, trainer = doomed(2.0), make_trainer()
    source = trainer.weights()
    shards = source.shards

    def slow() -> Iterator[Any]:
        for shard in shards():
            time.sleep(0.2)
            yield shard

    source.shards = slow
    begun = time.monotonic()
    run_refit(source, engine.receiver(), any_transport("disk", tmp_path, bucket_bytes=20_000), verify=False)
    assert time.monotonic() - begun > 4
    assert largest_difference(trainer, engine, "decode") < 1e-5


def test_an_engine_that_hangs_while_nothing_is_in_flight_is_noticed_at_the_next_question(doomed):
    engine = doomed(1.0)
    os.kill(engine.process.process_id, signal.SIGSTOP)
    with pytest.raises(EngineProcessError, match="no sign of life for 1 s while asked to opaque"):
        engine.receiver().opaque()


OWNER = """
import json, os, sys, time
from tests.contract.test_engine_process import any_transport, during_shard, make_trainer, run_refit, started
from pathlib import Path
engine = started()
def act():
    print(engine.process.process_id, flush=True)
    time.sleep(600)
source = during_shard(make_trainer().weights(), 9, act)
run_refit(source, engine.receiver(), any_transport("shm", Path("/"), bucket_bytes=20_000), verify=True)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_an_engine_ends_with_its_owner_in_the_middle_of_a_refit(number):
    root = Path(__file__).parents[2]
    owner = subprocess.Popen([sys.executable, "-c", OWNER], cwd=root, stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        child = int(owner.stdout.readline())
        assert is_alive(child)
        assert any("memfd:lockstep" in line for line in shared_memory(child)), "buckets are mapped there"
        owner.send_signal(number)
        owner.wait(30)
        assert wait_until(lambda: not is_alive(child), 15), "the engine outlived its owner"
    finally:
        owner.kill()
        owner.communicate()
    assert not [name for name in os.listdir("/dev/shm") if "lockstep" in name]


BUILDING = """
import os, sys, time
from pathlib import Path
from lockstep.refit.arrivals import Arrivals
from lockstep.rollout import engine_process
def build(*_):
    Path({path!r}).write_text(str(os.getpid()))
    time.sleep(600)
engine_process.build_engine = build
sys.exit(engine_process.run(Arrivals(), dict))
"""
OWNER_OF_BUILDING = """
import sys
from lockstep.rollout.process_link import EngineProcess
EngineProcess([sys.executable, "-c", sys.argv[1]], {"engine": "torch"}, timeout_s=600)
"""


def test_an_engine_that_is_being_built_ends_with_its_owner(tmp_path):
    """Nobody listens to the socket then, and a large engine is built for minutes."""
    told = tmp_path / "pid"
    code = BUILDING.format(path=str(tmp_path / "pid"))
    root = Path(__file__).parents[2]
    owner = subprocess.Popen([sys.executable, "-c", OWNER_OF_BUILDING, code], cwd=root)
    try:
        assert wait_until(lambda: told.exists() and told.read_text() != "", 120)
        child = int(told.read_text())
        assert is_alive(child)
        owner.kill()
        owner.wait(30)
        assert wait_until(lambda: not is_alive(child), 15), "the engine outlived its owner"
    finally:
        owner.kill()
        owner.wait()


def test_a_process_that_does_not_come_up_is_reported_with_its_last_words():
    words = "import sys; print('no such library', file=sys.stderr); sys.exit(7)"
    with pytest.raises(EngineProcessError, match=r"(?s)exit code 7.*no such library"):
        EngineProcess([sys.executable, "-c", words], {}, timeout_s=PATIENT_S)
    with pytest.raises(EngineProcessError, match="could not be started"):
        EngineProcess(["/no/such/python"], {}, timeout_s=PATIENT_S)
    with pytest.raises(ValueError, match="unknown engine 'sglang': expected torch or vllm"):
        start_engine({"engine": "sglang"}, timeout_s=PATIENT_S)


def test_closing_ends_the_process_once_and_for_all(doomed):
    engine = doomed(PATIENT_S)
    process_id = engine.process.process_id
    refit(make_trainer(), engine)
    engine.close()
    engine.close()
    assert not is_alive(process_id)
    with pytest.raises(EngineProcessError, match="it was closed"):
        engine.score([])
    engine.receiver().abort("a dead engine serves nothing: there is nothing to do")


# --- the command ------------------------------------------------------------------------------------------------------

SEPARATE = (*SMALL, "rollout.process=separate")


@pytest.mark.slow
def test_training_with_a_separate_engine_is_the_same_run_resumed_or_not(tmp_path):
    """Losses, tokens, agreement and final weights are bit-equal to a run with the engine in the trainer's process."""
    inline, separate, resumed = tmp_path / "inline", tmp_path / "separate", tmp_path / "resumed"
    for run_dir, settings in ((inline, SMALL), (separate, SEPARATE), (resumed, (*SEPARATE, "steps=6"))):
        if run_dir is resumed:
            process = start_command(run_dir, settings)
            assert wait_until(lambda: len(read_metrics(resumed)) >= 4, 120)
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=120)
            assert process.returncode == 130
        code, _, err = run_command(run_dir, settings)
        assert code == 0, err
    assert_same_run(inline, separate)
    assert_same_run(inline, resumed)
    receipts = [json.loads(line) for line in (separate / "refits.jsonl").read_text().splitlines()]
    assert {receipt["transport"] for receipt in receipts} == {"shm"}
    assert all(receipt["num_buckets"] >= 1 for receipt in receipts)


def read_metrics(run_dir: Path) -> list[str]:
    path = run_dir / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def children_of(process_id: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{process_id}/task").iterdir():
        found += [int(one) for one in (task / "children").read_text().split()]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_interrupted_or_killed_leaves_no_process(tmp_path, number):
    process = start_command(tmp_path / "run", (*SEPARATE, "steps=500"))
    assert wait_until(lambda: len(read_metrics(tmp_path / "run")) >= 3, 120)
    children = children_of(process.pid)
    assert children, "the engine's process must be there to be missed"
    process.send_signal(number)
    process.communicate(timeout=120)
    assert process.returncode == (130 if number == signal.SIGINT else -9)
    assert wait_until(lambda: not any(is_alive(child) for child in children), 15)


@pytest.mark.slow
def test_a_run_whose_engine_dies_stops_with_the_reason_and_can_be_resumed(tmp_path):
    process = start_command(tmp_path / "run", (*SEPARATE, "steps=12"))
    assert wait_until(lambda: len(read_metrics(tmp_path / "run")) >= 4, 120)
    for child in children_of(process.pid):
        if "engine_child" in Path(f"/proc/{child}/cmdline").read_text():
            os.kill(child, signal.SIGKILL)
    _, err = process.communicate(timeout=120)
    assert process.returncode not in (0, 130)
    assert "the engine's process" in err
    assert "signal 9" in err
    code, _, err = run_command(tmp_path / "run", (*SEPARATE, "steps=12"))
    assert code == 0, err
