"""The step loop, its planner and KV admission; imports the StepExecutor interface, the wait policy and estimators."""
