"""Functions that do what no function should, in a real process: each has its own reason, and the others go on."""

from pathlib import Path

import pytest
from test_runner import play, runner, settings

from rlsys.episodes.settings import EpisodeSettings
from workers.turns.messages import Start

GAMES = """
import asyncio, os, signal, sys, threading, time
import numpy as np

class Secret:
    def __str__(self):
        raise ValueError("not for you")
    __repr__ = __str__

async def plays_well(row, ask):
    for _ in range(3):
        await ask("1>")
        await asyncio.to_thread(time.sleep, 0.01)
    return 1.0

async def swallows_its_timeout(row, ask):
    await ask("1>")
    try:
        await asyncio.sleep(1000)
    except BaseException:
        return 0.0

async def asks_after_its_timeout(row, ask):
    await ask("1>")
    try:
        await asyncio.sleep(1000)
    except asyncio.CancelledError:
        await ask("2>")

async def asks_again_at_its_limit(row, ask):
    refused = 0
    for _ in range(9):
        try:
            await ask("1" * 20)
        except Exception as over:
            refused += over.reason == "window"
    return float(refused)

async def steps_without_a_next(row, ask):
    await ask("1>")
    await asyncio.to_thread(lambda: next(iter([])))

async def hides_an_object_in_a_message(row, ask):
    await ask([{"role": "user", "content": "1>", "extra": Secret()}])
    return 1.0

async def uses_keys_that_json_lacks(row, ask):
    await ask([{"role": "user", "content": "1>", (1, 2): 3}])
    return 1.0

async def sets_a_text_as_a_score(row, ask):
    (await ask("1>")).turn_score = "0.5"
    return 1.0

async def sets_an_object_as_a_score(row, ask):
    (await ask("1>")).turn_score = Secret()
    return 1.0

async def sets_a_number_that_no_float_holds(row, ask):
    (await ask("1>")).turn_score = 10**400

async def scores_with_numpy(row, ask):
    (await ask("1>")).score(np.float32(0.5))
    (await ask("1>")).score(np.int64(2))

async def scores_nothing(row, ask):
    (await ask("1>")).score(None)

async def ends_behind_a_child(row, ask):
    await ask("1>")
    if not os.fork():
        time.sleep(60)
        os._exit(0)
    os._exit(7)

async def exits_in_a_task(row, ask):
    await ask("1>")
    await asyncio.wait_for(exit_soon(), 60)

async def exit_soon():
    await asyncio.sleep(0.05)
    sys.exit(4)

async def closes_everything(row, ask):
    await ask("1>")
    os.closerange(3, 65536)
    signal.pause()

async def blocks_in_a_task(row, ask):
    await ask("1>")
    await asyncio.wait_for(block(), 60)

async def block():
    while True:
        pass

async def waits_a_second(row, ask):
    await ask("1>")
    await asyncio.sleep(1)
    return 1.0

async def does_not_stop(row, ask):
    await ask("1>")
    while True:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            pass

async def steps_often(row, ask):
    for _ in range(25):
        await ask("1>")
        await asyncio.sleep(0.2)
    return 1.0

async def leaves_a_thread(row, ask):
    await ask("1>")
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    return float(os.getpid())

async def hangs_in_a_thread(row, ask):
    await ask("1>")
    await asyncio.to_thread(time.sleep, 60)

async def prints_much(row, ask):
    await ask("1>")
    for _ in range(100):
        print("x" * 1_000_000)
    return 1.0

async def asks_for_a_token_that_the_model_lacks(row, ask):
    await ask("1>")
    await ask("<|endoftext|>2>")

async def stops_the_loop(row, ask):
    await ask("1>")
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0.1)
    return 2.0

async def cancels_all_tasks(row, ask):
    await ask("1>")
    for task in asyncio.all_tasks():
        task.cancel()
    await asyncio.sleep(1)

async def leaves_a_task_that_blocks(row, ask):
    await ask("1>")
    left.append(asyncio.create_task(block_soon()))
    return 2.0

left = []

async def block_soon():
    await asyncio.sleep(0.1)
    await block()
"""


def hostile_settings(folder: Path, model: str, *names: str, **changes: float) -> EpisodeSettings:
    s = settings(folder, model, **changes)
    (folder / "hostile.py").write_text(GAMES)
    return EpisodeSettings(**vars(s) | {"plays": tuple(f"{folder}/hostile.py:{name}" for name in names)})


def outcomes(s: EpisodeSettings, starts: list[int]) -> list[tuple[float | str | None, str]]:
    """Plays the functions of these numbers. Returns the score or the failure of each, and what it says."""
    with runner(s) as episodes:
        ended, _ = play(episodes, [Start(i, s.plays[n], {}, 8) for i, n in enumerate(starts)])
    verdicts = [ended[i].episode.verdict for i in range(len(starts))]
    return [(v.failure or v.score, v.detail) if v else (None, "") for v in verdicts]


OUTCOMES = {
    "swallows_its_timeout": ("timeout", "swallows_its_timeout, after turn 1 took more than 2 s"),
    "asks_after_its_timeout": ("timeout", "asks_after_its_timeout, after turn 1 took more than 2 s"),
    "asks_again_at_its_limit": (7.0, ""),  # the window has 64 tokens, and a turn takes 23
    "steps_without_a_next": ("exception", "RuntimeError: the step raised StopIteration"),
    "hides_an_object_in_a_message": (
        "exception",
        "the messages of the episode cannot be sent: ValueError: not for you",
    ),
    "uses_keys_that_json_lacks": ("exception", "the messages of the episode cannot be sent: TypeError: keys must be"),
    "sets_a_text_as_a_score": ("invalid", "a turn has the score '0.5'; it must be a finite number."),
    "sets_an_object_as_a_score": ("invalid", "a turn has the score a Secret; it must be a finite number."),
    "sets_a_number_that_no_float_holds": ("invalid", "it must be a finite number."),
    "scores_with_numpy": (2.5, ""),
    "scores_nothing": ("exception", "TypeError: unsupported operand"),
    "asks_for_a_token_that_the_model_lacks": (
        "exception",
        "after turn 1: ValueError: the model has no token for `<|endoftext|>`: its 13 tokens are fewer",
    ),
}


def test_each_has_a_reason_and_none_a_score_that_is_no_number(tmp_path: Path, tiny_model: str) -> None:
    s = hostile_settings(tmp_path, tiny_model, *OUTCOMES)
    with runner(s) as episodes:
        ended, _ = play(episodes, [Start(i, name, {}, 8) for i, name in enumerate(s.plays)])
    for i, (name, (outcome, detail)) in enumerate(OUTCOMES.items()):
        verdict = ended[i].episode.verdict
        assert verdict
        assert (verdict.failure or verdict.score) == outcome, (name, verdict)
        assert detail in verdict.detail, name
        assert all(isinstance(score, float) for score in ended[i].episode.turn_scores), "they go into files"


@pytest.mark.parametrize(
    ("name", "detail"),
    [
        ("ends_behind_a_child", "the episode process ended: exit code 7, after turn 1"),
        ("exits_in_a_task", "the episode process ended: exit code 4, after turn 1"),
        pytest.param(
            "closes_everything",
            "the episode process ended: it had closed its connection or written to it",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_process_that_ends_says_how(tmp_path: Path, tiny_model: str, name: str, detail: str) -> None:
    s = hostile_settings(tmp_path, tiny_model, name, step_timeout_s=20.0)
    [(outcome, says)] = outcomes(s, [0])
    assert outcome == "crash"
    assert says.startswith(detail)


def test_a_task_that_blocks_is_the_fault_of_the_episode_that_started_it(tmp_path: Path, tiny_model: str) -> None:
    """The functions of the others have run after it, and before its task."""
    s = hostile_settings(tmp_path, tiny_model, "waits_a_second", "blocks_in_a_task")
    results = outcomes(s, [1, 0, 0, 0])
    assert [outcome for outcome, _ in results] == ["timeout", 1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("name", "outcome"),
    [("stops_the_loop", 2.0), ("cancels_all_tasks", "exception"), ("leaves_a_task_that_blocks", 2.0)],
)
def test_what_one_does_to_the_event_loop_is_not_the_fault_of_others(
    tmp_path: Path, tiny_model: str, name: str, outcome: float | str
) -> None:
    s = hostile_settings(tmp_path, tiny_model, name, "waits_a_second")
    results = outcomes(s, [0, 1, 1, 1])
    assert [outcome for outcome, _ in results] == [outcome, 1.0, 1.0, 1.0]


@pytest.mark.long
def test_an_episode_that_does_not_stop_is_not_the_fault_of_the_one_that_ran_last(
    tmp_path: Path, tiny_model: str
) -> None:
    s = hostile_settings(tmp_path, tiny_model, "does_not_stop", "steps_often", max_turns=30, window=400)
    results = outcomes(s, [0, 1])
    assert [outcome for outcome, _ in results] == ["timeout", 1.0]


def test_steps_that_hang_do_not_keep_the_threads_from_others(tmp_path: Path, tiny_model: str) -> None:
    s = hostile_settings(tmp_path, tiny_model, "hangs_in_a_thread", "plays_well", concurrency=4)
    results = outcomes(s, [0] * 8 + [1] * 8)
    assert [outcome for outcome, _ in results] == ["timeout"] * 8 + [1.0] * 8


def test_prints_do_not_fill_the_disk(tmp_path: Path, tiny_model: str, capfd: pytest.CaptureFixture[str]) -> None:
    s = hostile_settings(tmp_path, tiny_model, "prints_much", "plays_well", step_timeout_s=20.0)
    assert [outcome for outcome, _ in outcomes(s, [0, 0, 1])] == [1.0, 1.0, 1.0]
    output = capfd.readouterr().out
    assert 64 << 20 <= len(output) <= 65 << 20
    assert "[this process has printed 64 MiB; what follows is left out]" in output[-200:]


def test_threads_that_functions_leave_do_not_pile_up(tmp_path: Path, tiny_model: str) -> None:
    """A process has one episode at a time here, so it is replaced at 36 threads."""
    s = hostile_settings(tmp_path, tiny_model, "leaves_a_thread", concurrency=1)
    numbers = [number for number, _ in outcomes(s, [0] * 45)]
    assert len(set(numbers)) == 2
    assert max(map(numbers.count, numbers)) in range(30, 36)
