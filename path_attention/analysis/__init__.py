"""The theory, executed and measured."""
