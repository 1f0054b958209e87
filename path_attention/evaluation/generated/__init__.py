"""Samples made here: RULER, BABILong-style chains, PhoneBook; with their metrics."""
