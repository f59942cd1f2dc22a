"""Report of `slipstream doctor --target`: one screen that ends with the verdict, or JSON."""

from __future__ import annotations

import json
from dataclasses import asdict

from measurement.pairs.figures import PairCheck


def render(check: PairCheck) -> str:
    """One screen."""
    lines = [
        f"{check.target} + {check.draft or 'nothing'} ({check.method}), {check.rounds} rounds at temperature 0",
        "",
    ]
    lines += [f"{level:<8}{sentence}" for level, sentence in check.findings]
    if check.rounds:
        lines += ["", "accepted by depth      " + "  ".join(f"{share:.0%}" for share in check.by_depth)]
        for name, found in (
            ("tokens a round, slice", check.by_slice),
            ("  by context", check.by_context),
            ("  by temperature", check.by_temperature),
        ):
            lines.append(f"{name:<23}" + "  ".join(f"{key} {value:.2f}" for key, value in found.items()))
        lines.append(
            f"{'time':<23}plain {check.plain_ms:.1f} ms, draft {check.draft_ms:.1f} ms a call, with candidates "
            + "  ".join(f"{count}: {took:.1f}" for count, took in check.verify_ms.items())
        )
        speeds = "  ".join(f"{count}: {gain:.2f}" for count, gain in check.speed_up.items())
        lines.append(f"{'speed-up':<23}{speeds}")
    if check.texts:
        lines.append(f"{'texts':<23}{check.distinct:.0%} of their 4-grams are distinct; {_looping(check)}")
    if check.memory:
        memory = "  ".join(f"{name} {_size(count)}" for name, count in check.memory.items())
        lines.append(f"{'memory':<23}{memory}")
    lines += ["", f"{'ship' if check.ships else 'do not ship'}: {check.verdict}"]
    lines += [f"  try {remedy}" for remedy in check.remedies]
    return "\n".join(lines)


def _looping(check: PairCheck) -> str:
    """Counts of looping texts by temperature: a sum over temperatures hides that often all texts of one loop, and none
    of another."""
    if not check.looping:
        return "none loops"
    of_each = check.texts // len(check.looping_by_temperature)
    counts = (
        f"{count} of {of_each} texts at temperature {each} loop" for each, count in check.looping_by_temperature.items()
    )
    return f"{', '.join(counts)}; those are left out"


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def as_json(check: PairCheck) -> str:
    return json.dumps(asdict(check), indent=2)
