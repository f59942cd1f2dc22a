"""Whether a pair of target and drafter is worth serving: what `slipstream doctor` measures, and the rule for it."""
