"""What one session will do, all of it decided."""

from __future__ import annotations

from dataclasses import dataclass, field

from gateway.routing.router import DrafterRequirements
from slipstream.rpc import proto_conversion
from slipstream.speculation.sampling_params import SamplingParams
from slipstream.tokenizer.structured_output import StructuredOutput
from slipstream.v1 import gateway_pb2, types_pb2, verifier_pb2


@dataclass(frozen=True, slots=True)
class ResolvedRequest:
    model: types_pb2.ModelInfo
    prompt: tuple[int, ...]
    sampling: SamplingParams
    max_length: int
    """Of prompt and output together."""
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
    """What the output must be."""
    top_logprobs: int | None = None
    """Likeliest tokens told in each place, besides each token's own log-probability; None: not even that."""
    owner: str = ""
    """The API key that the session belongs to; empty on an open gateway."""
    salt: str = ""
    """What caches are shared by: the owner and its own `cache_salt`."""
    arm: str = ""
    """Of the experiment; empty where it takes no part."""
    shadows: tuple[str, ...] = ()
    """Names of drafters that guess without serving."""
    revision: int = 0
    """How often it was rolled back: those who were told the former text know by it that this is another one."""
    vocabulary: str = ""
    """Fingerprint of the tokenizer that its text is made with."""
    drafting: DrafterRequirements = field(default_factory=DrafterRequirements, compare=False)
    """Who may take the place of a drafter that fails."""

    def params(self) -> bytes:
        """What the record keeps of it: the request that would ask for exactly this."""
        sampling = proto_conversion.sampling_to_proto(self.sampling)
        options = {field.name: value for field, value in sampling.ListFields() if field.name != "logit_bias"}
        zeros = {"temperature": 0.0, "seed": 0}  # set, although proto3 does not list them
        request = gateway_pb2.GenerateRequest(
            model=self.model.name,
            sampling=gateway_pb2.SamplingOptions(**(zeros | options), logit_bias=sampling.logit_bias),
            max_tokens=self.max_length - len(self.prompt),
            stop=self.stops,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=True,  # the model's own are among stop_token_ids
            speculation=gateway_pb2.SpeculationOptions(
                disabled=not self.max_draft_tokens,
                max_draft_tokens=self.max_draft_tokens,
                drafters=self.drafting.names,
            ),
            workload=self.workload,
            cache_salt=self.cache_salt,
            priority=self.priority,
            structured_output=proto_conversion.structure_to_proto(self.structure),
            logprobs=self.top_logprobs is not None,
            top_logprobs=self.top_logprobs or 0,
            owner=self.owner,
            revision=self.revision,
            vocabulary_fingerprint=self.vocabulary,
        )
        if self.prediction:
            request.prediction.token_ids.token_ids.extend(self.prediction)
        return request.SerializeToString(deterministic=True)
