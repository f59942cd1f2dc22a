"""The name of an arithmetic is equal exactly where equal tokens are promised."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest
import transformers

from slipstream.engine.factory import open_engine
from slipstream.engine.model_info import DIGITS
from slipstream.engine.models import weights_digest as digests
from slipstream.engine.models.arithmetic import Computation
from slipstream.engine.models.checkpoint import describe_checkpoint, load_checkpoint
from slipstream.engine.models.weights_digest import weight_files, weights_digest
from slipstream.user_cache import cache_file
from tests.support.checkpoints import other_weights

TARGET = Path(__file__).parents[4] / "models" / "target"
FAST = Computation(
    weights="3fa9c1d2e4b7",
    precision="bfloat16",
    path="kernels",
    rowwise=True,
    device="cpu",
    kernels="kernels-9-avx2-1f3c9a",
    attends=True,
    steady=False,
    torch="torch-2.13.0-avx2",
    threads=2,
    engine="embedded-0.1.0",
)
PLAIN = replace(FAST, precision="float32", path="lean", rowwise=False, kernels="", attends=False, steady=True)
LIBRARY = replace(FAST, path="library")
OTHER = {
    "weights": "000000000000",
    "precision": "float32",
    "kernels": "kernels-9-avx512-1f3c9a",
    "torch": "torch-2.14.0-avx2",
    "engine": "embedded-0.2.0",
}


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_the_name_reads_as_what_it_stands_for() -> None:
    assert FAST.name == "3fa9c1d2e4b7/bfloat16/embedded-0.1.0/kernels-9-avx2-1f3c9a/torch-2.13.0-avx2"
    library = f"transformers-{transformers.__version__}"
    assert LIBRARY.name == FAST.name.replace("/torch-", f"/{library}/torch-")
    assert PLAIN.name == "3fa9c1d2e4b7/float32/embedded-0.1.0/plain/lean-2threads/torch-2.13.0-avx2"


@pytest.mark.parametrize("field", sorted(OTHER))
def test_where_tokens_are_promised_all_that_decides_them_is_in_the_name(field: str) -> None:
    other = replace(FAST, **{field: OTHER[field]})
    assert FAST.batch_invariant and other.name != FAST.name


def test_threads_are_in_the_name_where_they_may_decide_a_sum() -> None:
    assert replace(PLAIN, threads=4).name != PLAIN.name
    assert replace(FAST, threads=4).name == FAST.name
    assert replace(LIBRARY, threads=4).name == LIBRARY.name


@pytest.mark.parametrize(
    "loose",
    [
        replace(FAST, device="cuda", path="lean", rowwise=False, kernels="", attends=False),
        replace(LIBRARY, rowwise=False),
        replace(PLAIN, precision="bfloat16"),
        replace(PLAIN, steady=False),
        replace(FAST, attends=False),
    ],
)
def test_where_only_the_distribution_is_promised_the_machine_is_not_in_the_name(loose: Computation) -> None:
    assert not loose.batch_invariant
    assert loose.name == f"{loose.weights}/{loose.precision}/embedded"
    moved = replace(loose, torch="torch-9", threads=64, kernels="kernels-10-avx512-000000")
    assert moved.name == loose.name
    assert len({replace(loose, **{name: OTHER[name]}).name for name in ("weights",)} | {loose.name}) == 2


def test_every_field_of_a_computation_changes_its_name_or_its_promise() -> None:
    """A field that changes neither name nor promise would be a fact that nothing needs."""
    for each in fields(Computation):
        before = PLAIN if each.name in ("threads", "steady") else FAST
        value = getattr(before, each.name)
        changed = not value if isinstance(value, bool) else value + 1 if isinstance(value, int) else f"{value}x"
        after = replace(before, **{each.name: changed})
        assert (after.name, after.batch_invariant) != (before.name, before.batch_invariant), each.name


def test_weights_of_equal_size_have_names_of_their_own(tmp_path: Path) -> None:
    """They shared a revision while it was made of sizes."""
    other = other_weights(TARGET, tmp_path / "target")
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (TARGET, other)]
    assert sizes[0] == sizes[1] and weights_digest(TARGET) != weights_digest(other)
    here, there = load_checkpoint(str(TARGET)).info, load_checkpoint(str(other)).info
    assert (here.name, here.dtype) == (there.name, there.dtype)
    assert here.revision != there.revision and here.arithmetic != there.arithmetic


@pytest.mark.parametrize(
    "edit", ["README.md", "generation_config.json", "tokenizer_config.json", "chat_template.jinja"]
)
def test_files_that_do_not_decide_logits_are_not_in_the_revision(tmp_path: Path, edit: str) -> None:
    copy = shutil.copytree(TARGET, tmp_path / "copy")
    before = weights_digest(copy)
    (copy / edit).write_text("{}")
    assert weights_digest(copy) == before == weights_digest(TARGET)


def test_the_configuration_is_in_the_revision(tmp_path: Path) -> None:
    copy = shutil.copytree(TARGET, tmp_path / "copy")
    text = (copy / "config.json").read_text()
    (copy / "config.json").write_text(text.replace('"rope_theta"', '"rope_theta_"'))
    assert text != (copy / "config.json").read_text() and weights_digest(copy) != weights_digest(TARGET)


def test_a_checkpoint_that_is_one_file_and_one_in_several_have_digests(tmp_path: Path) -> None:
    single = tmp_path / "model.gguf"
    single.write_bytes(b"weights")
    assert weight_files(single) == [single] and len(weights_digest(single)) == DIGITS
    assert weight_files(tmp_path) == [single]
    (tmp_path / "b.safetensors").write_bytes(b"2")
    (tmp_path / "a.safetensors").write_bytes(b"1")
    assert [file.name for file in weight_files(tmp_path)] == ["a.safetensors", "b.safetensors"]
    before = weights_digest(tmp_path)
    (tmp_path / "a.safetensors").write_bytes(b"2")
    (tmp_path / "b.safetensors").write_bytes(b"1")
    assert weights_digest(tmp_path) != before


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many files were read since the last call."""
    count = [0]
    real = digests.hashlib.sha256

    class Counting:
        def __init__(self, data: bytes = b"") -> None:
            self._digest = real(data)
            count[0] += not data

        def update(self, data: bytes) -> None:
            self._digest.update(data)

        def hexdigest(self) -> str:
            return self._digest.hexdigest()

    monkeypatch.setattr(digests.hashlib, "sha256", Counting)

    def since() -> int:
        count[0], found = 0, count[0]
        return found - 1  # the digest over all files

    return since


def aged(file: Path, seconds: float) -> None:
    at = time.time() - seconds
    os.utime(file, (at, at))


def test_a_file_is_hashed_once_and_again_when_it_changed(tmp_path: Path, reads: Callable[[], int]) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"1" * 99)
    aged(file, 60)
    first = weights_digest(file)
    assert reads() == 1
    assert weights_digest(file) == first and reads() == 0
    file.write_bytes(b"2" * 99)
    aged(file, 59)
    assert weights_digest(file) != first and reads() == 1


def test_a_file_that_was_just_written_is_hashed_again(tmp_path: Path, reads: Callable[[], int]) -> None:
    """Its next change might leave size and time as they are."""
    file = tmp_path / "model.gguf"
    file.write_bytes(b"1")
    known = file.stat().st_mtime_ns
    first = weights_digest(file)
    file.write_bytes(b"2")
    os.utime(file, ns=(known, known))
    assert weights_digest(file) != first and reads() == 2 + 1


def test_a_broken_or_forbidden_cache_costs_only_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"1")
    aged(file, 60)
    expected = weights_digest(file)
    (kept,) = cache_file("digests", "").parent.iterdir()
    kept.write_text("no digest")
    assert weights_digest(file) == expected
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where a folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert weights_digest(file) == expected


def test_an_emulated_models_name_holds_what_decides_its_text() -> None:
    names = {
        open_engine(f"emulated:{settings}").model.arithmetic
        for settings in ("seed=1", "seed=1&base_ms=9", "seed=2", "seed=1&vocabulary=512", "seed=1&acceptance=0.5")
    }
    assert names == {
        "emulated-1/emulated/emulated-256",
        "emulated-2/emulated/emulated-256",
        "emulated-1/emulated/emulated-512",
        "emulated-1/emulated/emulated-256/0.5-0",
    }
    assert open_engine("emulated:").model.batch_invariant


def test_a_description_without_weights_has_no_arithmetic() -> None:
    found = describe_checkpoint(str(TARGET))
    assert (found.arithmetic, found.batch_invariant) == ("", False)
    assert found.revision == load_checkpoint(str(TARGET)).info.revision
