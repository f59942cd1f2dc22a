"""From a request to a ResolvedRequest: every limit checked before any work is done, every default filled in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, NoReturn

from gateway.auth.tenant import Tenant
from gateway.config import GatewayConfig
from gateway.requests.bad_words import MOST_WORDS, check_bad_words, spelled, with_bad_words
from gateway.requests.resolved_request import ResolvedRequest, filled_in
from gateway.requests.sampling_defaults import with_defaults
from gateway.requests.speculation import SessionOrigin, SessionSize, SpeculationPlanner
from gateway.requests.texts import Keep, RequestText, Texts, message_of, part_of, text_of, tokens_of
from gateway.routing.router import Router
from gateway.text.tokenizer import Tokenizer
from gateway.work.pieces import give_way
from slipstream.errors import (
    FIELD_MISSING,
    FIELDS_CONFLICT,
    MESSAGE_TOO_LARGE,
    NUMBER_OUT_OF_RANGE,
    TOO_MANY_ITEMS,
    InvalidArgument,
    PermissionDenied,
    ResourceExhausted,
)
from slipstream.fair_shares import may_take_slot
from slipstream.rpc import proto_conversion
from slipstream.rpc.multiplexed_stream import MAX_ITEM_BYTES
from slipstream.speculation.sampling_params import MAX_TOP_LOGPROBS, SamplingParams
from slipstream.tokenizer.structured_output import StructuredOutput
from slipstream.v1 import gateway_pb2, types_pb2

MAX_ANNOTATION_BYTES = 16_384
ANNOTATION_BYTES_A_TOKEN = 4
"""An annotation may be as long as the prompt beside it, which a record keeps in 4 bytes for each token."""
MOST_OTHER_BYTES = 1 << 18
"""Room in the message that opens a session for all but its tokens: a grammar, biases, drafters, the model's name."""
MOST_SHOWN = 256
MAX_NAMES = 64
MAX_NAME_CHARACTERS = 256

RandomBits = Callable[[int], int]
"""`secrets.randbits`: session ids must not be guessable."""


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """Fields of a request about its output, checked before its texts are encoded."""

    model: types_pb2.ModelInfo
    stop_token_ids: tuple[int, ...]
    sampling: SamplingParams
    most_output: int
    """Output tokens that the request and its tenant's limits allow, whatever the model's length leaves."""


class SessionCount(NamedTuple):
    """Sessions that a gateway has, and those that other requests may become."""

    all: int = 0
    of_tenant: int = 0


class RequestValidator:
    def __init__(
        self,
        config: GatewayConfig,
        router: Router,
        tokenizer: Tokenizer,
        random_bits: RandomBits,
        sampling_defaults: types_pb2.SamplingOptions | None = None,
    ) -> None:
        self._config = config
        self._sampling_defaults = sampling_defaults or types_pb2.SamplingOptions()
        self._router = router
        self._tokenizer = tokenizer
        self._random_bits = random_bits
        self._speculation = SpeculationPlanner(config, router)

    async def resolve(
        self,
        request: gateway_pb2.GenerateRequest,
        tenant: Tenant,
        session_id: str = "",
        prompt: Sequence[int] | None = None,
        texts: Texts | None = None,
    ) -> ResolvedRequest:
        """Resolve the request of a session; one without an id takes no part in experiments.
        `prompt`: token ids of a session that was admitted before; missing drafters are no error then.
        `texts`: what the request is made from, where it does not say that itself. Raises a typed error whose sentence
        names what to change: all that costs nothing is checked before any text is encoded."""
        again = prompt is not None
        asked = self._check(request, tenant, again=again)
        texts = self._texts(request, prompt) if texts is None else texts
        predicted = self._predicted(request.prediction) if texts.prediction is None else texts.prediction
        if not again:
            _check_room(texts, predicted, asked.model, tenant)
        if request.bad_words:
            words = texts.room.bad_words(lambda: spelled(request.bad_words, self._tokenizer, tenant))
            sampling = with_bad_words(asked.sampling, await words.get())
            _check_allowed(request, sampling, asked.stop_token_ids, asked.model)
            asked = replace(asked, sampling=sampling)
        structure = await self._structure(request, asked, tenant)
        prompt, prediction = await _encode(texts.prompt, predicted, asked.model, tenant)
        check_annotation(request.annotation, len(prompt))
        if request.HasField("prompt_logprobs") and not again:
            proto_conversion.check_prompt_logprobs(request.prompt_logprobs, len(prompt))
        max_length = min(len(prompt) + asked.most_output, asked.model.max_length)
        if not request.HasField("max_tokens"):
            max_length = max(len(prompt) + 1, min(max_length, _most_sent(asked.model) - len(prediction)))
        _check_message(max_length + len(prediction), asked.model)
        size = SessionSize(len(prompt), max_length - len(prompt), len(prediction))
        origin = SessionOrigin(tenant.name, session_id, again)
        plan = self._speculation.plan(request, asked.model, asked.sampling, size, origin)
        _check_min_tokens(request, size.output)
        prediction = prediction if plan.max_draft_tokens else ()
        most = size.output, plan.max_draft_tokens
        ends = [] if request.ignore_eos else self._tokenizer.ends(texts.prompt.ends)
        stop_token_ids = tuple(dict.fromkeys([*asked.stop_token_ids, *(end for end in ends if isinstance(end, int))]))
        filled = filled_in(request, asked.model, asked.sampling, stop_token_ids, most, prediction)
        filled.stop.extend(end for end in ends if isinstance(end, str) and end not in filled.stop)
        return ResolvedRequest(
            request=filled,
            model=asked.model,
            prompt=prompt,
            sampling=asked.sampling,
            max_length=max_length,
            stop_token_ids=stop_token_ids,
            drafters=plan.drafters,
            max_draft_tokens=plan.max_draft_tokens,
            prediction=prediction,
            structure=structure,
            response=b"" if texts.keep is None else await _kept(texts.keep, len(prompt)),
            owner=tenant.name,
            salt=tenant.salt(request.cache_salt),
            arm=plan.arm,
            shadows=plan.shadows,
            vocabulary=self._tokenizer.fingerprint,
            follows_prompt=texts.prompt.goes_on,
            drafting=plan.drafting,
        )

    def check_places(self, tenant: Tenant, running: SessionCount) -> None:
        """Raises ResourceExhausted where the gateway, or the tenant, has as many sessions as it may have."""
        if running.all >= self._config.max_sessions:
            raise ResourceExhausted("The gateway has its limit of sessions; retry later.", reason="SESSIONS")
        if not may_take_slot(tenant.id, running.of_tenant, running.all, self._config.max_sessions):
            raise ResourceExhausted(
                f"Key {tenant.name} has as many sessions as may run here beside others'; retry later.",
                reason="SESSIONS",
            )

    def _check(self, request: gateway_pb2.GenerateRequest, tenant: Tenant, *, again: bool) -> CheckedRequest:
        """Checks what costs nothing, and reads what needs none of the texts. `again`: the session was admitted before,
        and its request says all: defaults may be others by now, and the text goes on as it began."""
        _check_labels(request)
        _check_names(request)
        model = self._router.model(request.model)
        if not again:
            self._check_stops(request)
        proto_conversion.check_sizes(request.sampling)
        options = request.sampling if again else with_defaults(request.sampling, self._sampling_defaults)
        sampling = _sampling(options, model, lambda: self._random_bits(64))
        stop_token_ids = self._stop_token_ids(request, model, again=again)
        _check_shown(request, model)
        self._check_priority(request.priority, tenant)
        _check_allowed(request, sampling, stop_token_ids, model)
        proto_conversion.check_reasoning_limit(request)
        limit = request.reasoning_limit
        _check_tokens("reasoning_limit", max(limit.begin_token_id, limit.end_token_id), model)
        if len(request.bad_words) > MOST_WORDS:
            _refuse_items("bad_words", len(request.bad_words), MOST_WORDS, "words")
        check_bad_words(request.bad_words)
        _check_logprobs(request)
        return CheckedRequest(model, stop_token_ids, sampling, self._max_tokens(request, model, tenant))

    async def revise(
        self,
        request: gateway_pb2.GenerateRequest,
        stored: gateway_pb2.StoredRequest,
        tenant: Tenant,
        prompt: Sequence[int],
        change: gateway_pb2.RollbackRequest,
    ) -> tuple[ResolvedRequest, tuple[int, ...]]:
        """Resolve the rest of a session that is rolled back, and the tokens of the edit. Changes `request`."""
        if change.HasField("seed"):
            request.sampling.seed = change.seed
        if change.HasField("max_tokens"):
            request.max_tokens = change.max_tokens
        resolved = await self.resolve(request, tenant, prompt=prompt)
        most = resolved.max_length - len(resolved.prompt)
        if change.WhichOneof("edit") == "text":
            _check_edit(self._tokenizer.least_tokens(change.text), change, most)
            edit: Sequence[int] = await self._tokenizer.encode_middle(change.text, tenant) if change.text else []
        else:
            edit = change.token_ids.token_ids
        _check_edit(len(edit), change, most)
        _check_tokens("token_ids", max(edit, default=0), resolved.model)
        written = min(stored.edited_tokens, change.output_tokens) + len(edit)
        tenant.check_prompt(len(prompt) + written)
        revised = replace(
            resolved,
            revision=stored.revision + 1,
            edited=written,
            response=stored.response,
            follows_prompt=stored.follows_prompt,
        )
        return revised, tuple(edit)

    def _check_priority(self, priority: int, tenant: Tenant) -> None:
        own = tenant.limits.least_priority
        least = self._config.least_priority if own is None else own
        if priority < least:
            raise PermissionDenied(
                f"priority {priority} is kept for others; claim {least} or more.",
                reason="PRIORITY",
            )

    async def _structure(
        self, request: gateway_pb2.GenerateRequest, asked: CheckedRequest, tenant: Tenant
    ) -> StructuredOutput | None:
        """Compiles the structure, so that an error in it is returned before anything else is spent."""
        structure = proto_conversion.structure_from_proto(request.structured_output)
        if structure is None and request.HasField("structured_output"):
            raise InvalidArgument(
                "structured_output has no format that this server knows; set json_schema, json_object, regex or "
                "grammar, or leave it out.",
                reason="STRUCTURE_UNKNOWN",
                field="structured_output",
            )
        if structure is None:
            return None
        if not set(asked.model.eos_token_ids) <= set(asked.stop_token_ids):
            raise InvalidArgument(
                "A structured output ends, and then nothing but an end-of-text token can follow; leave ignore_eos out.",
                reason="ENDLESS_GRAMMAR",
                field="ignore_eos",
            )
        await self._tokenizer.compile(structure, asked.model, tenant.salt(request.cache_salt), tenant.id)
        return structure

    def _texts(self, request: gateway_pb2.GenerateRequest, prompt: Sequence[int] | None) -> Texts:
        """The request's own prompt, or that of a session that was admitted before."""
        if prompt is not None:
            return Texts(tokens_of(prompt, goes_on=False))  # the record says whether
        kind = request.WhichOneof("input")
        if kind == "prompt_token_ids":
            return Texts(tokens_of(request.prompt_token_ids.token_ids))  # copied once its length is known to be right
        if kind == "chat":
            return Texts(message_of(self._tokenizer, request.chat))
        return Texts(text_of(self._tokenizer, request.prompt) if request.prompt else tokens_of([]))

    def _predicted(self, asked: gateway_pb2.Prediction) -> RequestText:
        """The request's own prediction; empty where nothing is predicted."""
        if asked.WhichOneof("content") == "text" and asked.text:
            return part_of(self._tokenizer, asked.text)
        return tokens_of(asked.token_ids.token_ids)

    def _max_tokens(self, request: gateway_pb2.GenerateRequest, model: types_pb2.ModelInfo, tenant: Tenant) -> int:
        asked = request.max_tokens if request.HasField("max_tokens") else None
        if asked == 0:
            raise InvalidArgument(
                "max_tokens is 0; ask for at least one token.", reason="NO_TOKENS", field="max_tokens"
            )
        return tenant.most_output(asked, self._config.max_tokens_default or model.max_length)

    def _check_stops(self, request: gateway_pb2.GenerateRequest) -> None:
        config = self._config
        if len(request.stop) > config.max_stop_strings:
            _refuse_items("stop", len(request.stop), config.max_stop_strings, "strings")
        sizes = [len(stop.encode()) for stop in request.stop]
        if sizes and not 0 < min(sizes) <= max(sizes) <= config.max_stop_bytes:
            raise InvalidArgument(
                f"Every stop string must have 1 to {config.max_stop_bytes} bytes.",
                reason="STOP_STRING",
                field="stop",
                numbers={"least": 1, "most": config.max_stop_bytes},
            )

    def _stop_token_ids(
        self, request: gateway_pb2.GenerateRequest, model: types_pb2.ModelInfo, *, again: bool
    ) -> tuple[int, ...]:
        """A stored request names the model's own too, and those of its template."""
        asked, ends, most = request.stop_token_ids, model.eos_token_ids, self._config.max_stop_tokens
        if not again and (len(asked) > most + len(ends) or sum(token not in ends for token in asked) > most):
            _refuse_items("stop_token_ids", len(asked), most, "tokens")
        if asked:
            _check_tokens("stop_token_ids", max(asked), model)
        own = () if request.ignore_eos else ends
        return tuple(dict.fromkeys([*own, *asked]))


def _check_allowed(
    request: gateway_pb2.GenerateRequest,
    sampling: SamplingParams,
    stop_token_ids: Sequence[int],
    model: types_pb2.ModelInfo,
) -> None:
    structured, least = request.HasField("structured_output"), request.min_tokens > 0
    sampling.check_allowed(stop_token_ids, model.vocabulary_size, structured=structured, least=least)


def _check_room(texts: Texts, predicted: RequestText, model: types_pb2.ModelInfo, tenant: Tenant) -> None:
    """Raises a typed error for texts that are too long however they are encoded, and for a tenant without room for the
    request. Most of what is refused is refused here, for nothing."""
    _check_prompt_length(texts.prompt.least, model, "at least ")
    _check_prediction_length(predicted.least, model, "at least ")
    tenant.check_prompt(max(texts.prompt.least, predicted.least), "at least ")
    if not texts.room.asked:
        tenant.check_room(texts.choices * (texts.prompt.least + 1), texts.room.choices)
        texts.room.asked = True


async def _encode(
    prompt: RequestText, predicted: RequestText, model: types_pb2.ModelInfo, tenant: Tenant
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Token ids of the prompt and of the prediction. Raises InvalidArgument for what the model or the tenant's key does
    not take, and what encoding raises."""
    most = tenant.most_prompt(model.max_length - 1)
    tokens = prompt.kept(_checked_prompt(await prompt.tokens(most, tenant), model))
    await give_way(len(tokens))
    prediction = predicted.kept(_checked_prediction(await predicted.tokens(most, tenant), model))
    tenant.check_prompt(max(len(tokens), len(prediction)))
    return tokens, prediction


async def _kept(keep: Keep, prompt: int) -> bytes:
    response = await keep()
    check_annotation(response, prompt)
    return response


def _checked_prompt(tokens: Sequence[int], model: types_pb2.ModelInfo) -> Sequence[int]:
    if not tokens:
        raise InvalidArgument(
            "The prompt is empty; send at least one token of text.", reason="EMPTY_PROMPT", field="prompt"
        )
    _check_prompt_length(len(tokens), model)
    _check_tokens("prompt_token_ids", max(tokens), model)
    return tokens


def _check_prompt_length(tokens: int, model: types_pb2.ModelInfo, least: str = "") -> None:
    """`least`: "at least " where there may be more."""
    if tokens >= model.max_length:
        raise InvalidArgument(
            f"This model's maximum context length is {model.max_length} tokens, output included. However, the prompt "
            f"has {least}{tokens} tokens; shorten it.",
            reason="PROMPT_TOO_LONG",
            field="prompt",
            numbers={"tokens": tokens, "limit": model.max_length - 1},
        )


def _checked_prediction(tokens: Sequence[int], model: types_pb2.ModelInfo) -> Sequence[int]:
    _check_prediction_length(len(tokens), model)
    _check_tokens("prediction", max(tokens, default=0), model)
    return tokens


def _check_prediction_length(tokens: int, model: types_pb2.ModelInfo, least: str = "") -> None:
    if tokens > model.max_length:
        raise InvalidArgument(
            f"The prediction has {least}{tokens} tokens and {model.name} holds {model.max_length}; shorten it.",
            reason="PREDICTION_TOO_LONG",
            field="prediction",
            numbers={"tokens": tokens, "limit": model.max_length},
        )


def _check_edit(tokens: int, change: gateway_pb2.RollbackRequest, most: int) -> None:
    """`tokens`: of the edit, at least. `most`: output tokens of the session."""
    if tokens > most - change.output_tokens:
        raise InvalidArgument(
            f"{change.output_tokens} tokens and an edit of {tokens} exceed max_tokens, {most}; keep fewer, or "
            "raise max_tokens.",
            reason="EDIT_TOO_LONG",
            field="output_tokens",
            numbers={"tokens": change.output_tokens + tokens, "limit": most},
        )


def _check_message(tokens: int, model: types_pb2.ModelInfo) -> None:
    """Raises InvalidArgument for a session whose opening, with all its output, would be too large for a verifier's
    stream. `tokens`: of prompt, output and prediction."""
    most = _most_sent(model)
    if tokens > most:
        raise InvalidArgument(
            f"Prompt, output and prediction may become {tokens} tokens, and {most} of this vocabulary can be sent to a "
            "verifier; send a shorter prompt or prediction, or lower max_tokens.",
            reason=MESSAGE_TOO_LARGE,
            field="max_tokens",
            numbers={"tokens": tokens, "limit": most},
        )


def _most_sent(model: types_pb2.ModelInfo) -> int:
    """Most tokens of a session that a message to a verifier holds."""
    return (MAX_ITEM_BYTES - MOST_OTHER_BYTES) // _token_bytes(model.vocabulary_size)


def _token_bytes(vocabulary_size: int) -> int:
    """Most bytes of a token's id in a message: seven bits each."""
    return max(1, -(-(vocabulary_size - 1).bit_length() // 7))


def _sampling(
    options: gateway_pb2.SamplingOptions, model: types_pb2.ModelInfo, seed: Callable[[], int]
) -> SamplingParams:
    sampling = proto_conversion.sampling_of_client(options, seed)
    for name, highest in proto_conversion.highest_tokens(options).items():
        _check_tokens(f"sampling.{name}", highest, model)
    return sampling


def _check_logprobs(request: gateway_pb2.GenerateRequest) -> None:
    if request.top_logprobs > MAX_TOP_LOGPROBS:
        raise InvalidArgument(
            f"top_logprobs is {request.top_logprobs}; ask for at most {MAX_TOP_LOGPROBS}.",
            reason=NUMBER_OUT_OF_RANGE,
            field="top_logprobs",
            numbers={"least": 0, "most": MAX_TOP_LOGPROBS},
        )
    if request.top_logprobs and not request.logprobs:
        raise InvalidArgument(
            "top_logprobs without logprobs; set logprobs too.", reason=FIELD_MISSING, field="logprobs"
        )


def _check_shown(request: gateway_pb2.GenerateRequest, model: types_pb2.ModelInfo) -> None:
    shown = request.shown_special_token_ids
    if len(shown) > MOST_SHOWN:
        _refuse_items("shown_special_token_ids", len(shown), MOST_SHOWN, "tokens")
    if shown:
        _check_tokens("shown_special_token_ids", max(shown), model)


def _check_min_tokens(request: gateway_pb2.GenerateRequest, most: int) -> None:
    if request.min_tokens > most:
        raise InvalidArgument(
            f"min_tokens is {request.min_tokens} and at most {most} tokens can follow; ask for less.",
            reason=NUMBER_OUT_OF_RANGE,
            field="min_tokens",
            numbers={"least": 0, "most": most},
        )
    if request.min_tokens and request.HasField("structured_output"):
        raise InvalidArgument(
            "A structured output ends where its format ends; leave min_tokens out.",
            reason=FIELDS_CONFLICT,
            field="min_tokens",
        )


def check_annotation(annotation: bytes, prompt: int) -> None:
    """Raises InvalidArgument for more than a session may keep beside a prompt of so many tokens."""
    most = MAX_ANNOTATION_BYTES + ANNOTATION_BYTES_A_TOKEN * prompt
    if len(annotation) > most:
        raise InvalidArgument(
            f"annotation has {len(annotation)} bytes and this prompt allows {most}; send less.",
            reason="LABEL_TOO_LONG",
            field="annotation",
            numbers={"bytes": len(annotation), "limit": most},
        )


def _check_labels(request: gateway_pb2.GenerateRequest) -> None:
    for name in ("workload", "cache_salt"):
        size = len(getattr(request, name).encode())
        if size > proto_conversion.MAX_LABEL_BYTES:
            raise InvalidArgument(
                f"{name} has {size} bytes; send at most {proto_conversion.MAX_LABEL_BYTES}.",
                reason="LABEL_TOO_LONG",
                field=name,
                numbers={"bytes": size, "limit": proto_conversion.MAX_LABEL_BYTES},
            )


def _check_names(request: gateway_pb2.GenerateRequest) -> None:
    """Names are looked up and quoted in errors: their size is checked first."""
    names = request.speculation.drafters
    if len(names) > MAX_NAMES:
        _refuse_items("speculation.drafters", len(names), MAX_NAMES, "names")
    check_name("model", request.model)
    for name in names:
        check_name("speculation.drafters", name)


def check_name(field: str, name: str) -> None:
    if len(name) > MAX_NAME_CHARACTERS:
        raise InvalidArgument(
            f"names of models and drafters have at most {MAX_NAME_CHARACTERS} characters.",
            reason="LABEL_TOO_LONG",
            field=field,
            numbers={"characters": len(name), "limit": MAX_NAME_CHARACTERS},
        )


def _refuse_items(field: str, items: int, limit: int, kind: str) -> NoReturn:
    raise InvalidArgument(
        f"{field} holds more than {limit} {kind}; send fewer.",
        reason=TOO_MANY_ITEMS,
        field=field,
        numbers={"items": items, "limit": limit},
    )


def _check_tokens(name: str, highest: int, model: types_pb2.ModelInfo) -> None:
    if highest >= model.vocabulary_size:
        raise InvalidArgument(
            f"{name.removeprefix('sampling.')} holds token {highest}, and {model.name} has tokens below "
            f"{model.vocabulary_size}; use its own tokenizer.",
            reason="TOKEN_OUT_OF_RANGE",
            field=name,
            numbers={"token": highest, "most": model.vocabulary_size - 1},
        )
