"""Views of an axis: any slice of the target is what the whole, rearranged, has there."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mapper.plan.weave import Strand, Weave, radix_boxes
from mapper.regions import volume, whole
from mapper.transfer.copy import copy_box

SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)


def gathered(sizes, order):
    """Return the strand of a source whose factors `sizes` the target has in another order."""
    full = whole(sizes)
    turned = tuple(sizes[position] for position in order)
    return Strand(None, 0, 0, sizes, order, tuple(full[position] for position in order), 0, turned, whole(turned))


def filled(strands, sources, start, stop, offset=0):
    """Return target[start:stop] as the strands fill it from the sources of each part."""
    target = torch.full((stop - start,), -1.0)
    for strand in strands:
        source = sources[0 if strand.part is None else strand.part]
        for (low, high), (begin, end), weave in strand.threads(start, stop):
            own = source[strand.own_start + low : strand.own_start + high]
            copy_box(target, ((begin - start, end - start),), own, weaves=(weave,) if weave else ())
    return target


@given(st.data(), SIZES)
def test_a_run_is_at_most_two_boxes_a_factor_less_one(data, sizes):
    total = volume(whole(sizes))
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    boxes = list(radix_boxes(start, stop, sizes))
    assert len(boxes) <= 2 * len(sizes) - 1
    numbers = torch.arange(total).reshape(sizes)
    found = [numbers[tuple(slice(*each) for each in box)].flatten() for box in boxes]
    assert torch.cat([torch.empty(0, dtype=torch.int64), *found]).tolist() == list(range(start, stop))


@given(st.data(), SIZES)
def test_a_slice_of_a_view_is_the_view_of_the_whole_cut(data, sizes):
    order = tuple(data.draw(st.permutations(range(len(sizes)))))
    source = torch.arange(float(volume(whole(sizes))))
    expected = source.reshape(sizes).permute(order).flatten()
    start = data.draw(st.integers(0, len(source)))
    stop = data.draw(st.integers(start, len(source)))
    assert torch.equal(filled([gathered(sizes, order)], [source], start, stop), expected[start:stop])


@given(st.data(), SIZES, st.integers(2, 3))
def test_a_slice_of_a_repetition_is_the_repetition_cut(data, sizes, times):
    where = data.draw(st.integers(0, len(sizes)))
    source = torch.arange(float(volume(whole(sizes))))
    expanded = source.reshape(*sizes[:where], 1, *sizes[where:]).expand(*sizes[:where], times, *sizes[where:])
    expected = expanded.flatten()
    order = (*range(where), len(sizes), *range(where, len(sizes)))
    turned = (*sizes[:where], times, *sizes[where:])
    box = tuple((0, 1) if position == len(sizes) else (0, sizes[position]) for position in order)
    strand = Strand(None, 0, 0, (*sizes, 1), order, box, 0, turned, whole(turned))
    start = data.draw(st.integers(0, len(expected)))
    stop = data.draw(st.integers(start, len(expected)))
    assert torch.equal(filled([strand], [source], start, stop), expected[start:stop])


@given(st.data(), st.integers(1, 4), st.lists(st.integers(1, 3), min_size=2, max_size=4), st.integers(1, 3))
def test_parts_of_different_length_are_interleaved_in_whole_blocks(data, groups, slots, width):
    """Each part has its own source; the target has, group by group, the slots of every part."""
    sources, strands, start = [], [], 0
    block = sum(slots)
    for part, slot in enumerate(slots):
        at = sum(slots[:part])
        sources.append(torch.arange(float(groups * slot * width)) + 1000 * part)
        own, taken = (groups, slot, width), ((0, groups), (at, at + slot), (0, width))
        strands.append(Strand(part, start, 0, own, (0, 1, 2), whole(own), 0, (groups, block, width), taken))
        start += groups * slot * width
    shaped = [source.reshape(groups, -1, width) for source in sources]
    expected = torch.cat(shaped, dim=1).flatten()
    first = data.draw(st.integers(0, groups))
    last = data.draw(st.integers(first, groups))
    run = (first * block * width, last * block * width)
    assert all(strand.block == block * width for strand in strands)
    assert torch.equal(filled(strands, sources, *run), expected[slice(*run)])


@settings(max_examples=50)
@given(st.data(), SIZES)
def test_what_is_read_and_written_are_the_intervals_of_a_weave(data, sizes):
    order = tuple(data.draw(st.permutations(range(len(sizes)))))
    box = []
    for position in order:
        low = data.draw(st.integers(0, sizes[position] - 1))
        box.append((low, data.draw(st.integers(low + 1, sizes[position]))))
    weave = Weave(
        sizes, order, tuple(box), tuple(stop - start for start, stop in box), whole(stop - start for start, stop in box)
    )
    numbers = torch.arange(volume(whole(sizes))).reshape(sizes).permute(order)
    taken = sorted(numbers[tuple(slice(*each) for each in box)].flatten().tolist())
    read = [place for start, stop in weave.read() for place in range(start, stop)]
    assert read == taken
    assert (weave.num_read, weave.read_span) == (len(taken), (taken[0], taken[-1] + 1))
    assert weave.written() == [(0, weave.num_written)]


def test_a_run_that_lies_as_it_should_needs_no_weave():
    strand = gathered((2, 3, 4), (1, 0, 2))
    assert list(strand.threads(0, 4)) == [((0, 4), (0, 4), None)]
    assert list(strand.threads(2, 4)) == [((2, 4), (2, 4), None)]
    ((source, target, weave),) = strand.threads(0, 8)
    assert (source, target, weave is None) == ((0, 24), (0, 8), False)
