"""The cost table of a model on this machine, measured as a verifier measures its own at its start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

STEP_TOKENS = 512


def measured(model: str, dtype: str, quantisation: str, device: str, seconds: float) -> Mapping[str, Sequence[object]]:
    """What `Table` is made of; `model` as `slipstream.engine.factory` names it, a target or a draft model."""
    # Loads torch, which a plan does without.
    from slipstream.engine.factory import open_engine
    from slipstream.engine.models.spread import Spread
    from verifier_svc.estimators.cost_curve import BUCKETS, CostCurve
    from verifier_svc.estimators.cost_measurement import SESSIONS, measure

    curve = CostCurve()
    engine = open_engine(model, dtype, quantisation=quantisation, spread=Spread(device=device))
    measure(curve, engine, STEP_TOKENS, seconds)
    return {
        "tokens": BUCKETS,
        "sessions": SESSIONS,
        "seconds": [[round(curve.seconds(tokens, sessions), 7) for tokens in BUCKETS] for sessions in SESSIONS],
    }
