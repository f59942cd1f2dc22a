"""Findings of `slipstream doctor --target` about a pair: misfits, warnings, and the verdict."""

from __future__ import annotations

import statistics
from collections import defaultdict

from measurement.pairs.figures import FEW_ROUNDS, PairCheck, Round, bucket
from measurement.pairs.verdict import LEAST_GAIN, MOST_LEVEL, PairFigures
from slipstream.engine.engine import Engine
from slipstream.errors import SlipstreamError
from slipstream.proposers.base import OpenedProposer
from slipstream.proposers.registry import METHODS
from slipstream.rpc import proto_conversion
from slipstream.tokenizer.pairing import TRANSLATE, check_vocabularies, padding_note
from slipstream.tokenizer.vocabulary import is_local, model_folder, read_json, share_vocabulary, template_warning

DECAY, SHIFT, HEAT = 0.7, 0.6, 0.75
"""Shares of an acceptance length beyond 1 below which long contexts, the worst slice and high temperature are worth a
warning."""
SHORT_ANSWER = 16
GOOD = 0.6
"""Share of right candidates that a larger draft is assumed to have, where its size is named."""


def check_files(check: PairCheck) -> None:
    """Compares the tokenizers before weights are read: a wrong pair of large models costs seconds, not minutes. Raises
    FailedPrecondition for a broken one."""
    if not METHODS[check.method].compares_tokenizers or check.translated:
        return
    try:
        check_vocabularies(check.draft, check.target)
    except SlipstreamError as error:
        if error.reason != "VOCABULARY_MISMATCH":
            raise
        check.note("WRONG", f"vocabulary: {error.message}")


def decide(check: PairCheck) -> None:
    """The verdict, by the rule of training's reports, and what to try where it is no."""
    if check.wrong:
        check.verdict = "what is wrong above keeps the drafter from serving."
        if any("vocabulary:" in sentence for _, sentence in check.findings):
            check.remedies.append("`--translate`, which measures the drafter as it translates its tokens")
        return
    if not check.rounds:
        check.verdict = "all texts at temperature 0 loop, so acceptance was not measured."
        check.remedies.append("prompts like your users', in the form of the target's chat template (--prompts)")
        return
    measured = PairFigures(check.places, check.first, check.speed_up)
    check.ships, check.verdict = measured.ships, f"{measured.reason}."
    if measured.ships:
        return
    if not measured.enough:
        check.remedies.append("more prompts (--prompts FILE) or longer answers (--max-tokens)")
    elif check.draft_parameters:
        check.remedies += _of_model(check, measured)
    elif METHODS[check.method].needs_model:
        check.remedies.append(f"a longer training on your texts (`slipstream train {check.method}`), or a draft model")
    else:
        check.remedies.append("a draft model of the target's family (--draft), or a head (`slipstream train eagle`)")


def _of_model(check: PairCheck, measured: PairFigures) -> list[str]:
    most = largest_draft(check)
    found = f"{check.draft_parameters / 1e6:.0f} M parameters"
    remedies = []
    if most > 1.2 * check.draft_parameters and not measured.accurate:
        remedies.append(
            f"a larger draft with the target's tokenizer: this one has {found}, and up to about {most / 1e6:.0f} M pay "
            f"here where {GOOD:.0%} of the candidates are right"
        )
        if not check.translated:
            remedies.append("a draft of another family with `--translate`, where the target's has no such size")
    elif measured.best[1] < LEAST_GAIN and most < check.draft_parameters:
        remedies.append(
            f"a smaller draft: this one has {found}, and more than about {most / 1e6:.0f} M do not pay here even where "
            f"{GOOD:.0%} of the candidates are right"
        )
    remedies.append("a head on the target's hidden states (`slipstream train eagle`), or the lookup `--drafter suffix`")
    return remedies


def largest_draft(check: PairCheck) -> int:
    """Parameters of a draft that reaches LEAST_GAIN at most sizes of a round, if its calls take time as this one's do
    for each parameter, and GOOD of its candidates are right."""
    longest_ms = 0.0
    for count, verify_ms in check.verify_ms.items():
        length = (1.0 - GOOD ** (count + 1)) / (1.0 - GOOD)
        longest_ms = max(longest_ms, (length * check.plain_ms / LEAST_GAIN - verify_ms) / count)
    return round(check.draft_parameters * longest_ms / check.draft_ms) if check.draft_ms else 0


def check_models(check: PairCheck, engine: Engine, opened: OpenedProposer) -> None:
    target, draft = proto_conversion.model_to_proto(engine.model), proto_conversion.model_to_proto(opened.model)
    if not share_vocabulary(draft, target):
        check.note("WRONG", f"vocabulary: {draft.name} and {target.name} have different ones; choose a pair with one "
                   f"tokenizer, or {TRANSLATE}.")  # fmt: skip
        return
    size = f"{target.vocabulary_size} tokens"
    padded = padding_note(check.draft, check.target) if check.draft_parameters else ""
    shared = "translated" if check.translated else "shared" if draft.vocabulary_fingerprint else "the method has none"
    check.note("ok", f"vocabulary: {size}, {shared}" + (f"; {padded}" if padded and not check.translated else ""))
    warning = template_warning(draft, target)
    check.note("warning" if warning else "ok", f"chat template: {warning or 'nothing differs'}")
    longest, known = target.max_length, min(draft.max_length, _trained_length(check.draft) or draft.max_length)
    if known < longest:
        check.note("warning", f"context: the target takes {longest} tokens, the drafter {known}: beyond, it proposes "
                   "nothing, or badly.")  # fmt: skip
    else:
        check.note("ok", f"context: both take the target's {longest} tokens")


def _trained_length(draft: str) -> int:
    """Context length in tokens that a head's configuration names as the one it was trained for; 0 where it names
    none."""
    if not draft or not is_local(draft) or not (model_folder(draft) / "config.json").is_file():
        return 0
    found = read_json(model_folder(draft) / "config.json")
    return int((found.get("transformer_layer_config") or found).get("max_position_embeddings") or 0)


def warn_of_level(check: PairCheck) -> None:
    """Warns of a draft model that is too slow in any place; lookups and heads are called once for all levels."""
    level = check.draft_ms / check.plain_ms
    if check.draft_parameters and level > MOST_LEVEL:
        found = f"a level takes {level:.2g} of the target's pass; above {MOST_LEVEL:g}"
        check.note("warning", f"slow drafter: {found} it does not pay on a machine of its own either.")


def warn(check: PairCheck, rounds: list[Round], lengths: list[int], engine: Engine) -> None:
    cold, hot = check.by_temperature.get("0", 1.0) - 1.0, check.by_temperature.get("1", 1.0) - 1.0
    if cold and hot < HEAT * cold:
        check.note("warning", f"temperature: a round accepts {hot:.1f} candidates at temperature 1, {cold:.1f} at 0.")
    if statistics.median(lengths) < SHORT_ANSWER:
        half = f"{statistics.median(lengths):.0f}"
        check.note("warning", f"short outputs: half of the answers have at most {half} tokens: their time is prefill.")
    greedy = [each for each in rounds if not each.temperature]
    for kind, found, share, what in (
        ("long context", check.by_context, DECAY, "acceptance decays with the context"),
        ("domain shift", check.by_slice, SHIFT, "the drafter knows some of your work far less"),
    ):
        counts: dict[str, int] = defaultdict(int)
        for each in greedy:
            counts[bucket(each.context) if kind == "long context" else each.workload] += 1
        known = {name: length - 1.0 for name, length in found.items() if counts[name] >= FEW_ROUNDS}
        if len(known) < 2:
            continue
        top = next(iter(known)) if kind == "long context" else max(known, key=lambda name: known[name])
        worst = min(known, key=lambda name: known[name])
        if known[worst] < share * known[top]:
            check.note("warning", f"{kind}: {what}: {known[worst]:.1f} candidates a round in {worst}, "
                       f"{known[top]:.1f} in {top}.")  # fmt: skip
    longest = max((each.context for each in rounds), default=0)
    if longest < engine.model.max_length // 4:
        whole = engine.model.max_length
        check.note("warning", f"long context: the prompts reach {longest} of {whole} tokens; acceptance may decay "
                   "beyond them: give --prompts as long as your users'.")  # fmt: skip
