"""The mesh of a runtime on a layout: the axes it adds, and what it makes of redundant experts and placement."""

from __future__ import annotations

from collections.abc import Mapping

from mapper.compiler.names import Names
from mapper.compiler.sizes import require_size
from mapper.diagnostics import MapperError, finding
from mapper.expressions import Value
from mapper.layout import BASE_AXES, Layout, Mesh, Placement, is_axis_size
from mapper.spec.model import Let, Runtime


def mesh_of(section: Runtime, layout: Layout, constants: Mapping[str, Value], lets: Mapping[str, Let]) -> Mesh:
    """Return the mesh; raises MapperError where the layout asks for what the runtime does not have."""
    base = {axis: getattr(layout, axis) for axis in BASE_AXES}
    place = section.mesh.place
    if section.mesh.like == "single" and layout.num_ranks > 1:
        raise MapperError([finding("M328", place=place, runtime=section.name, layout=str(layout))])
    names = Names({**constants, **base, "redundant_experts": layout.redundant_experts}, lets)
    sizes: dict[str, int] = dict(base)
    for axis, expression in section.mesh.axes.items():
        size = names.evaluate(expression, {}, place)
        if not is_axis_size(layout, size):
            expected = "1, or a product of tp and dp"
            what = f"the size of the axis {axis!r}"
            raise MapperError([finding("M304", place=place, what=what, found=size, expected=expected)])
        sizes[axis] = require_size(size, axis, place)
    return Mesh(layout, sizes, _redundant_experts(section, layout, names), _placement(section, layout, names))


def _redundant_experts(section: Runtime, layout: Layout, names: Names) -> int:
    fixed = section.mesh.redundant_experts
    if fixed is None:
        return layout.redundant_experts
    place = section.mesh.place
    given = require_size(names.evaluate(fixed, {}, place), "redundant_experts", place, least=0)
    if given != layout.redundant_experts:
        asked = layout.redundant_experts
        raise MapperError([finding("M332", place=place, asked=asked, runtime=section.name, given=given)])
    return given


def _placement(section: Runtime, layout: Layout, names: Names) -> Placement:
    if layout.placement != "round_robin":
        return layout.placement
    allowed = section.mesh.round_robin
    if allowed is None or not names.evaluate(allowed, {}, section.mesh.place):
        raise MapperError([finding("M333", place=section.mesh.place, asked=layout.placement, runtime=section.name)])
    return layout.placement
