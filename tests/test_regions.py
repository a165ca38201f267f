from math import prod

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mapper.regions import Box, contains, difference, intersection, shape_of, spell, tiling_faults, uncovered, volume, whole

THOROUGH = settings(max_examples=3 * settings().max_examples, deadline=None)
SHAPES = st.lists(st.integers(0, 5), min_size=0, max_size=4).map(tuple)
Counts = npt.NDArray[np.int64]


def boxes_in(shape: tuple[int, ...], beyond: int = 0) -> st.SearchStrategy[Box]:
    """Boxes with 0 <= start <= stop <= size + beyond, empty ones too."""
    intervals = (st.tuples(st.integers(0, size + beyond), st.integers(0, size + beyond)).map(sorted) for size in shape)
    return st.tuples(*(each.map(lambda pair: (pair[0], pair[1])) for each in intervals))


@st.composite
def shapes_and_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    shape = draw(SHAPES)
    return shape, draw(st.lists(boxes_in(shape), max_size=5))


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape cut in two again and again; the boxes tile it, in any order."""
    shape = draw(SHAPES)
    boxes = [whole(shape)]
    for _ in range(draw(st.integers(0, 6)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        start, stop = box[axis]
        middle = draw(st.integers(start, stop))
        boxes += [(*box[:axis], part, *box[axis + 1 :]) for part in ((start, middle), (middle, stop))]
    return shape, draw(st.permutations(boxes))


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def counted(shape: tuple[int, ...], boxes: list[Box]) -> Counts:
    counts: Counts = np.zeros(shape, dtype=np.int64)
    for box in boxes:
        counts[slices(box)] += 1
    return counts


@THOROUGH
@given(shapes_and_boxes() | tilings())
def test_boxes_tile_exactly_when_every_element_is_counted_once(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = case
    counts = counted(shape, boxes)
    faults = tiling_faults(shape, boxes)
    assert bool(faults) == bool((counts != 1).any())
    assert faults.outside == ()


@THOROUGH
@given(shapes_and_boxes())
def test_gaps_and_overlaps_name_the_elements_that_are_not_counted_once(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = case
    counts = counted(shape, boxes)
    faults = tiling_faults(shape, boxes)
    assert (counted(shape, list(faults.gaps)) == (counts == 0)).all()
    pairs = [(first, second) for first, second, _ in faults.overlaps]
    assert len(set(pairs)) == len(pairs)
    for first, second, box in faults.overlaps:
        assert first < second
        assert (counted(shape, [box]) == (counted(shape, [boxes[first]]) & counted(shape, [boxes[second]]))).all()
    # An element in n boxes is in n * (n - 1) / 2 pairs of boxes.
    assert (counted(shape, [box for *_, box in faults.overlaps]) == counts * (counts - 1) // 2).all()


@given(st.data(), SHAPES.filter(bool))
def test_outside_names_the_boxes_with_an_element_that_the_tensor_has_not(data: st.DataObject, shape: tuple[int, ...]) -> None:
    boxes = data.draw(st.lists(boxes_in(shape, beyond=2), max_size=4))
    larger = tuple(size + 2 for size in shape)
    inside = counted(larger, [whole(shape)])
    expected = tuple(p for p, box in enumerate(boxes) if (counted(larger, [box]) > inside).any())
    assert tiling_faults(shape, boxes).outside == expected


@THOROUGH
@given(st.data(), SHAPES)
def test_box_algebra_equals_masks(data: st.DataObject, shape: tuple[int, ...]) -> None:
    first, second = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    covers = data.draw(st.lists(boxes_in(shape), max_size=4))
    a, b = counted(shape, [first]), counted(shape, [second])
    assert (volume(first), shape_of(first)) == (a.sum(), a[slices(first)].shape)
    assert contains(first, second) == bool((b <= a).all())
    shared = intersection(first, second)
    assert (shared is not None) == bool((a & b).any())
    assert (counted(shape, [shared] if shared is not None else []) == (a & b)).all()
    # Sums, not unions: the boxes must be disjoint too.
    assert (counted(shape, difference(first, second)) == (a & (1 - b))).all()
    assert (counted(shape, uncovered(first, covers)) == (a & (counted(shape, covers) == 0))).all()
    assert all(volume(box) for box in (*difference(first, second), *uncovered(first, covers)))


@given(SHAPES)
def test_whole_is_every_element(shape: tuple[int, ...]) -> None:
    assert volume(whole(shape)) == prod(shape) == np.zeros(shape).size


@given(st.data(), SHAPES)
def test_spelled_box_is_the_index_that_numpy_reads(data: st.DataObject, shape: tuple[int, ...]) -> None:
    box = data.draw(boxes_in(shape))
    array = np.arange(prod(shape)).reshape(shape)
    read: Counts = eval(f"array{spell(box)}", {"array": array}) if box else array
    assert read.ravel().tolist() == array[slices(box)].ravel().tolist()


def test_tensor_without_axes_is_covered_by_its_only_box_once() -> None:
    assert not tiling_faults((), [()])
    assert tiling_faults((), []).gaps == ((),)
    assert tiling_faults((), [(), ()]).overlaps == ((0, 1, ()),)


def test_empty_tensor_needs_no_box_and_bears_any_empty_one() -> None:
    assert not tiling_faults((3, 0), [])
    assert not tiling_faults((3, 0), [((0, 3), (0, 0)), ((0, 3), (0, 0))])


def test_box_beyond_the_end_is_outside_although_the_elements_count_up() -> None:
    faults = tiling_faults((4,), [((0, 3),), ((4, 5),)])
    assert (faults.outside, faults.gaps, faults.overlaps) == ((1,), (((3, 4),),), ())


def test_empty_box_beyond_the_end_is_not_outside() -> None:
    assert not tiling_faults((4,), [((0, 4),), ((6, 6),)])


@pytest.mark.parametrize(
    ("box", "text"), [((), "[]"), (((9, 10), (0, 2048)), "[9, 0:2048]"), (((3, 3),), "[3:3]"), (((0, 1),), "[0]")]
)
def test_spelling(box: Box, text: str) -> None:
    assert spell(box) == text
