"""Suites of tasks run through lm-eval on any causal language model."""
