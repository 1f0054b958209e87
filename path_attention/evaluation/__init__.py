"""Evaluation of language models: perplexity by length, and its figures."""
