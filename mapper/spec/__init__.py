"""Text -> Spec: a YAML file read into frozen data in which every key has its place."""

from mapper.spec.bundled import load_spec

__all__ = ["load_spec"]
