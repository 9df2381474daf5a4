"""The built-in game: guess a number from `higher` and `lower`."""

import asyncio
import functools
import random
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlsys.episodes.ask import Reply
from rlsys.tasks import guess


def play(row, player):
    """What the game returns, and what it said. `player(low, high, answers so far)` returns the text of a guess."""
    heard = []

    async def ask(text):
        heard.append(text)
        low, high = map(int, heard[0].split())
        return SimpleNamespace(text=player(low, high, heard[1:]))

    return asyncio.run(guess.play(row, ask)), heard


def scores(row, texts):
    """The score of each turn of a game in which the model says `texts`."""
    replies = [Reply(text, "stop") for text in texts]
    coming = iter(replies)

    async def ask(_):
        return next(coming)

    asyncio.run(guess.play_scored(row, ask))
    return [reply.turn_score for reply in replies]


def halving():
    guesses = []

    def player(low, high, answers):
        if not answers:
            guesses.clear()
        for number, answer in zip(guesses, answers, strict=True):
            low, high = (number + 1, high) if answer == "higher" else (low, number - 1)
        guesses.append((low + high) // 2)
        return str(guesses[-1])

    return player


def test_halving_solves_every_game():
    player = halving()
    for low, high in guess.number_ranges(held_out=False) + guess.number_ranges(held_out=True):
        for secret in range(low, high + 1):
            result, heard = play({"low": low, "high": high, "secret": secret}, player)
            assert result == {"solved": 1.0}
            assert heard[0] == f"{low} {high}"
            assert len(heard) <= 5, "one guess to spare"


def test_a_player_who_does_not_listen_solves_as_many_games_as_chance_allows():
    rng, rows = random.Random(0), 10 * guess.rows("guess_heldout")
    solved = sum(play(row, lambda low, high, _: str(rng.randint(low, high)))[0]["solved"] for row in rows)
    expected = sum(1 - (1 - 1 / (row["high"] - row["low"] + 1)) ** 6 for row in rows) / len(rows)
    assert solved / len(rows) == pytest.approx(expected, abs=0.03)
    assert expected < 0.35


def test_the_game_says_whether_the_secret_is_higher_or_lower_and_ends_after_six_guesses():
    row, guesses = {"low": 3, "high": 20, "secret": 9}, [3, 20, 8, 10, 7, 11]
    result, heard = play(row, lambda low, high, answers: str(guesses[len(answers)]))
    assert result == {"solved": 0.0}
    assert heard == ["3 20", "higher", "lower", "higher", "lower", "higher"]
    assert play(row, lambda low, high, answers: str(guesses[len(answers)] if len(answers) < 5 else 9))[0] == {
        "solved": 1
    }


def left_on_average(guess_, numbers):
    """How many numbers the answer leaves, if each of `numbers` is equally likely to be the secret."""
    remaining = [
        [n for n in numbers if (n < guess_) == (secret < guess_) and n != guess_]
        for secret in numbers
        if secret != guess_
    ]
    return sum(map(len, remaining)) / len(numbers)


@pytest.mark.parametrize("guess_", [3, 8, 11, 12, 17])
def test_a_guess_loses_what_it_leaves_more_than_the_middle_does(guess_):
    numbers = range(3, 18)  # 15, the middle is 10
    more = left_on_average(guess_, numbers) - left_on_average(10, numbers)
    assert scores({"low": 3, "high": 17, "secret": guess_}, [str(guess_)]) == [pytest.approx(-more / (15 / 2))]


def test_a_turn_is_scored_by_the_numbers_that_are_still_possible():
    row = {"low": 0, "high": 14, "secret": 5}
    assert scores(row, ["7", "3", "5"]) == [0, 0, 0], "halves 0 to 14, 0 to 6 and 4 to 6"
    assert scores(row, ["7", "8", "7", "3", "5"]) == [0, -1, -1, 0, 0], "7 and 8 are impossible after `lower`"
    assert scores(row, ["7", "0", "5"]) == [0, pytest.approx(-((6 / 7) ** 2)), pytest.approx(-((3 / 6) ** 2))]


def test_a_reply_that_is_no_number_loses_all_turns_that_are_left():
    assert scores({"low": 0, "high": 14, "secret": 5}, ["7", "higher"]) == [0, -5]


@pytest.mark.parametrize("text", ["", "higher", "9 9", "<eos>"])
def test_a_reply_that_is_no_number_loses(text):
    assert play({"low": 3, "high": 20, "secret": 9}, lambda *_: text) == ({"solved": 0.0}, ["3 20"])


def test_no_range_is_both_learned_and_held_out_and_rows_are_always_the_same():
    train, held_out = (guess.rows(name) for name in ("guess", "guess_heldout"))
    assert (len(train), len(held_out)) == (guess.TRAIN_ROWS, guess.HELD_OUT_ROWS)
    assert not {(r["low"], r["high"]) for r in train} & {(r["low"], r["high"]) for r in held_out}
    assert train == guess.rows("guess")
    assert all(0 <= r["low"] <= r["secret"] <= r["high"] < guess.NUMBERS for r in train + held_out)


def test_every_word_of_the_game_is_one_token_also_where_the_tokenizer_is_read_again(tmp_path):
    guess.make_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer("12 30")["input_ids"] == [16, 34]
    assert [tokenizer(word)["input_ids"] for word in ("higher", "lower", "0", "31")] == [[2], [3], [4], [35]]
    assert tokenizer.decode([16, 1], skip_special_tokens=True) == "12"


def test_transcripts_of_the_warm_start_are_of_players_who_do_not_listen():
    transcripts = guess.random_transcripts(random.Random(0))
    places = []
    for _ in range(2000):
        low, high, *turns = next(transcripts)
        assert not guess.is_held_out((int(low), int(high)))
        assert turns[1::3] == ["<eos>"] * 6
        heard, last = turns[2], int(turns[3])
        places.append((heard == "higher", (last - int(low)) / (int(high) - int(low))))
    for higher in (True, False):
        after = [place for answer, place in places if answer == higher]
        assert sum(after) / len(after) == pytest.approx(0.5, abs=0.04), "the second guess does not follow the answer"


def test_the_warm_start_teaches_to_write_a_number_and_to_stop(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(guess, "make_model", functools.partial(guess.make_model, steps=150))
    folder = guess.model_folder(3)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.config.vocab_size == len(guess.SYMBOLS) == 36
    chances = model(torch.tensor([tokenizer.encode("10 29 17")])).logits[0].softmax(-1)
    assert chances[1, 4:].sum() > 0.9, "a number follows the range"
    assert chances[2, 1] > 0.9, "the end follows the number"


def test_embeddings_of_near_numbers_are_alike():
    numbers = guess.build_model(0).get_input_embeddings().weight[-guess.NUMBERS :]
    norms = torch.nn.functional.normalize(numbers, dim=1)
    likeness = norms @ norms.T
    by_distance = [likeness.diagonal(distance).mean().item() for distance in (1, 2, 4, 8)]
    assert by_distance[0] > 0.8
    assert by_distance == sorted(by_distance, reverse=True)
