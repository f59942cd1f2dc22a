"""From tokens to text: detokenizer, stop strings, transcript."""
