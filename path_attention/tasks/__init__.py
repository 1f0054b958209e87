"""Synthetic tasks: what an encoding can compute, where the right answer is known exactly."""
