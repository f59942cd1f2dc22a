"""The drafting loop of drafters and of verifiers that draft themselves; imports its siblings above and no service."""
