"""A request with every default filled in, every limit checked and every rule applied: what its session will do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gateway.routing.router import DrafterRequirements
from slipstream.rpc import proto_conversion
from slipstream.speculation.sampling_params import SamplingParams
from slipstream.tenants import tenant_id
from slipstream.tokenizer.structured_output import StructuredOutput
from slipstream.v1 import gateway_pb2, types_pb2, verifier_pb2


@dataclass(frozen=True, slots=True)
class ResolvedRequest:
    model: types_pb2.ModelInfo
    prompt: tuple[int, ...]
    sampling: SamplingParams
    max_length: int
    """Tokens of prompt and output together."""
    stops: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    drafters: tuple[verifier_pb2.DrafterAddress, ...]
    max_draft_tokens: int
    workload: str = ""
    cache_salt: str = ""
    priority: int = 0
    prediction: tuple[int, ...] = ()
    """Output that is expected; empty without speculation."""
    structure: StructuredOutput | None = None
    """The language that the output is held to."""
    top_logprobs: int | None = None
    """Likeliest tokens sent for each position, besides the token's own log-probability; None: not even that."""
    rounds: bool = False
    """True if clients are told what each round did."""
    owner: str = ""
    """Name of the API key that the session belongs to; empty on a gateway without keys."""
    salt: str = ""
    """Sessions of one salt share caches: made of the owner and `cache_salt`."""
    arm: str = ""
    """The arm of the experiment; empty where the session takes no part."""
    shadows: tuple[str, ...] = ()
    """Names of drafters that propose without serving."""
    revision: int = 0
    """Number of times that the session was rolled back: a client that has the former text sees that this is another."""
    edited: int = 0
    """Output tokens that the client wrote by rollbacks, at most: limits of prompts hold for them too."""
    min_tokens: int = 0
    """Output tokens before which no stop token ends the text."""
    annotation: bytes = b""
    """What the client keeps with the session."""
    response: bytes = b""
    """What the gateway keeps with a response of `/v1/responses`; no client can write it."""
    mixed_arithmetic: bool | None = None
    """Whether the text may go on with another arithmetic than it began with; None: as the operator says."""
    vocabulary: str = ""
    """Fingerprint of the tokenizer that makes the session's text."""
    drafting: DrafterRequirements = field(default_factory=DrafterRequirements, compare=False)
    """Which drafters may take the place of one that fails."""

    def open_request(
        self, output: Sequence[int], drafters: Iterable[verifier_pb2.DrafterAddress]
    ) -> verifier_pb2.DecodeOpen:
        """What opens the session behind its `output` so far; the caller sets key and credit."""
        return verifier_pb2.DecodeOpen(
            prefix=types_pb2.Prefix(token_ids=[*self.prompt, *output], prompt_length=len(self.prompt)),
            sampling=proto_conversion.sampling_to_proto(self.sampling),
            max_length=self.max_length,
            min_length=len(self.prompt) + self.min_tokens if self.min_tokens else 0,
            stop_token_ids=self.stop_token_ids,
            policy=verifier_pb2.DecodePolicy(max_draft_tokens=self.max_draft_tokens),
            drafters=drafters,
            prediction_token_ids=self.prediction,
            cache_salt=self.salt,
            tenant=tenant_id(self.owner),
            workload=self.workload,
            priority=self.priority,
            structured_output=proto_conversion.structure_to_proto(self.structure),
            top_logprobs=self.top_logprobs,
            round_details=self.rounds,
        )

    def request(self) -> gateway_pb2.GenerateRequest:
        """The request that resolves to this again, but for its prompt."""
        request = gateway_pb2.GenerateRequest(
            model=self.model.name,
            sampling=proto_conversion.sampling_to_proto(self.sampling),
            max_tokens=self.max_length - len(self.prompt),
            stop=self.stops,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=True,  # the model's own are among stop_token_ids
            speculation=gateway_pb2.SpeculationOptions(
                disabled=not self.max_draft_tokens,
                max_draft_tokens=self.max_draft_tokens,
                drafters=self.drafting.names,
                rounds=self.rounds,
            ),
            workload=self.workload,
            cache_salt=self.cache_salt,
            priority=self.priority,
            structured_output=proto_conversion.structure_to_proto(self.structure),
            logprobs=self.top_logprobs is not None,
            top_logprobs=self.top_logprobs or 0,
            annotation=self.annotation,
            min_tokens=self.min_tokens,
            mixed_arithmetic=self.mixed_arithmetic,
        )
        if self.prediction:
            request.prediction.token_ids.token_ids.extend(self.prediction)
        return request

    def params(self) -> bytes:
        """What the session's record keeps of it: a GenerateRequest and a StoredRequest."""
        stored = gateway_pb2.StoredRequest(
            owner=self.owner,
            revision=self.revision,
            edited_tokens=self.edited,
            response=self.response,
            vocabulary_fingerprint=self.vocabulary,
        )
        return b"".join(each.SerializeToString(deterministic=True) for each in (self.request(), stored))
