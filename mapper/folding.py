"""Texts that differ only in numbers as one text: `layers.0.mlp`, ..., `layers.60.mlp` as `layers.{0...60}.mlp`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, product

DIGITS = frozenset("0123456789")
MAX_DIGITS = 18
"""Longer runs of digits are hashes or dates, not indices, and stay part of a word."""

Words = tuple[str, ...]
Numbers = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fold:
    """Every text that has `words` around one number of each of `choices`; there is one word more than choices."""

    words: Words
    choices: tuple[Numbers, ...]

    @property
    def num_texts(self) -> int:
        count = 1
        for numbers in self.choices:
            count *= len(numbers)
        return count

    def __str__(self) -> str:
        spelled = [str(numbers[0]) if len(numbers) == 1 else f"{{{runs(numbers)}}}" for numbers in self.choices]
        return "".join(chain.from_iterable(zip(self.words, [*spelled, ""], strict=True)))


def fold(texts: Iterable[str]) -> tuple[Fold, ...]:
    """Return folds that together stand for exactly the texts, each once, in the order in which the texts first appear.

    >>> [str(each) for each in fold(['w.0.a', 'w.1.a', 'w.3.a', 'b'])]
    ['w.{0, 1, 3}.a', 'b']
    """
    groups: dict[Words, dict[Numbers, None]] = {}
    for text in texts:
        words, numbers = split(text)
        groups.setdefault(words, {})[numbers] = None
    return tuple(Fold(words, choices) for words, members in groups.items() for choices in _products(list(members)))


def unfold(folds: Iterable[Fold]) -> Iterator[str]:
    """Yield every text that the folds stand for.

    >>> list(unfold(fold(['a.0', 'a.1'])))
    ['a.0', 'a.1']
    """
    for each in folds:
        for numbers in product(*each.choices):
            yield "".join(chain.from_iterable(zip(each.words, [*map(str, numbers), ""], strict=True)))


def split(text: str) -> tuple[Words, Numbers]:
    """Return the words around the numbers of a text, and the numbers; digits that start with a 0 stay part of a word.

    >>> split('layers.12.w1-00003')
    (('layers.', '.w', '-00003'), (12, 1))
    """
    words: list[str] = []
    numbers: list[int] = []
    start = position = 0
    while position < len(text):
        if text[position] not in DIGITS:
            position += 1
            continue
        end = position
        while end < len(text) and text[end] in DIGITS:
            end += 1
        if end == position + 1 or (text[position] != "0" and end - position <= MAX_DIGITS):
            words.append(text[start:position])
            numbers.append(int(text[position:end]))
            start = end
        position = end
    return (*words, text[start:]), tuple(numbers)


def runs(numbers: Iterable[int], *, through: str = "...") -> str:
    """Return numbers as runs; `through` stands between the first and the last of a run of three or more.

    >>> runs([0, 1, 2, 3, 7, 8]), runs(range(16), through='-')
    ('0...3, 7, 8', '0-15')
    """
    spelled: list[str] = []
    run: list[int] = []
    for number in [*sorted(set(numbers)), None]:
        if run and number != run[-1] + 1:
            spelled += [f"{run[0]}{through}{run[-1]}"] if len(run) > 2 else [str(each) for each in run]
            run = []
        if number is not None:
            run.append(number)
    return ", ".join(spelled)


def _products(members: Sequence[Numbers]) -> Iterator[tuple[Numbers, ...]]:
    """Yield sets of numbers per position whose products hold exactly the members, each once."""
    if not members[0]:
        yield ()
        return
    by_rest: dict[Numbers, list[int]] = {}
    for *rest, last in members:
        by_rest.setdefault(tuple(rest), []).append(last)
    by_lasts: dict[Numbers, list[Numbers]] = {}
    for outer, lasts in by_rest.items():
        by_lasts.setdefault(tuple(sorted(lasts)), []).append(outer)
    for choices, outers in by_lasts.items():
        yield from ((*others, choices) for others in _products(outers))
