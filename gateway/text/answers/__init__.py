"""A model's answer, read as it comes: text, reasoning, and calls of tools. `formats` has one reader for each format in
which a family of models writes calls; `grammar` holds an output to what a request forces."""
