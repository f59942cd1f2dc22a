"""Every HTTP route and gRPC RPC of a gateway, times the resources that its caller could strain: the attack on it in
`tests.isolation.attacks`, or behind `NONE` why there is none."""

from __future__ import annotations

RESOURCES = ("loop", "threads", "memory", "kv", "steps", "connections", "store", "log", "turnover")
"""Time of the event loop; threads and working processes; the gateway's memory; the verifier's KV; tokens of its steps;
connections and streams; records of sessions; lines of the log; what opening a session and leaving it takes."""
NONE = "none: "

Row = dict[str, str]

_HTTP: Row = {"connections": "idle connections"}
_NO_MODEL: Row = {
    "kv": NONE + "no model reads it",
    "steps": NONE + "no model reads it",
    "store": NONE + "it makes and changes no session",
    "turnover": NONE + "it opens no session",
}
_QUIET: Row = {"log": NONE + "no line is written for a request"}
_PLAIN: Row = (
    _NO_MODEL
    | _QUIET
    | {
        "loop": "requests",
        "threads": NONE + "it has no text to read",
        "memory": NONE + "it has no body, and its answer is bounded by the fleet",
    }
)
_GET = _PLAIN | _HTTP
_RPC = _PLAIN | {"connections": "streams of health"}
_OPERATOR = {"loop": NONE + "only operators get past the key, which is all that is looked at"}
_BODY: Row = _HTTP | {"loop": "escapes", "threads": "long text", "memory": "values", "log": "unknown fields"}
_GENERATE: Row = _BODY | {"kv": "long prompts", "steps": "long texts", "store": "short texts"}
_GENERATE |= {"turnover": "streams closed at once"}
_STREAM: Row = {"connections": "unread streams"}

HTTP: dict[str, Row] = {
    "GET /health": _GET,
    "GET /ready": _GET,
    "GET /ping": _GET,
    "POST /ping": _GET,
    "GET /load": _GET | _OPERATOR,
    "GET /version": _GET,
    "GET /metrics": _GET | _OPERATOR | {"threads": NONE + "one page at a time, for operators"},
    "GET /docs": _GET,
    "GET /openapi.json": _GET,
    "POST /v1/completions": _GENERATE | _STREAM | {"threads": "predictions"},
    "POST /v1/chat/completions": _GENERATE | {"threads": "messages", "loop": "unclosed tool calls"},
    "POST /v1/responses": _GENERATE | {"memory": "inflating annotations"},
    "GET /v1/responses/{name}": _GET,
    "DELETE /v1/responses/{name}": _GET,
    "GET /v1/responses/{name}/input_items": _GET,
    "POST /v1/responses/input_tokens": _BODY | _NO_MODEL | {"threads": "messages"},
    "POST /v1/responses/{name}/cancel": _GET,
    "POST /v1/messages": _GENERATE | {"threads": "messages"},
    "POST /v1/messages/count_tokens": _BODY | _NO_MODEL | {"threads": "messages"},
    "GET /v1/models": _GET | {"loop": "many requests"},
    "GET /v1/models/{name:path}": _GET,
    "GET /tokenizer_info": _GET,
    "POST /tokenize": _BODY | _NO_MODEL | {"threads": "messages", "loop": "odd texts"},
    "POST /detokenize": _BODY | _NO_MODEL | {"threads": "token ids"},
    "GET /playground/fleet": _GET | _OPERATOR,
    "GET /": _GET,
} | {
    f"GET /playground{file}": _GET
    for file in (
        "",
        "/code.js",
        "/fleet.js",
        "/icon.svg",
        "/main.js",
        "/run.js",
        "/stream.js",
        "/style.css",
        "/timeline.js",
    )
}

RPCS: dict[str, Row] = {
    "slipstream.v1.GatewayService/Generate": {
        "loop": "token ids",
        "threads": "messages",
        "memory": "above 4 MiB",
        "kv": "long prompts",
        "steps": "long texts",
        "connections": "unread streams",
        "store": "short texts",
        "turnover": "sessions left at once",
    }
    | _QUIET,
    "slipstream.v1.GatewayService/Resume": _RPC
    | {
        "loop": "resumes",
        "memory": "resumes",
        "kv": NONE + "a session that ended is only read; a running one has its KV",
        "steps": "resumes",
        "store": "resumes",
        "turnover": "sessions taken up and left",
    },
    "slipstream.v1.GatewayService/Rollback": _RPC
    | {"loop": "branches", "threads": "edits", "memory": "branches", "store": "branches"},
    "slipstream.v1.GatewayService/Cancel": _RPC,
    "slipstream.v1.GatewayService/GetSession": _RPC | {"memory": "requests"},
    "slipstream.v1.GatewayService/ListModels": _RPC | {"loop": "many requests"},
    "slipstream.v1.GatewayService/Tokenize": _RPC
    | {"loop": "odd texts", "threads": "long text", "memory": "above 4 MiB"},
    "slipstream.v1.GatewayService/GetFleet": _RPC | _OPERATOR,
    "slipstream.v1.GatewayService/GetExperiment": _RPC | _OPERATOR,
    "grpc.health.v1.Health/Check": _RPC,
    "grpc.health.v1.Health/List": _RPC,
    "grpc.health.v1.Health/Watch": _RPC | {"memory": "streams of health"},
    "grpc.reflection.v1.ServerReflection/ServerReflectionInfo": _RPC,
    "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _RPC,
}
