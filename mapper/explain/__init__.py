"""Why one name or one message is what it is: which rule, which ranks, which slice, and what is near where nothing fits."""

from mapper.explain.code import CodeExplanation, explain_code
from mapper.explain.name import NameExplanation, explain_name
from mapper.explain.source import SourceExplanation, explain_source
from mapper.explain.target import TargetExplanation, explain_target

__all__ = [
    "CodeExplanation",
    "NameExplanation",
    "SourceExplanation",
    "TargetExplanation",
    "explain_code",
    "explain_name",
    "explain_source",
    "explain_target",
]
