"""Properties of a checkpoint by others, in default settings (`tools.real_model`). Slow tests are `make test-real`."""
