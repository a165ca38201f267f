"""The schema of a spec's text: `spec.schema.json`, and the check of a node tree against it."""

from mapper.schema.validate import SCHEMA_FILE, load_schema, validate

__all__ = ["SCHEMA_FILE", "load_schema", "validate"]
