"""The tokenizer of a GGUF file, in the form that transformers loads.

A file holds a vocabulary, its scores or merges, flags, and the name of a rule that cuts texts before merging. A name that
is not known here is refused: with another rule, the model reads other tokens than it was trained on.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.tools.imports.gguf_architectures import ORIGINAL, Facts, refuse_left
from launch.tools.imports.trained_directory import one_line
from rlsys.errors import ConfigError

SPACE = "▁"
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # types of tokens that are found in a text before it is cut


@dataclass(frozen=True)
class Cut:
    """Patterns, each of which isolates what it finds in the pieces that the one before has left."""

    patterns: tuple[str, ...]
    words_whole: bool = False  # a piece that is a token becomes that token, even if no merges lead there
    adds_bos: bool = False  # where the file says nothing


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
CUTS = {
    "gpt-2": Cut((GPT2,)),
    "smollm": Cut((r"\p{N}", GPT2)),
    "starcoder": Cut((r"\p{N}", GPT2)),
    "deepseek-coder": Cut((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    "qwen2": Cut((QWEN2,)),
    "deepseek-r1-qwen": Cut((QWEN2,)),
    "smaug-bpe": Cut((LLAMA3,)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3"), Cut((LLAMA3,), words_whole=True, adds_bos=True)),
}

WITHOUT_EFFECT = (  # on the tokens of a text
    *("ggml.seperator_token_id", "ggml.cls_token_id", "ggml.mask_token_id"),
    *(f"ggml.fim_{part}_token_id" for part in ("pre", "suf", "mid", "pad", "rep", "sep")),
    *("ggml.prefix_token_id", "ggml.suffix_token_id", "ggml.middle_token_id"),
    "chat_templates",  # names of further templates
)
ONLY_FALSE = ("ggml.add_sep_token", "ggml.remove_extra_whitespaces")


@dataclass(frozen=True)
class Vocabulary:
    """What a file says of its tokenizer."""

    tokens: list[str]
    types: list[int]
    scores: list[float]  # of sentencepiece: the pair with the highest is merged first
    merges: list[str]  # of byte-level BPE: the first is merged first
    cut: Cut | None  # None: sentencepiece
    space_prefix: bool
    bos: int | None
    eos: int | None
    unk: int | None
    pad: int | None
    ends: list[int]  # further tokens that end a turn
    add_bos: bool
    add_eos: bool
    chat_template: str | None

    @property
    def whole(self) -> list[int]:
        """Tokens that are found in a text before it is cut."""
        return [i for i, kind in enumerate(self.types) if kind in (UNKNOWN, CONTROL, USER_DEFINED) and self.tokens[i]]


def read_vocabulary(facts: Facts) -> Vocabulary:
    keys = {k.removeprefix("tokenizer."): value for k, value in facts.items() if k.startswith("tokenizer.")}
    tokens = keys.pop("ggml.tokens", [])
    cut = read_cut(keys)
    is_gemma = facts["general.architecture"].startswith("gemma")  # old files of Gemma do not say that it has no prefix
    add_bos = keys.pop("ggml.add_bos_token", cut.adds_bos if cut else True)
    defaults = {} if cut else {"bos": 1, "eos": 2, "unknown": 0}  # llama.cpp's for sentencepiece
    ids = {name: keys.pop(f"ggml.{name}_token_id", defaults.get(name)) for name in ("bos", "eos", "unknown", "padding")}
    vocabulary = Vocabulary(
        tokens=tokens,
        types=keys.pop("ggml.token_type", [1] * len(tokens)),
        scores=keys.pop("ggml.scores", []),
        merges=keys.pop("ggml.merges", []),
        cut=cut,
        space_prefix=keys.pop("ggml.add_space_prefix", cut is None and not is_gemma),
        bos=ids["bos"],
        eos=ids["eos"],
        unk=ids["unknown"],
        pad=ids["padding"],
        ends=[keys.pop(name) for name in ("ggml.eot_token_id", "ggml.eom_token_id") if name in keys],
        add_bos=add_bos,
        add_eos=keys.pop("ggml.add_eos_token", False),
        chat_template=keys.pop("chat_template", None),
    )
    left = {
        f"tokenizer.{key}": value
        for key, value in keys.items()
        if not (key in WITHOUT_EFFECT or key.startswith("chat_template.") or (key in ONLY_FALSE and value is False))
    }
    refuse_left(left)
    require_whole(vocabulary)
    return vocabulary


def read_cut(keys: Facts) -> Cut | None:
    kind, name = keys.pop("ggml.model", None), keys.pop("ggml.pre", None)
    if kind == "llama":
        if name not in (None, "default"):
            refuse_left({"tokenizer.ggml.pre": name})
        return None
    if kind != "gpt2":
        raise ConfigError(f"tokenizer.ggml.model is {kind}; llama and gpt2 can be imported. {ORIGINAL}")
    if name not in CUTS:
        raise ConfigError(
            f"tokenizer.ggml.pre is {name or 'missing'}, so it is not known how a text is cut into words. Known are "
            f"{', '.join(CUTS)}. {ORIGINAL}"
        )
    return CUTS[name]


def require_whole(vocabulary: Vocabulary) -> None:
    count = len(vocabulary.tokens)
    if len(set(vocabulary.tokens)) != count:
        twice = next(t for i, t in enumerate(vocabulary.tokens) if vocabulary.tokens.index(t) < i)
        raise ConfigError(f"tokenizer.ggml.tokens has {twice!r} more than once, so its number is not known. {ORIGINAL}")
    lengths = {"token_type": len(vocabulary.types)}
    if not vocabulary.cut:
        lengths["scores"] = len(vocabulary.scores)
    for name, length in lengths.items():
        if length != count:
            raise ConfigError(f"tokenizer.ggml.{name} has {length} entries for {count} tokens. The file is damaged.")
    ids = {"bos": vocabulary.bos, "eos": vocabulary.eos, "unknown": vocabulary.unk, "padding": vocabulary.pad}
    for name, number in ids.items():
        if number is not None and number >= count:
            raise ConfigError(f"tokenizer.ggml.{name}_token_id is {number}, and the file has {count} tokens.")
    for name, wanted, number in (
        ("bos", vocabulary.add_bos, vocabulary.bos),
        ("eos", vocabulary.add_eos, vocabulary.eos),
    ):
        if wanted and number is None:
            raise ConfigError(
                f"Texts should have the {name.upper()} token, and tokenizer.ggml.{name}_token_id is missing."
            )
    if vocabulary.cut and vocabulary.space_prefix:
        refuse_left({"tokenizer.ggml.add_space_prefix": True})


def write_tokenizer(vocabulary: Vocabulary, folder: Path) -> None:
    from tokenizers import AddedToken, processors
    from transformers import PreTrainedTokenizerFast

    try:
        backend = byte_level(vocabulary) if vocabulary.cut else sentencepiece(vocabulary)
    except Exception as error:  # tokenizers raises its errors as plain exceptions
        raise ConfigError(f"The file's tokenizer cannot be built: {one_line(error)} {ORIGINAL}") from None
    names = {"bos": vocabulary.bos, "eos": vocabulary.eos, "unk": vocabulary.unk, "pad": vocabulary.pad}
    for i in vocabulary.whole:
        special = vocabulary.types[i] != USER_DEFINED
        token = AddedToken(vocabulary.tokens[i], normalized=False, special=special)
        (backend.add_special_tokens if special else backend.add_tokens)([token])
    bos, eos = (
        [vocabulary.tokens[number]] if wanted and number is not None else []
        for wanted, number in ((vocabulary.add_bos, vocabulary.bos), (vocabulary.add_eos, vocabulary.eos))
    )
    if bos or eos:
        backend.post_processor = processors.TemplateProcessing(
            single=[*bos, "$A", *eos],
            pair=[*bos, "$A", *eos, *bos, "$B", *eos],
            special_tokens=[(token, backend.token_to_id(token)) for token in {*bos, *eos}],
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        **{f"{name}_token": vocabulary.tokens[i] for name, i in names.items() if i is not None},
    )
    tokenizer.chat_template = vocabulary.chat_template
    tokenizer.save_pretrained(folder)


def byte_level(vocabulary: Vocabulary) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    assert vocabulary.cut
    backend = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(vocabulary.tokens)},
            merges=[split_merge(merge) for merge in vocabulary.merges],
            ignore_merges=vocabulary.cut.words_whole,
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in vocabulary.cut.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def split_merge(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def sentencepiece(vocabulary: Vocabulary) -> Any:
    """Merges of BPE that choose as scores do: of all pairs that are a token together, the one with the highest score."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    ranked = sorted(range(len(ids)), key=lambda i: -vocabulary.scores[i])
    merges = [
        (token[:cut], token[cut:])
        for token in (vocabulary.tokens[i] for i in ranked)
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    ]
    backend = Tokenizer(
        models.BPE(
            vocab=ids,
            merges=merges,
            unk_token=None if vocabulary.unk is None else vocabulary.tokens[vocabulary.unk],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", SPACE)
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if vocabulary.space_prefix else spaces
    )
    backend.decoder = decoders.Sequence(
        [
            *(decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()),
            *([decoders.Strip(" ", 1, 0)] if vocabulary.space_prefix else []),
        ]
    )
    return backend
