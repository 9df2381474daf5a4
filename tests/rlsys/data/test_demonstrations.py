"""What rows show the model to write: which tokens are learned, and what stands before them."""

import json

import pytest
from chat_families import FAMILIES, family_tokenizer
from data_files import lines, load, refused, table

from rlsys.data.demonstrations import from_stored, to_stored
from rlsys.sampling.demonstrations import demonstrated_sample
from rlsys.tasks import zigzag

QUESTION = {"role": "user", "content": "How much is 1 + 2?"}


@pytest.fixture(scope="module")
def digits():
    return zigzag.make_tokenizer()


@pytest.fixture(scope="module")
def qwen():
    return family_tokenizer("qwen2_5")


def says(text, **more):
    return {"role": "assistant", "content": text} | more


def asks(text):
    return {"role": "user", "content": text}


def conversation(*turns):
    """Questions and answers in turn."""
    return [(says if i % 2 else asks)(text) for i, text in enumerate(turns)]


def supervised(path, tokenizer, **options):
    return load(path, tokenizer, supervised=True, longest=options.pop("longest", 10_000), **options)


def paths(prompt):
    """For each turn, all that stands before it, and what is learned."""
    sample = demonstrated_sample(prompt, 0)
    before, made = {-1: list(prompt.tokens)}, []
    for i, ((read, learned), after) in enumerate(zip(sample.turns, sample.continued_turns, strict=True)):
        context = before[after] + read.tolist()
        made.append((context, learned.tolist()))
        before[i] = context + learned.tolist()
    return made


# --- texts -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("answer", "learned"), [("21", [4, 3, 1]), (21, [4, 3, 1]), ("21<eos>", [4, 3, 1])])
@pytest.mark.parametrize("write", [lines, lambda folder, row: table(folder, [row])])
def test_of_a_text_the_answer_and_the_end_are_learned(tmp_path, digits, write, answer, learned):
    [prompt] = supervised(write(tmp_path, {"prompt": "12>", "answer": answer}), digits)
    assert prompt.tokens == [3, 4, 12]
    assert paths(prompt) == [([3, 4, 12], learned)]
    assert prompt.row == {"answer": answer}, "reward functions have it too"


def test_the_answer_may_be_in_any_field(tmp_path, digits):
    file = lines(tmp_path, {"prompt": "1>", "answer": "9", "meta": {"solution": "2"}})
    [prompt] = supervised(file, digits, answer_key="meta.solution")
    assert prompt.demonstration.tokens.tolist() == [4, 1]


def test_without_supervision_nothing_is_shown(tmp_path, digits):
    [prompt] = load(lines(tmp_path, {"prompt": "1>", "answer": "9"}), digits)
    assert prompt.demonstration is None


@pytest.mark.parametrize(
    ("row", "part"),
    [
        ({"prompt": "1>"}, "`answer` is no such field"),
        ({"prompt": "1>", "answer": " "}, "`answer` is ' '"),
        ({"prompt": "1>", "answer": True}, "`answer` is True"),
        ({"prompt": "1>", "answer": ["2"]}, "`answer` is ['2']"),
        ({"prompt": "1>", "answer": [says("2")]}, "the prompt is a text, and the answer a list of messages"),
    ],
)
def test_a_row_that_shows_nothing_is_refused(tmp_path, digits, row, part):
    [problem, *_] = refused(lines(tmp_path, row), digits, supervised=True)
    assert part in problem
    assert str(tmp_path) in problem


def test_a_prompt_and_its_answer_are_one_sequence_with_one_limit(tmp_path, digits):
    file = lines(tmp_path, {"prompt": "12>", "answer": "21"}, {"prompt": "12>", "answer": "213"})
    assert len(supervised(file, digits, longest=6, overlong="skip")) == 1
    [problem] = refused(file, digits, supervised=True, longest=6, limit_option="policy.tokens_per_pack")
    assert "7 tokens; at most 6 fit (policy.tokens_per_pack)" in problem


# --- messages --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [QUESTION], "answer": "It is 3."},
        {"prompt": [QUESTION], "answer": [says("It is 3.")]},
        {"prompt": [QUESTION, says("It is 3.")]},
    ],
)
def test_of_a_chat_the_answer_is_learned_to_the_end_of_its_turn(tmp_path, qwen, row):
    [prompt] = supervised(lines(tmp_path, row), qwen)
    [(context, learned)] = paths(prompt)
    assert qwen.decode(context) == prompt.text
    assert prompt.text.endswith("<|im_start|>assistant\n")
    assert qwen.decode(learned) == "It is 3.<|im_end|>", "the line end behind it is not written by the model"


def test_a_history_before_an_answer_is_only_read(tmp_path, qwen):
    history = conversation("Hi", "Hello", "How much is 1 + 2?")
    [prompt] = supervised(lines(tmp_path, {"prompt": history, "answer": "3"}), qwen)
    assert [qwen.decode(learned) for _, learned in paths(prompt)] == ["3<|im_end|>"]
    assert "Hello" in prompt.text


@pytest.mark.parametrize("turns", [2, 4, 6, 8])
@pytest.mark.parametrize("name", FAMILIES)
def test_each_turn_of_a_conversation_is_learned_behind_what_the_template_writes_before_it(tmp_path, name, turns):
    tokenizer = family_tokenizer(name)
    texts = [f"turn {i} " + "word " * (i % 3) + str(i) for i in range(turns)]
    messages = conversation(*texts)
    row = lines(tmp_path, {"prompt": messages})
    if name == "deepseek_r1":  # it opens an answer with <think>, and shows answers without
        assert "does not write an answer behind what it opens one with" in str(refused(row, tokenizer, supervised=True))
        return
    [prompt] = supervised(row, tokenizer)
    made = paths(prompt)
    assert len(made) == turns // 2
    for i, (context, learned) in enumerate(made):
        at = 2 * i + 1

        def render(count, opens):
            return tokenizer.apply_chat_template(messages[:count], tokenize=False, add_generation_prompt=opens)

        before, whole = render(at, True), render(at + 1, False)
        assert context == tokenizer.encode(before, add_special_tokens=False)
        text, written = tokenizer.decode(learned), whole.removeprefix(before)
        end = "" if text.rstrip() in written else tokenizer.eos_token
        assert text.removesuffix(end).strip() == written.strip()
        assert learned[-1] == tokenizer.eos_token_id or learned[-1] in tokenizer.all_special_ids


def test_a_turn_branches_off_where_the_template_drops_what_came_before(tmp_path):
    tokenizer = family_tokenizer("qwen3")
    messages = [asks("a"), says("<think>\nlong\n</think>\n\nb"), asks("c"), says("<think>\nshort\n</think>\n\nd")]
    [prompt] = supervised(lines(tmp_path, {"prompt": messages}), tokenizer)
    (_, first), (context, second) = paths(prompt)
    assert "long" in tokenizer.decode(first)
    assert "long" not in tokenizer.decode(context), "as the model will see it"
    assert "b" in tokenizer.decode(context)
    assert "short" in tokenizer.decode(second)
    assert demonstrated_sample(prompt, 0).continued_turns == [-1, -1]


def test_a_greeting_is_read_and_a_monologue_refused(tmp_path, qwen):
    [prompt] = supervised(lines(tmp_path, {"prompt": [says("Hi"), asks("a"), says("b")]}), qwen)
    assert [qwen.decode(learned) for _, learned in paths(prompt)] == ["b<|im_end|>"]
    [problem, *_] = refused(lines(tmp_path, {"prompt": [says("a")]}, name="b.jsonl"), qwen, supervised=True)
    assert "answer nobody" in problem


def test_the_system_message_of_the_configuration_is_read(tmp_path, qwen):
    [prompt] = supervised(lines(tmp_path, {"prompt": "a", "answer": "b"}), qwen, system="Be brief.")
    [(context, learned)] = paths(prompt)
    assert "Be brief." in qwen.decode(context)
    assert qwen.decode(learned) == "b<|im_end|>"


def test_a_token_over_the_border_is_not_learned_as_one(tmp_path):
    """After `a ` the model cannot write the token ` b`: its beginning is there already."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.BPE({"a": 0, "b": 1, "Ġ": 2, "Ġb": 3, "<eos>": 4}, [("Ġ", "b")]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>")
    assert tokenizer.encode("a b") == [0, 3]
    [prompt] = supervised(lines(tmp_path, {"prompt": "a ", "answer": "b"}), tokenizer)
    assert (prompt.tokens, prompt.demonstration.tokens.tolist()) == ([0, 2], [1, 4])


def test_a_demonstration_is_stored_as_it_is(tmp_path, qwen):
    [prompt] = supervised(lines(tmp_path, {"prompt": conversation(*"abcdef")}), qwen)
    shown = prompt.demonstration
    again = from_stored(to_stored(shown))
    assert (again.text, again.tokens.tolist()) == (shown.text, shown.tokens.tolist())
    assert [(o.at, o.tokens.tolist(), o.after) for o in again.observations] == [
        (o.at, o.tokens.tolist(), o.after) for o in shown.observations
    ]
    assert json.loads(to_stored(shown))[0] == shown.text
