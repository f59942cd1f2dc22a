from __future__ import annotations

from pathlib import Path

import pytest

from training.folder import replacing


def write(folder: Path, text: str) -> None:
    with replacing(folder) as fresh:
        (fresh / text).write_text(text)
        (fresh / text).chmod(0o600)


def test_a_folder_is_replaced_as_a_whole_and_readable_by_all(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "target"
    write(folder, "one")
    write(folder, "two")
    assert [file.name for file in folder.iterdir()] == ["two"]
    assert (folder / "two").stat().st_mode & 0o777 == 0o644
    assert list(folder.parent.iterdir()) == [folder]


def test_a_folder_stays_as_it_was_when_writing_fails(tmp_path: Path) -> None:
    folder = tmp_path / "target"
    write(folder, "one")
    with pytest.raises(RuntimeError), replacing(folder) as fresh:
        (fresh / "two").write_text("half")
        raise RuntimeError
    assert [file.name for file in folder.iterdir()] == ["one"] and list(tmp_path.iterdir()) == [folder]
