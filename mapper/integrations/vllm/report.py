"""The account of one load inside an engine: what was proved, what was left to the engine's own loader, and why."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mapper.expressions import Value
from mapper.report.load import LoadReport


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """What became of every parameter of one process's model.

    `parameters` says proved, kept or delegated by name; a delegated parameter is never proved. `why` gives the reason per
    delegated parameter, `fell_back` that of a load left to vLLM whole. `unconfirmed` are delegated parameters that vLLM's
    own loader does not name among those it has loaded.
    """

    vllm: str
    architectures: tuple[str, ...]
    spec: str | None = None
    runtime: str | None = None
    layout: str
    rank: int
    options: Mapping[str, Value] = field(default_factory=dict)
    parameters: Mapping[str, str]
    why: Mapping[str, str] = field(default_factory=dict)
    fell_back: str | None = None
    handed_over: int | None = 0
    unconfirmed: tuple[str, ...] = ()
    load: LoadReport | None = None

    @property
    def counts(self) -> Mapping[str, int]:
        """How many parameters are proved, kept and delegated."""
        counted = Counter(self.parameters.values())
        return {word: counted[word] for word in ("proved", "kept", "delegated")}

    def to_json(self) -> dict[str, object]:
        """Return the report as an object for JSON."""
        return {
            "vllm": self.vllm,
            "architectures": list(self.architectures),
            "spec": self.spec,
            "runtime": self.runtime,
            "layout": self.layout,
            "rank": self.rank,
            "options": dict(self.options),
            **self.counts,
            "fell_back": self.fell_back,
            "handed_over": self.handed_over,
            "unconfirmed": list(self.unconfirmed),
            "load": None if self.load is None else self.load.to_json(),
            "parameters": dict(self.parameters),
            "why": dict(self.why),
        }

    def to_text(self) -> str:
        """Return the report for a log, one line and one more for what is not proved."""
        counts = self.counts
        start = f"mapper: rank {self.rank} of {self.layout}, "
        if self.fell_back is not None:
            return f"{start}all {counts['delegated']:,} parameters left to vLLM's own loader: {self.fell_back}"
        assert self.load is not None
        text = (
            f"{start}{self.spec} {self.runtime}: {counts['proved']:,} parameters proved, {counts['kept']:,} kept, "
            f"{counts['delegated']:,} delegated; {self.load.bytes_read:,} bytes read in {self.load.seconds:.2f} s"
        )
        if counts["delegated"]:
            name, why = next(iter(self.why.items()))
            text += f"\n  left to vLLM's own loader, not proved: {counts['delegated']:,}, the first {name!r} because {why}"
        if self.unconfirmed:
            text += f"\n  not among those that vLLM's loader says it loaded: {', '.join(self.unconfirmed[:5])}"
        return text

    def write(self, path: str) -> Path:
        """Write the report as JSON; `{rank}` and `{runtime}` in the path stand for this process's, else they are added.

        They are added before the suffix where several processes, or a draft beside its target, would write the same file.
        """
        runtime = self.runtime or "vllm"
        target = Path(path.replace("{rank}", str(self.rank)).replace("{runtime}", runtime))
        if "{runtime}" not in path and runtime != "vllm":
            target = target.with_stem(f"{target.stem}.{runtime}")
        if "{rank}" not in path and self.rank:
            target = target.with_stem(f"{target.stem}.rank{self.rank}")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")
        return target
