"""What has opened other systems of this kind is not in our sources: unpickling, evaluating, other people's code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("slipstream", "gateway", "verifier_svc", "drafter_svc", "benchmarks", "examples")
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "jsonpickle", "yaml"}
CALLS = {"eval", "exec", "compile", "__import__"}
ATTRIBUTES = {
    "os": {"system", "popen"},
    "torch": {"hub"},
    "distributed": {"broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"},
}
FLAGS = {"trust_remote_code": True, "allow_pickle": True, "shell": True, "weights_only": False}
"""Keyword arguments, and the value that they must not have."""


def faults(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            names = []
        yield from (f"line {node.lineno}: import {name}" for name in names if name.split(".")[0] in MODULES)
        if isinstance(node, ast.Attribute) and node.attr in ATTRIBUTES.get(_last(node.value), ()):
            yield f"line {node.lineno}: {ast.unparse(node)}"
        if isinstance(node, ast.Call):
            yield from _of_call(node)
        if isinstance(node, ast.Dict):
            named = {key.value: value for key, value in zip(node.keys, node.values, strict=True) if _is_word(key)}
            yield from (f"line {node.lineno}: {name}" for name, value in named.items() if _raised(str(name), value))


def _of_call(node: ast.Call) -> Iterator[str]:
    flags = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
    if isinstance(node.func, ast.Name) and node.func.id in CALLS:
        yield f"line {node.lineno}: {node.func.id}()"
    if isinstance(node.func, ast.Attribute) and node.func.attr == "load" and _last(node.func.value) == "torch":
        only = flags.get("weights_only")
        if not (isinstance(only, ast.Constant) and only.value is True):
            yield f"line {node.lineno}: torch.load without weights_only"
    yield from (f"line {node.lineno}: {name}" for name, value in flags.items() if _raised(name, value))


def _raised(name: str, value: ast.expr) -> bool:
    """A flag that is not plainly on the safe side."""
    return name in FLAGS and not (isinstance(value, ast.Constant) and value.value is (not FLAGS[name]))


def _last(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_word(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


WALL_CLOCK = re.compile(r"\b(time\.time(_ns)?|(datetime|date)\.(now|utcnow|today))\b")
DATES = {"gateway/api/openai/call.py", "gateway/api/openai/responses.py", "gateway/text/chat_template.py"}
"""They show a date to a client or to a model."""
SPANS = "slipstream/telemetry/tracing.py"
STARTS = "slipstream/rpc/worker_service.py"
"""When a worker started: which weights of a model are the newest is about days, and the same for all gateways."""


def test_no_decision_is_taken_by_a_wall_clock() -> None:
    """They differ between machines, and jump."""
    reading = {str(path.relative_to(ROOT)) for path in SOURCES if WALL_CLOCK.search(path.read_text("utf-8"))}
    assert {path for path in reading if not path.startswith(("benchmarks/", "examples/"))} == DATES | {SPANS, STARTS}


def test_our_sources_have_no_banned_construct() -> None:
    found = {str(path.relative_to(ROOT)): list(faults(path.read_text("utf-8"))) for path in SOURCES}
    assert not {path: lines for path, lines in found.items() if lines}
    assert len(SOURCES) > 100


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import os, marshal",
        "from yaml.loader import Loader",
        "def f():\n    import cloudpickle as c",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=flag)",
        "import torch\ntorch.hub.load('x')",
        "dist = torch.distributed.broadcast_object_list",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "AutoModel.from_pretrained(name, trust_remote_code=config.trust)",
        "options = {'trust_remote_code': True}",
        "numpy.load(path, allow_pickle=True)",
        "eval(text)",
        "exec(text)",
        "subprocess.run(text, shell=True)",
        "os.system(text)",
    ],
)
def test_each_banned_construct_is_found(source: str) -> None:
    assert list(faults(source))


@pytest.mark.parametrize(
    "source",
    [
        "torch.load(path, weights_only=True)",
        "model.eval()",
        "re.compile('x')",
        "load(path, trust_remote_code=False)",
        "options = {'trust_remote_code': False}",
        "json.loads(text)",
    ],
)
def test_constructs_that_only_resemble_banned_ones_pass(source: str) -> None:
    assert not list(faults(source))


def test_models_are_read_from_safetensors_alone() -> None:
    reading = (ROOT / "slipstream" / "engine" / "models" / "checkpoint.py").read_text("utf-8")
    assert "use_safetensors=True" in reading and '"trust_remote_code": False' in reading
