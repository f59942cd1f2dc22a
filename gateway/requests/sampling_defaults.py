"""Sampling parameters that a model's authors recommend, in `generation_config.json`: for requests that set none.

The same five that vLLM's `--generation-config auto` takes. `do_sample` is left alone, as there: a request without a
temperature samples.
"""

from __future__ import annotations

from slipstream.errors import FailedPrecondition, InvalidArgument, NotFound
from slipstream.rpc.proto_conversion import sampling_of_client
from slipstream.tokenizer.vocabulary import read_json, tokenizer_file
from slipstream.v1 import types_pb2

FILE = "generation_config.json"
FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def read_sampling_defaults(model: str) -> types_pb2.SamplingOptions:
    """The parameters in a model's folder or hub id; empty without such a file. Raises FailedPrecondition for one that
    holds something else."""
    try:
        file = tokenizer_file(model, FILE)
    except NotFound:
        return types_pb2.SamplingOptions()
    given = {name: value for name, value in read_json(file).items() if name in FIELDS and value is not None}
    if given.get("top_k", 0) == -1:  # as vLLM writes "all tokens"
        given["top_k"] = 0
    try:
        defaults = types_pb2.SamplingOptions(**given)
        sampling_of_client(defaults, lambda: 0)
    except (TypeError, ValueError, InvalidArgument) as error:
        why = error.message if isinstance(error, InvalidArgument) else str(error)
        raise FailedPrecondition(
            f"{file} holds no sampling parameters: {why} Correct it, or set GATEWAY_GENERATION_CONFIG=none.",
            reason="CONFIG_BROKEN",
        ) from error
    return defaults


def with_defaults(options: types_pb2.SamplingOptions, defaults: types_pb2.SamplingOptions) -> types_pb2.SamplingOptions:
    """Returns the request's options, with the defaults where it sets none."""
    merged = types_pb2.SamplingOptions()
    merged.CopyFrom(defaults)
    merged.MergeFrom(options)
    return merged
