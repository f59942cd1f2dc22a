"""The StepExecutor interface and its implementations; imports acceptance rules and the engine, not the scheduler."""
