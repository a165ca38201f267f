"""One message of the catalogue: what it says, why it exists and how to fix what it reports."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from mapper.diagnostics import MapperError, finding
from mapper.messages import CATALOGUE
from mapper.messages.suggest import did_you_mean


@dataclass(frozen=True, slots=True)
class CodeExplanation:
    """A message by its code. `text` has a name in braces where a finding puts a value."""

    code: str
    text: str
    why: str
    fix: str

    def to_json(self) -> dict[str, object]:
        """Return the explanation as an object for JSON."""
        return asdict(self)

    def to_text(self) -> str:
        """Return the explanation for a person."""
        return f"{self.code}: {self.text}\n  why  {self.why}\n  fix  {self.fix}"


def explain_code(code: str) -> CodeExplanation:
    """Return what a message is about; raises MapperError M915 for a code that does not exist.

    >>> explain_code('M305').fix
    'Choose one of the runtimes listed.'
    """
    message = CATALOGUE.get(code)
    if message is None:
        hint = did_you_mean(code, CATALOGUE)
        raise MapperError([finding("M915", subject=code, hint=hint, name=code, first=min(CATALOGUE), last=max(CATALOGUE))])
    return CodeExplanation(code, _shown(message.template), _shown(message.why), _shown(message.fix))


def _shown(text: str) -> str:
    """Return a catalogue text without the marks that only formatting reads."""
    return text.replace("!r}", "}").replace("{{", "{").replace("}}", "}")
