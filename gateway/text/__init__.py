"""From tokens to text: detokenizer, stop strings, transcript. Imports only `slipstream`."""
