"""A reward model as a worker of its own, beside a function."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlsys.config.schema import Config
from rlsys.errors import ConfigError
from rlsys.rewards.model import RewardModel, model
from rlsys.rewards.settings import reward_services
from rlsys.tasks import zigzag as tiny_task
from rlsys.types import Prompt, Sample
from workers.fleet.watchdog import Watchdog
from workers.reward.pool import RewardPool, RewardWorker, ray_options, worker_numbers

TEMPLATE = "{% for m in messages %}{{ m.content }}{% if m.role == 'user' %}>{% endif %}{% endfor %}"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small sequence-classification model with random weights and two labels."""
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("reward_model")
    settings = Qwen2Config(
        vocab_size=13, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        num_labels=2, max_position_embeddings=64, pad_token_id=0, eos_token_id=1, initializer_range=0.5,
    )  # fmt: skip
    Qwen2ForSequenceClassification(settings).save_pretrained(folder)
    tokenizer = tiny_task.make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return str(folder)


def one_by_one(path: str, texts: list[str], label: int = 0) -> list[float]:
    reward_model = RewardModel(path, "float32", on_gpu=False)
    ids = [torch.tensor([reward_model.tokenizer.encode(text)]) for text in texts]
    with torch.no_grad():
        return [reward_model.model(i).logits[0, label].item() for i in ids]


def test_padding_does_not_change_a_score(path: str) -> None:
    texts = ["1>2", "123456>654321", "12>21", "9>"]
    scores = RewardModel(path, "float32", on_gpu=False).score_texts(texts, batch=3, max_tokens=0, label=1)
    assert scores == pytest.approx(one_by_one(path, texts, label=1), abs=1e-5)


def test_a_text_that_is_too_long_loses_its_beginning(path: str) -> None:
    [score] = RewardModel(path, "float32", on_gpu=False).score_texts(["123456>654"], batch=1, max_tokens=4, label=0)
    assert score == pytest.approx(one_by_one(path, [">654"])[0], abs=1e-5)


def test_a_chat_is_rendered_by_the_models_own_template(path: str) -> None:
    reward_model = RewardModel(path, "float32", on_gpu=False)
    assert reward_model.chat_text("unused", "21", [{"role": "user", "content": "12"}]) == "12>21"
    assert reward_model.chat_text("12>", "21", None) == "12>21"


def test_an_episode_is_read_by_its_transcript(path: str) -> None:
    turns = [("user", "12"), ("assistant", "3"), ("user", "45"), ("assistant", "6")]
    transcript = [{"role": role, "content": content} for role, content in turns]
    chat = [{"role": "user", "content": "12"}]
    scores = model(["", ""], ["36", "36"], [transcript, chat], [transcript, None], path=path)
    assert scores == pytest.approx(one_by_one(path, ["12>345>6", "12>36"]), abs=1e-5)


def test_keys_and_values_are_not_kept(path: str) -> None:
    reward_model = RewardModel(path, "float32", on_gpu=False)
    assert reward_model.model(torch.tensor([[2, 3]])).past_key_values is None


def test_a_model_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be loaded"):
        RewardModel(str(tmp_path), "float32", on_gpu=False)


def test_its_score_and_a_functions_are_added_up(
    path: str, spawn: Callable[..., Any], tiny: Callable[..., Config], tmp_path: Path
) -> None:
    config = tiny(
        f"reward.functions={{exact: 2.0, model: {{weight: 0.5, path: '{path}', batch: 2}}}}", "reward.workers=1"
    )
    assert [(list(s.functions[""]), s.workers, s.keep_spare) for s in reward_services(config)] == [
        (["exact"], 1, True),
        (["model"], 1, False),
    ]
    watchdog = Watchdog(tmp_path)
    pool = RewardPool(
        config,
        lambda name: spawn(RewardWorker, config, *worker_numbers(name), ray_options=ray_options(config)),
        watchdog,
    )
    pool.start()
    none = np.zeros(0)
    samples = [Sample("p", i, text, none, none, "stop", 0) for i, text in enumerate(["21", "12", "2"])]
    chat = [{"role": "user", "content": "12"}]
    verdicts = pool.judge(samples, {"p": Prompt("p", "made", "12>", [], {"answer": "21"}, messages=chat)}).result()
    scores = one_by_one(path, ["12>21", "12>12", "12>2"])
    assert [v.components["exact"] for v in verdicts] == [1, 0, 0]
    assert [v.components["model"] for v in verdicts] == pytest.approx(scores, abs=1e-5)
    assert [v.score for v in verdicts] == pytest.approx(
        [2 * (i == 0) + 0.5 * s for i, s in enumerate(scores)], abs=1e-5
    )
