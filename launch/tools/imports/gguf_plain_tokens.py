"""The tokens of a text by a GGUF file's vocabulary, the plain and slow way, to compare a written tokenizer with.

It merges pair by pair, as llama.cpp does, with no table but the file's own.
"""

import re
from collections.abc import Callable, Iterable
from functools import cached_property
from itertools import pairwise

from launch.tools.imports.gguf_tokenizer import SPACE, Vocabulary, split_merge


class PlainTokenizer:
    def __init__(self, vocabulary: Vocabulary) -> None:
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        self.vocabulary = vocabulary
        self.ids = {token: i for i, token in enumerate(vocabulary.tokens)}
        self.spelling: dict[int, str] = bytes_to_unicode()

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = []
        for i, part in enumerate(self.whole.split(text)):
            if i % 2:
                ids.append(self.ids[part])
            elif part:
                ids += self.byte_level(part) if self.vocabulary.cut else self.sentencepiece(part)
        return [*self.begin, *ids, *self.end]

    @property
    def begin(self) -> list[int]:
        return [self.vocabulary.bos] if self.vocabulary.add_bos and self.vocabulary.bos is not None else []

    @property
    def end(self) -> list[int]:
        return [self.vocabulary.eos] if self.vocabulary.add_eos and self.vocabulary.eos is not None else []

    @cached_property
    def whole(self) -> re.Pattern[str]:
        tokens = sorted((self.vocabulary.tokens[i] for i in self.vocabulary.whole), key=len, reverse=True)
        return re.compile("(" + "|".join(map(re.escape, tokens)) + ")" if tokens else "(?!)()")

    def sentencepiece(self, text: str) -> list[int]:
        symbols = list((" " + text if self.vocabulary.space_prefix else text).replace(" ", SPACE))
        symbols = merge_all(
            symbols, lambda a, b: -self.vocabulary.scores[self.ids[a + b]] if a + b in self.ids else None
        )
        ids: list[int | None] = []
        for symbol in symbols:
            if symbol in self.ids:
                ids.append(self.ids[symbol])
                continue
            as_bytes = [self.ids.get(f"<0x{byte:02X}>") for byte in symbol.encode()]
            ids += as_bytes if None not in as_bytes else [self.vocabulary.unk] * (ids[-1:] != [self.vocabulary.unk])
        return [i for i in ids if i is not None]

    def byte_level(self, text: str) -> list[int]:
        assert self.vocabulary.cut
        pieces = [text]
        for pattern in self.vocabulary.cut.patterns:
            pieces = cut_pieces(pattern, pieces)
        ids: list[int] = []
        for piece in pieces:
            word = "".join(self.spelling[byte] for byte in piece.encode())
            if self.vocabulary.cut.words_whole and word in self.ids:
                ids.append(self.ids[word])
            else:
                symbols = merge_all(list(word), lambda a, b: self.ranks.get((a, b)))
                ids += [self.ids[symbol] for symbol in symbols if symbol in self.ids]
        return ids

    def spell(self, ids: Iterable[int]) -> str:
        """["▁a", "b"] -> " ab", without bytes that are no text"""
        joined = "".join(self.vocabulary.tokens[i] for i in ids)
        if not self.vocabulary.cut:
            return joined.replace(SPACE, " ")
        bytes_of = {character: byte for byte, character in self.spelling.items()}
        return bytes(bytes_of[c] for c in joined if c in bytes_of).decode(errors="ignore")

    @cached_property
    def ranks(self) -> dict[tuple[str, str], int]:
        ranks: dict[tuple[str, str], int] = {}
        for rank, merge in enumerate(self.vocabulary.merges):
            ranks.setdefault(split_merge(merge), rank)
        return ranks


def cut_pieces(pattern: str, pieces: list[str]) -> list[str]:
    """Isolates what the pattern finds in each piece."""
    import regex

    cut: list[str] = []
    for piece in pieces:
        end = 0
        for found in regex.finditer(pattern, piece):
            cut += [piece[end : found.start()], found[0]]
            end = found.end()
        cut.append(piece[end:])
    return [piece for piece in cut if piece]


def merge_all(symbols: list[str], rank: Callable[[str, str], float | None]) -> list[str]:
    """Joins the pair with the lowest rank, of equals the first one, until no pair has a rank."""
    while True:
        ranks = [rank(a, b) for a, b in pairwise(symbols)]
        if all(each is None for each in ranks):
            return symbols
        i = min((i for i, each in enumerate(ranks) if each is not None), key=lambda i: (ranks[i], i))
        symbols = [*symbols[:i], symbols[i] + symbols[i + 1], *symbols[i + 2 :]]
