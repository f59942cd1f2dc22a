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
    request: gateway_pb2.GenerateRequest
    """Request that resolves to this again: every default is filled in, and the prompt left out, which the session's log
    has."""
    model: types_pb2.ModelInfo
    prompt: tuple[int, ...]
    sampling: SamplingParams
    max_length: int
    """Tokens of prompt and output together."""
    stop_token_ids: tuple[int, ...]
    """The model's own too, unless the request ignores them."""
    drafters: tuple[verifier_pb2.DrafterAddress, ...]
    max_draft_tokens: int
    prediction: tuple[int, ...] = ()
    """Output that is expected; empty without speculation."""
    structure: StructuredOutput | None = None
    """The language that the output is held to."""
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
    response: bytes = b""
    """Data that the gateway keeps with a response of `/v1/responses`; no client can write it."""
    vocabulary: str = ""
    """Fingerprint of the tokenizer that makes the session's text."""
    follows_prompt: bool = field(default=False, compare=False)
    """Whether the text goes on from the prompt's; a message of a conversation begins one. Of a session that is
    resolved again its record marks that."""
    drafting: DrafterRequirements = field(default_factory=DrafterRequirements, compare=False)
    """Which drafters may take the place of one that fails."""

    @property
    def workload(self) -> str:
        return self.request.workload

    @property
    def rounds(self) -> bool:
        """Whether clients receive what each round did."""
        return self.request.speculation.rounds

    @property
    def top_logprobs(self) -> int | None:
        """Likeliest tokens sent for each position, besides the token's own log-probability; None: not even that."""
        return self.request.top_logprobs if self.request.logprobs else None

    @property
    def mixed_arithmetic(self) -> bool | None:
        """Whether the text may go on with another arithmetic than it began with; None: as the operator configured."""
        return self.request.mixed_arithmetic if self.request.HasField("mixed_arithmetic") else None

    def open_request(
        self, output: Sequence[int], drafters: Iterable[verifier_pb2.DrafterAddress]
    ) -> verifier_pb2.DecodeOpen:
        """Returns the Open of the session behind its `output` so far; the caller sets key and credit."""
        request, prompt = self.request, len(self.prompt)
        return verifier_pb2.DecodeOpen(
            prefix=types_pb2.Prefix(token_ids=[*self.prompt, *output], prompt_length=prompt),
            sampling=request.sampling,
            max_length=self.max_length,
            min_length=prompt + request.min_tokens if request.min_tokens else 0,
            stop_token_ids=self.stop_token_ids,
            policy=verifier_pb2.DecodePolicy(max_draft_tokens=self.max_draft_tokens),
            drafters=drafters,
            prediction_token_ids=self.prediction,
            cache_salt=self.salt,
            tenant=tenant_id(self.owner),
            workload=request.workload,
            priority=request.priority,
            structured_output=proto_conversion.structure_to_proto(self.structure),
            top_logprobs=self.top_logprobs,
            round_details=self.rounds,
            prompt_logprobs=request.prompt_logprobs if request.HasField("prompt_logprobs") and not output else None,
            reasoning_limit=request.reasoning_limit if request.HasField("reasoning_limit") else None,
        )

    def params(self) -> bytes:
        """Serialises the request for the session's record: a GenerateRequest and a StoredRequest."""
        stored = gateway_pb2.StoredRequest(
            owner=self.owner,
            revision=self.revision,
            edited_tokens=self.edited,
            response=self.response,
            vocabulary_fingerprint=self.vocabulary,
            follows_prompt=self.follows_prompt,
        )
        return b"".join(each.SerializeToString(deterministic=True) for each in (self.request, stored))


def filled_in(
    asked: gateway_pb2.GenerateRequest,
    model: types_pb2.ModelInfo,
    sampling: SamplingParams,
    stop_token_ids: Sequence[int],
    most: tuple[int, int],
    prediction: Sequence[int],
) -> gateway_pb2.GenerateRequest:
    """A copy of the request with all that it left open, without its prompt. `most`: output tokens, and candidates of a
    round."""
    request = gateway_pb2.GenerateRequest()
    request.CopyFrom(asked)
    request.DiscardUnknownFields()  # those of StoredRequest among them, which no client may write
    for name in ("prompt", "prompt_token_ids", "chat", "stop_token_ids", "prediction", "bad_words"):
        request.ClearField(name)
    request.model = model.name
    request.sampling.CopyFrom(proto_conversion.sampling_to_proto(sampling))
    request.max_tokens, request.speculation.max_draft_tokens = most
    request.stop_token_ids.extend(stop_token_ids)
    request.ignore_eos = True  # the model's own are among stop_token_ids
    request.speculation.disabled = not request.speculation.max_draft_tokens
    if prediction:
        request.prediction.token_ids.token_ids.extend(prediction)
    return request
