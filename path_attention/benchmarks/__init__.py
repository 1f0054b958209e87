"""Speed and memory beside peers; no figure of an operator that is wrong."""
