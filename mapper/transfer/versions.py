"""The versions of an engine that a runtime is for, against the one that a model is of."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Mapping

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version
from torch import nn

from mapper.compiler import Program
from mapper.diagnostics import MapperError, finding


def require_versions(program: Program, found: Mapping[str, str]) -> None:
    """Compare the versions found, by package, with those that the program's runtime is for; raises MapperError M604.

    A package that the runtime says nothing about may have any version. Pre-releases and local builds are ordered as PEP 440
    orders them; what is no version at all is in no range.
    """
    stated = program.spec.runtimes[program.runtime].versions
    findings = [
        finding(
            "M604",
            place=versions.place,
            subject=package,
            runtime=program.runtime,
            spec=program.spec.id,
            package=package,
            specifier=versions.specifier,
            found=found[package],
        )
        for package, versions in stated.items()
        if package in found and not _is_in(found[package], versions.specifier)
    ]
    if findings:
        raise MapperError(findings)


def versions_of(program: Program, model: object) -> dict[str, str]:
    """Return the versions of the runtime's packages in which the model's class, or one it is derived from, is defined.

    Nothing is imported: a package that defines the class of a module has been. A mapping of tensors is of no package.
    """
    if not isinstance(model, nn.Module):
        return {}
    defining = {each.__module__.partition(".")[0] for each in type(model).__mro__}
    stated = program.spec.runtimes[program.runtime].versions
    found = ((package, _version(package)) for package in stated if package.replace("-", "_") in defining)
    return {package: version for package, version in found if version is not None}


def _version(package: str) -> str | None:
    """Return what the package itself says, which holds however it was installed; else what its installer says."""
    stated = getattr(sys.modules.get(package.replace("-", "_")), "__version__", None)
    if isinstance(stated, str):
        return stated
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _is_in(version: str, specifier: str) -> bool:
    try:
        return SpecifierSet(specifier).contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False
