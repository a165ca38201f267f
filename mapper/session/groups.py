"""Which tensors must travel together: values and the scales that they are multiplied by."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product

from mapper.compiler import Program
from mapper.compiler.resolve import Claim


def groups(program: Program) -> tuple[tuple[str, ...], ...]:
    """Return the names of every pair of sources that one write needs, on any rank; pairs that share a name are one group."""
    known: dict[str, list[str]] = {}
    for pair in _pairs(program):
        members = list(dict.fromkeys(each for name in pair for each in known.get(name, [name])))
        known.update(dict.fromkeys(members, members))
    return tuple(tuple(each) for each in {id(members): members for members in known.values()}.values())


def partners(claims: Iterable[Claim]) -> Iterator[str]:
    """Yield the tensors that a source waits for, as its claims have it."""
    for claim in claims:
        sources = claim.family.alternatives[claim.alternative]
        if claim.source.scale_of is not None:
            yield sources[claim.source.scale_of].template.name(claim.bindings)
        yield from (each.template.name(claim.bindings) for each in sources if each.scale_of == claim.position)


def _pairs(program: Program) -> Iterator[tuple[str, str]]:
    for family in program.families:
        for alternative in family.alternatives:
            for scale in alternative:
                if scale.scale_of is not None:
                    values = alternative[scale.scale_of]
                    indices = values.template.indices
                    for combination in product(*(values.domains[index] for index in indices)):
                        fixed = dict(zip(indices, combination, strict=True))
                        yield values.template.name(fixed), scale.template.name(fixed)
