"""What strangers send, mutated: `targets` have one function for each kind of input, `corpus` inputs that reach far.

`make fuzz` runs atheris, which follows the coverage of our code. `test_corpus` is the short form in CI, without it: the
corpus, and a few thousand changes of it, the same in each run.
"""
