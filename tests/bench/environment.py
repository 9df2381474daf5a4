"""Steps per second of a trivial environment: episode processes whose turns are answered at once, without engines.

python tests/bench/environment.py                 # two processes, about 20 seconds
python tests/bench/environment.py --processes 1
"""

import argparse
import tempfile
import threading
import time
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np

from rlsys.checks import load_checked
from rlsys.episodes.settings import EpisodeSettings
from rlsys.tasks.builtin import TINY_MODELS
from workers.episodes.runner import EpisodeRunner
from workers.turns.messages import Answer, Asked, Ended, Start

ROOT = Path(__file__).parent.parent.parent
EPISODES, TURNS = 256, 80  # of each process
TURN = np.array([5, 6, 7, 1], np.int32), -np.ones(4, np.float32)
GAME = """
async def play(row, ask):
    for turn in range(row["turns"]):
        reply = await ask(f"{turn % 10}>")
    return float(len(reply.text))
"""


def play_all(runner: EpisodeRunner, play: str) -> None:
    """Plays until all episodes have ended. Each turn is three digits and the end."""
    runner.begin_line("bench", 0)
    runner.send([Start(number, play, {"turns": TURNS}, 4) for number in range(EPISODES)])
    left = EPISODES
    for events in runner.events(0):
        asked = [event for event in events if isinstance(event, Asked)]
        runner.send([Answer(a.number, a.turn, *TURN, "stop") for a in asked])
        left -= sum(isinstance(event, Ended) for event in events)
        if not left:
            return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2)
    processes = parser.parse_args().processes
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        game = Path(folder) / "game.py"
        game.write_text(GAME)
        options = [f"episode={{play: '{game}:play', max_turns: 1000, concurrency: {EPISODES}}}", "reward.functions={}"]
        settings = EpisodeSettings.from_config(load_checked(ROOT / "configs" / "tiny_cpu.yaml", options))
        settings = settings.for_model(str(TINY_MODELS["builtin:tiny"].folder(0, print)), 1024)
        runners = [stack.enter_context(closing(EpisodeRunner(settings))) for _ in range(processes)]
        for runner in runners:
            runner.ready.result()
        for _ in range(3):
            threads = [threading.Thread(target=play_all, args=(r, settings.plays[0])) for r in runners]
            began, cpu = time.perf_counter(), time.process_time()
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            seconds, steps = time.perf_counter() - began, processes * EPISODES * TURNS
            print(
                f"{steps / seconds:,.0f} steps/s; {(time.process_time() - cpu) / steps * 1e6:.0f} µs of the runner's a step"
            )


if __name__ == "__main__":
    main()
