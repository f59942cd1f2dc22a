"""From tokens to text: detokenizer, stop strings, transcript. Imports `work` and what is below it."""
