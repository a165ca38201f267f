"""Specs from text, as tests write them."""

from __future__ import annotations

import tempfile
import textwrap
from pathlib import Path

from mapper import load_spec
from mapper.spec.model import Spec

HEAD = """\
spec: 1
id: {id}
title: A spec of a test
version: 0.1.0
architectures: [Tested]
"""


def spec_from(text: str, *, id: str = "tested") -> Spec:
    """Return the checked spec of a text that leaves out the head; raises MapperError.

    >>> spec_from('runtimes: {plain: {rules: [{copy: [a]}]}}').id
    'tested'
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{id}.yaml"
        path.write_text(HEAD.format(id=id) + textwrap.dedent(text))
        return load_spec(path)
