from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.front import Setting


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer: every token is one byte, so characters and stop strings straddle tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    place = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(place / "tokenizer.json"))
    return place


@pytest.fixture
async def setting(folder: Path) -> AsyncIterator[Setting]:
    async with AsyncExitStack() as stack:
        yield Setting(folder, stack)
