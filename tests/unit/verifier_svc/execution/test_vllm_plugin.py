"""What went says so by its name."""

from __future__ import annotations

import pytest

from verifier_svc import vllm_plugin


@pytest.mark.parametrize("name", ["CoupledWorker", "RemoteProposer"])
def test_a_removed_class_names_its_replacement(name: str) -> None:
    with pytest.raises(ImportError, match=rf"{name} went with vLLM's V1 model runner; .* VERIFIER_ENGINE=vllm"):
        getattr(vllm_plugin, name)
    with pytest.raises(AttributeError):
        vllm_plugin.another  # noqa: B018
