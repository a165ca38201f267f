"""The outcome of a run for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mapper.bench.run import Measured, Outcome

HEAD = ("loader", "seconds", "CPU s", "ratio", "bar", "read MB", "peak MB")


def table(outcomes: Sequence[Outcome], plan: Mapping[str, float]) -> str:
    """Return the table of all rows; a ratio says how many times longer a loader took than mapper."""
    lines = [
        f"plan of DeepSeek-V3 from its headers ({plan['tensors']:,.0f} tensors): one rank {plan['one_rank_seconds']:.3f} s "
        f"({plan['one_rank_microseconds_per_name']:.2f} us a name, compiling included), {plan['ranks']:.0f} ranks "
        f"{plan['all_ranks_seconds']:.2f} s; one name of a stream {plan['stream_microseconds_per_name']:.2f} us"
    ] if plan else []  # fmt: skip
    for outcome in outcomes:
        rows = [HEAD, _line(outcome, outcome.ours, "")]
        rows += [_line(outcome, each, f">= {outcome.row.bar:g}" if outcome.row.bar else "") for each in outcome.others]
        if outcome.floor is not None:
            bar = f">= {1 / outcome.row.floor_bar:.2f}" if outcome.row.floor_bar else ""
            rows.append(_line(outcome, outcome.floor, bar))
        widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
        lines += ["", f"{outcome.row.name} ({outcome.row.input}, {outcome.row.layout})"]
        lines += ["  " + "  ".join(_padded(row, widths)) for row in rows]
        lines += [f"  {each.peer.words}: absent, {each.absent}" for each in (outcome.ours, *outcome.others) if each.absent]
    return "\n".join(lines)


def _line(outcome: Outcome, measured: Measured, bar: str) -> tuple[str, ...]:
    if not measured.samples:
        return (measured.peer.words, "-", "-", "-", bar, "-", "-")
    ratio = outcome.ratio(measured)
    return (
        measured.peer.words,
        f"{measured.seconds:.3f}",
        f"{measured.cpu_seconds:.3f}",
        "-" if ratio is None else f"{ratio:.2f}",
        bar,
        f"{measured.bytes_read / 1e6:.0f}",
        f"{measured.peak_anonymous / 1e6:.0f}",
    )


def _padded(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [row[0].ljust(widths[0]), *(text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=True))]
