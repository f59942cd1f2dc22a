"""All in a service that one tenant's requests could fill has a row here, with its owner and its bound: a thread that
one tenant keeps busy is one that all others wait for, and a cache that only grows is memory that all others lack."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SERVICES = ("gateway", "verifier_svc", "drafter_svc")
THREADS = {"to_thread", "run_in_executor", "Thread", "Process", "Popen", "fork", "create_subprocess_exec"}
THREADS |= {"ThreadPoolExecutor", "ProcessPoolExecutor", "FairThreads", "ModelThread", "run_in_threadpool"}
THREADS |= {"create_subprocess_shell"}
CONTAINERS = {"Queue", "LifoQueue", "PriorityQueue", "SimpleQueue", "deque", "OrderedDict", "lru_cache", "cache"}
CONTAINERS |= {"FairQueue", "PerTenant", "TenantCache", "WeakValueDictionary"}
GROWING = {"dict", "set", "defaultdict", "Counter"}
"""What is made empty and has things put in; it needs a row where nothing is ever taken out."""
REMOVALS = {"pop", "popitem", "clear", "discard", "remove", "difference_update", "intersection_update"}

Row = tuple[int, str, str]
"""Times, owner, bound; where the bound is not by tenant, why it need not be."""
THREAD_ROWS: dict[tuple[str, str], Row] = {
    ("gateway/gateway.py", "to_thread"): (1, "the start of a gateway", "once, before it listens"),
    ("gateway/api/http/operations.py", "to_thread"): (1, "/metrics", "operators' keys, one page at a time"),
    ("gateway/api/http/route_list.py", "to_thread"): (1, "/docs and /openapi.json", "made once"),
    ("gateway/routing/discovery.py", "to_thread"): (
        1,
        "an operator's file of addresses",
        "one a pool, every discovery_s",
    ),
    ("gateway/work/processes.py", "Popen"): (1, "ProcessSource", "one at a time"),
    ("gateway/work/server.py", "fork"): (1, "TenantWork", "GATEWAY_TEXT_PROCESSES, tenants in turns"),
    ("verifier_svc/grammar/constraints.py", "FairThreads"): (2, "MaskThreads", "THREADS each, tenants in turns"),
    ("verifier_svc/sources/local_drafters.py", "ModelThread"): (1, "each drafting method here", "one, steps share it"),
    ("verifier_svc/verifier.py", "ModelThread"): (1, "the verifier", "one, steps share it fairly"),
    ("verifier_svc/vllm_follower.py", "Thread"): (1, "the link to the first node", "one a process"),
    ("verifier_svc/execution/vllm/engine_core.py", "Thread"): (1, "the watch over workers", "one a process"),
    ("verifier_svc/execution/vllm/node_link.py", "Thread"): (2, "the first node", "one, and one for each other node"),
    ("drafter_svc/drafter.py", "ModelThread"): (1, "the drafter", "one, steps share it"),
}
CONTAINER_ROWS: dict[tuple[str, str], Row] = {
    ("gateway/api/http/connections.py", "OrderedDict"): (
        1,
        "Connections, by origin",
        "in all; the origin with the most loses its idle ones",
    ),
    ("gateway/auth/api_keys.py", "OrderedDict"): (1, "FailedAttempts, by origin", "ORIGINS, the eldest goes"),
    ("gateway/auth/loop_turns.py", "deque"): (
        3,
        "ReadyCallbacks, and sockets that are ready",
        "by the tasks of each tenant, which take turns; by the connections",
    ),
    ("gateway/auth/loop_turns.py", "OrderedDict"): (1, "ReadyCallbacks, by tenant", "by the keys; none is empty"),
    ("gateway/routing/verifier_choice.py", "OrderedDict"): (
        1,
        "prefixes of each worker",
        "in count; decides speed alone",
    ),
    ("gateway/sessions/ownership.py", "WeakValueDictionary"): (
        1,
        "locks of sessions",
        "by the requests that hold them",
    ),
    ("gateway/store/memory.py", "OrderedDict"): (1, "MemoryBackend", "GATEWAY_MEMORY_STORE_BYTES, the largest loses"),
    ("gateway/store/session_log.py", "deque"): (1, "writes of one session", "by the credit of the verifier"),
    ("gateway/work/tenant_work.py", "FairQueue"): (1, "TenantWork", "jobs and bytes of each tenant"),
    ("verifier_svc/grammar/constraints.py", "deque"): (1, "masks of one session", "by the nodes of its tree"),
    ("verifier_svc/estimators/calibration.py", "OrderedDict"): (1, "tables by tenant", "MOST_TENANTS, the eldest goes"),
    ("verifier_svc/hidden_feed.py", "deque"): (1, "rows of one session", "1 GiB in all, the largest loses its oldest"),
    ("verifier_svc/telemetry/verifier_spans.py", "deque"): (1, "rounds of one traced session", "MOST_UNDER_WAY"),
    ("gateway/api/grpc_service.py", "PerTenant"): (1, "requests that come in", "32 each, 256 tenants"),
    ("gateway/routing/breaker.py", "PerTenant"): (1, "breakers of a drafter", "some failures each, 256 tenants"),
    ("verifier_svc/scheduling/planner.py", "PerTenant"): (1, "acceptance", "one value each, 256 tenants"),
    ("verifier_svc/sources/shadow.py", "PerTenant"): (1, "figures of shadows", "one value each, 256 tenants"),
    ("verifier_svc/wait_policy/wait_policy.py", "PerTenant"): (2, "acceptance, gains", "one value each, 256 tenants"),
}
GROWING_ROWS: dict[tuple[str, str], Row] = {
    ("gateway/api/openai/chat.py", "_answers"): (1, "choices of one request", "MOST_CHOICES"),
    ("gateway/api/openai/completions.py", "_begun"): (1, "choices of one request", "MOST_CHOICES"),
    ("gateway/api/openai/completions.py", "_echoes"): (1, "prompts of one request", "MOST_CHOICES"),
    ("gateway/text/chat_template.py", "_compiled"): (1, "the model's templates", "by its files, not by clients"),
    ("gateway/text/chat_template.py", "_written"): (1, "roles by template", "by the model's templates"),
    ("gateway/text/encoding.py", "_control"): (1, "control tokens by template", "by the model's templates"),
    ("gateway/text/tokenizer.py", "_grammars"): (1, "compilers by model", "by the models; each a TenantCache"),
    ("verifier_svc/estimators/cost_curve.py", "_rows"): (1, "costs by sessions", "logarithm of the sessions"),
    ("verifier_svc/execution/vllm/node_link.py", "_joined"): (1, "the first node", "by the nodes"),
    ("verifier_svc/sources/candidate_sources.py", "_local"): (1, "local drafters", "by configuration"),
    ("gateway/api/openai/fields.py", "_LOGGED"): (1, "unknown fields that were logged", "_MOST_LOGGED names"),
    ("gateway/api/openai/response_views.py", "_said"): (1, "items of one response", "by its tokens"),
    ("gateway/routing/router.py", "aliases"): (1, "names of models", "by configuration"),
    ("gateway/routing/router.py", "pools"): (1, "names of drafters' pools", "by configuration"),
    ("gateway/sessions/drafter_assignment.py", "_absent"): (1, "drafters that a session lost", "by the drafters"),
    ("gateway/sessions/verifier_search.py", "_avoid"): (1, "verifiers that failed a session", "by the verifiers"),
    ("gateway/store/measured.py", "errors"): (1, "counts", "operations times BoundedLabels"),
    ("gateway/store/memory.py", "_ended"): (1, "MemoryBackend, by tenant", "by the keys; its entries by bytes"),
    ("gateway/store/memory.py", "_suspended"): (1, "MemoryBackend, by tenant", "by the keys; its entries by bytes"),
    ("gateway/telemetry/request_metrics.py", "failures"): (1, "counts", "BoundedLabels"),
    ("gateway/telemetry/request_metrics.py", "series"): (1, "series by model and workload", "BoundedLabels"),
    ("gateway/text/detokenizer.py", "_texts"): (1, "texts of tokens", "by the vocabulary; alike for everybody"),
    ("gateway/work/tenant_work.py", "failures"): (1, "counts", "KINDS times five reasons"),
    ("verifier_svc/grammar/constraints.py", "children"): (
        1,
        "masks of one session",
        "by its tree; commits drop the rest",
    ),
    ("verifier_svc/execution/fault_isolation.py", "faults"): (1, "counts", "by the kinds of faults"),
    ("verifier_svc/execution/vllm/engine_core.py", "_others"): (1, "processes at the start", "once"),
    ("verifier_svc/execution/vllm/node_link.py", "_settings"): (1, "the node's settings", "once"),
    ("verifier_svc/telemetry/metrics_source.py", "accepted_lengths"): (1, "counts", "VERIFIER_MAX_DRAFT_TOKENS"),
    ("verifier_svc/telemetry/metrics_source.py", "drafted"): (
        1,
        "counts",
        "by depths, which trees bound",
    ),
    ("verifier_svc/telemetry/verifier_spans.py", "_chosen"): (
        1,
        "steps of one traced session",
        "by its output; the sampler bounds them",
    ),
    ("verifier_svc/wait_policy/drafting_trial.py", "_answers"): (1, "slowdowns by load", "logarithm of the sessions"),
}
"""What is never taken out, such as the caches that dictionaries are."""


def _name(node: ast.expr) -> str:
    """The last part of what is called or decorates."""
    if isinstance(node, ast.Call | ast.Subscript):
        return _name(node.func if isinstance(node, ast.Call) else node.value)
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def started(source: str) -> Iterator[str]:
    """Names of what runs beside the thread of the source, by itself or under another name."""
    tree = ast.parse(source)
    types = {id(part) for node in ast.walk(tree) for part in _annotation(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in THREADS and id(node) not in types:
            yield node.attr
        elif isinstance(node, ast.Name) and node.id in THREADS and id(node) not in types:
            yield node.id
        elif isinstance(node, ast.ImportFrom):
            yield from (each.name for each in node.names if each.name in THREADS and each.asname)


def _annotation(node: ast.AST) -> Iterator[ast.AST]:
    for each in (getattr(node, "annotation", None), getattr(node, "returns", None)):
        if isinstance(each, ast.AST):
            yield from ast.walk(each)
    if isinstance(node, ast.Subscript) and _name(node) in ("Popen", "Queue", "deque"):
        yield from ast.walk(node)


def held(source: str) -> Iterator[str]:
    """Names of queues and caches that the source makes."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and _name(node) in CONTAINERS:
            yield _name(node)
            if _name(node) == "defaultdict":
                yield from (_name(each) for each in node.args)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from (_name(each) for each in node.decorator_list if _name(each) in CONTAINERS)


def growing(source: str) -> Iterator[str]:
    """Names of attributes and of module's variables that are made empty and that nothing is taken out of."""
    tree = ast.parse(source)
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    makers = [each for node in classes for each in node.body if getattr(each, "name", "") == "__init__"]
    inside = {id(part) for maker in makers for part in ast.walk(maker)}
    made, replaced = set(_empty(tree.body)), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if id(node) in inside:
                made |= {*_empty([node])} if isinstance(target, ast.Attribute) else set()
            else:
                places = target.elts if isinstance(target, ast.Tuple) else [target]
                replaced |= {each.attr for each in places if isinstance(each, ast.Attribute)}
    yield from sorted(made - replaced - {*_shrinking(tree)})


def _empty(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        value = node.value
        empty = isinstance(value, ast.Dict) and not value.keys
        if empty or (isinstance(value, ast.Call) and _name(value) in GROWING):
            yield _name(target)


def _shrinking(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in REMOVALS:
            yield _name(node.value)
        elif isinstance(node, ast.Delete):
            yield from (_name(each) for each in node.targets)
        elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Sub | ast.BitAnd):
            yield _name(node.target)


def handlers(source: str) -> Iterator[str]:
    """Routes that are plain functions, which the framework runs on threads of its own."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and any("router." in ast.unparse(each) for each in node.decorator_list):
            yield node.name


@pytest.mark.parametrize(
    ("find", "rows"),
    [(started, THREAD_ROWS), (held, CONTAINER_ROWS), (growing, GROWING_ROWS)],
    ids=["threads and processes", "queues and caches", "what only grows"],
)
def test_all_that_requests_can_fill_has_an_owner_and_a_bound(
    find: Callable[[str], Iterator[str]], rows: dict[tuple[str, str], Row]
) -> None:
    found: Counter[tuple[str, str]] = Counter()
    for path in (path for service in SERVICES for path in (ROOT / service).rglob("*.py")):
        found.update((str(path.relative_to(ROOT)), name) for name in find(path.read_text("utf-8")))
    assert found == {place: times for place, (times, _, _) in rows.items()}


def test_no_route_runs_on_the_frameworks_threads() -> None:
    for path in (ROOT / "gateway").rglob("*.py"):
        assert not list(handlers(path.read_text("utf-8"))), path


@pytest.mark.parametrize(
    "source",
    [
        "await asyncio.to_thread(f)",
        "loop.run_in_executor(None, f)",
        "from threading import Thread\nThread(target=f)",
        "from concurrent.futures import ThreadPoolExecutor as Pool",
        "multiprocessing.Process(target=f)",
        "run = asyncio.to_thread",
    ],
)
def test_each_thread_and_process_would_be_found(source: str) -> None:
    assert list(started(source))


@pytest.mark.parametrize(
    "source",
    [
        "class A:\n def __init__(self): self._jobs: asyncio.Queue[int] = asyncio.Queue()",
        "waiting = deque()",
        "@lru_cache(maxsize=None)\ndef f(text): ...",
        "class A:\n @functools.cache\n def f(self): ...",
        "f = lru_cache(9)(g)",
        "x = OrderedDict[str, int]()",
    ],
)
def test_each_queue_and_cache_would_be_found(source: str) -> None:
    assert list(held(source))


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("class A:\n def __init__(self): self._x: dict[str, int] = {}\n def f(self, y): self._x[y] = 1", ["_x"]),
        ("class A:\n def __init__(self): self._x = set()\n def f(self, y): self._x.add(y)", ["_x"]),
        ("SEEN = set()\ndef f(y): SEEN.add(y)", ["SEEN"]),
        ("class A:\n def __init__(self): self._x = {}\n def f(self, y): self._x.pop(y)", []),
        ("class A:\n def __init__(self): self._x = {}\n def f(self, y): del self._x[y]", []),
        ("class A:\n def __init__(self): self._x = set()\n def f(self): self._x = set()", []),
    ],
)
def test_collections_that_only_grow_are_found(source: str, found: list[str]) -> None:
    assert list(growing(source)) == found


def test_a_route_on_the_frameworks_threads_would_be_found() -> None:
    assert list(handlers('@router.get("/x")\ndef x() -> int:\n    return 1')) == ["x"]
